"""The inputs and outputs of samplers: parameters, token history, token masks and sampled tokens."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from lorax_server.errors import InputError
from lorax_server.kernels.ops import DerivedCache
from lorax_server.kernels.reference import unpack_masks
from lorax_server.types import Alternatives, SamplingParams, StopParams

MIN_TEMPERATURE = 1e-6  # dividing by a lower temperature would overflow to infinity


@dataclass(frozen=True)
class SequenceSampling(DerivedCache):
    """A sequence's sampling parameters, with a cache for values that samplers derive from them.

    Tokens in `all_stop_token_ids` are not sampled before `min_new_tokens` tokens have been generated.
    """

    params: SamplingParams
    min_new_tokens: int = 0
    all_stop_token_ids: frozenset[int] = frozenset()
    derived: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def from_params(cls, params: SamplingParams, stop: StopParams) -> "SequenceSampling":
        return cls(params, stop.min_new_tokens, stop.all_stop_token_ids)

    @property
    def has_penalties(self) -> bool:
        params = self.params
        return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0

    @property
    def modifies_logits(self) -> bool:
        """Return True if penalties, biases, a watermark or forbidden tokens change the logits of this sequence."""
        is_limited = self.min_new_tokens > 0 and bool(self.all_stop_token_ids)
        return is_limited or self.has_penalties or self.params.watermark or bool(self.params.logit_bias)

    def list_biases(self, vocab_size: int) -> list[tuple[int, float]]:
        """Return the logit biases as (token ID, bias) pairs. Raise if a token ID is not in the vocabulary."""
        for token_id in self.params.logit_bias:
            if token_id >= vocab_size:
                raise InputError(f"`logit_bias`: token ID {token_id} is outside the vocabulary of {vocab_size}")
        return list(self.params.logit_bias.items())


class History(NamedTuple):
    """The previous tokens of each row. Entries of `token_ids` beyond a row's length are ignored."""

    lengths: torch.Tensor  # [rows] number of prompt and generated tokens
    prompt_lengths: torch.Tensor  # [rows]
    token_ids: torch.Tensor | None = None  # [rows, tokens]; required if `Sampler.needs_tokens`

    def select(self, rows: torch.Tensor) -> "History":
        """Return the history of some rows."""
        token_ids = None if self.token_ids is None else self.token_ids[rows]
        return History(self.lengths[rows], self.prompt_lengths[rows], token_ids)


class TokenMasks(NamedTuple):
    """Token masks for some rows. Forbidden tokens get a score of -inf. Raw log probabilities ignore masks."""

    rows: torch.Tensor  # [masked rows] int64, unique
    masks: torch.Tensor  # [masked rows, words] int32: one bit per token, lowest bit first; 1 means allowed

    def allowed(self, vocab_size: int) -> torch.Tensor:
        """Return the masks as a bool tensor, `[masked rows, vocabulary]`."""
        return unpack_masks(self.masks, vocab_size)

    def to_op_args(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the masks, and each row's mask index `[num_rows]`, which is -1 for rows without a mask."""
        mask_indices = torch.full((num_rows,), -1, device=self.rows.device)
        mask_indices[self.rows] = torch.arange(len(self.rows), device=self.rows.device)
        return self.masks, mask_indices

    def select(self, rows: torch.Tensor, num_rows: int) -> "TokenMasks":
        """Return the masks of `rows`, renumbered from 0. The batch has `num_rows` rows."""
        new_rows = torch.arange(len(rows), device=rows.device)
        mask_indices = torch.full((num_rows,), len(rows), device=rows.device)  # unselected rows map to an extra row
        mask_indices[rows] = new_rows
        masks = self.masks.new_full((len(rows) + 1, self.masks.shape[1]), -1)
        masks[mask_indices[self.rows]] = self.masks
        return TokenMasks(new_rows, masks[:-1])


class SamplerOutput(NamedTuple):
    """The sampled tokens and their log probabilities, which are NaN in rows whose logits contain NaN."""

    token_ids: torch.Tensor  # [rows]
    logprobs: torch.Tensor  # [rows] float32
    alternatives: "TopTokens | None"


class TopTokens(NamedTuple):
    """The most likely tokens of each row that requests alternatives."""

    counts: dict[int, int]  # number of alternatives by row, in tensor order
    token_ids: torch.Tensor  # [rows with alternatives, maximum count]
    logprobs: torch.Tensor

    def renumber(self, rows: Sequence[int]) -> "TopTokens":
        """Return a copy in which row `i` becomes row `rows[i]` of a larger batch."""
        return self._replace(counts={rows[row]: count for row, count in self.counts.items()})

    def by_row(self) -> dict[int, Alternatives]:
        rows = zip(self.counts.items(), self.token_ids.tolist(), self.logprobs.tolist(), strict=True)
        return {row: Alternatives(ids[:count], logprobs[:count]) for (row, count), ids, logprobs in rows}
