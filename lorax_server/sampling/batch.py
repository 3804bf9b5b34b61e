"""The sequences of a batch that sampling needs to know of, and the tokens that it chooses for them."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from lorax_server.errors import InputError
from lorax_server.kernels.ops import Remembers
from lorax_server.kernels.reference import unpack_masks
from lorax_server.types import Alternatives, SamplingParams, StopParams

COLDEST = 1e-6  # a lower temperature would make scores infinite, and the likeliest token as unlikely as the others


@dataclass(frozen=True)
class SequenceSampling(Remembers):
    """The parameters of one sequence, and what samplers derive of them, since a sequence is in many batches. Until
    `min_new_tokens` its `ending_token_ids` are not chosen."""

    params: SamplingParams
    min_new_tokens: int = 0
    ending_token_ids: frozenset[int] = frozenset()
    derived: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, params: SamplingParams, stop: StopParams) -> "SequenceSampling":
        return cls(params, stop.min_new_tokens, stop.ending_token_ids)

    @property
    def has_penalties(self) -> bool:
        params = self.params
        return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0

    @property
    def changes_scores(self) -> bool:
        """Tell whether scores are changed before the likeliest token is looked for."""
        is_limited = self.min_new_tokens > 0 and bool(self.ending_token_ids)
        return is_limited or self.has_penalties or self.params.watermark or bool(self.params.logit_bias)

    def list_biases(self, vocab_size: int) -> list[tuple[int, float]]:
        """List the tokens that have a bias, and their biases."""
        for token_id in self.params.logit_bias:
            if token_id >= vocab_size:
                raise InputError(f"`logit_bias`: token {token_id} is beyond the vocabulary of {vocab_size}")
        return list(self.params.logit_bias.items())


class History(NamedTuple):
    """The tokens of the sequences so far. Tokens from a row's length on are not read."""

    lengths: torch.Tensor  # [rows] prompt and generated
    prompt_lengths: torch.Tensor  # [rows]
    token_ids: torch.Tensor | None = None  # [rows, tokens]; needed where `Sampler.needs_tokens`

    def take(self, rows: torch.Tensor) -> "History":
        """Return the history of some rows."""
        token_ids = None if self.token_ids is None else self.token_ids[rows]
        return History(self.lengths[rows], self.prompt_lengths[rows], token_ids)


class TokenMasks(NamedTuple):
    """The tokens that some rows may choose from. It is as if all others had a score of -infinity; log probabilities
    that are raw do not change."""

    rows: torch.Tensor  # [masked rows] int64, each once
    words: torch.Tensor  # [masked rows, words] int32: a bit for each token, the first the lowest; set if it is allowed

    def allowed(self, vocab_size: int) -> torch.Tensor:
        """Return [masked rows, vocabulary] bool."""
        return unpack_masks(self.words, vocab_size)

    def by_number(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the words of all masks, and [num_rows] the number of each row's mask; -1 where it has none."""
        numbers = torch.full((num_rows,), -1, device=self.rows.device)
        numbers[self.rows] = torch.arange(len(self.rows), device=self.rows.device)
        return self.words, numbers

    def take(self, rows: torch.Tensor, num_rows: int) -> "TokenMasks":
        """Return the masks of some rows of `num_rows`, by their numbers among these."""
        numbers = torch.arange(len(rows), device=rows.device)
        places = torch.full((num_rows,), len(rows), device=rows.device)  # rows that are not taken go to a place after
        places[rows] = numbers
        words = self.words.new_full((len(rows) + 1, self.words.shape[1]), -1)
        words[places[self.rows]] = self.words
        return TokenMasks(numbers, words[:-1])


class Sampled(NamedTuple):
    """The chosen tokens. A log probability is NaN where the scores were."""

    token_ids: torch.Tensor  # [rows]
    logprobs: torch.Tensor  # [rows] float32
    alternatives: "TopTokens | None"


class TopTokens(NamedTuple):
    """The likeliest tokens of the rows that ask for them."""

    counts: dict[int, int]  # by row, in the order of the tensors
    token_ids: torch.Tensor  # [asking rows, most asked for]
    logprobs: torch.Tensor

    def rename(self, rows: Sequence[int]) -> "TopTokens":
        """Give rows the numbers that they have in a larger batch."""
        return self._replace(counts={rows[row]: count for row, count in self.counts.items()})

    def by_row(self) -> dict[int, Alternatives]:
        rows = zip(self.counts.items(), self.token_ids.tolist(), self.logprobs.tolist(), strict=True)
        return {row: Alternatives(ids[:count], logprobs[:count]) for (row, count), ids, logprobs in rows}
