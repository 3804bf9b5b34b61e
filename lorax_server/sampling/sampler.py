"""Choose the next token of many sequences at once, each with sampling parameters of its own.

On a CPU the common ways of choosing have code of their own, which does less. It is a sequence's own parameters that
decide which code serves it, so that its result does not depend on its neighbours.
"""

from collections.abc import Sequence
from enum import Enum, auto
from typing import Protocol

import torch

from lorax_server.sampling.batch import History, RowSampling, Sampled, TopTokens
from lorax_server.sampling.few import FewSampler
from lorax_server.sampling.general import GeneralSampler
from lorax_server.sampling.score_ops import REFERENCE, ScoreOps

__all__ = ["History", "RowSampling", "Sampled", "Sampler", "TopTokens"]


class _Way(Enum):
    LIKELIEST = auto()
    FEW = auto()  # drawn from a few of the likeliest
    GENERAL = auto()


class _Chooser(Protocol):
    def __call__(self, logits: torch.Tensor, history: History, /) -> Sampled: ...


class Sampler:
    """Made for a batch, used until the batch changes."""

    def __init__(
        self,
        row_sampling: Sequence[RowSampling],
        vocab_size: int,
        device: torch.device | str = "cpu",
        ops: ScoreOps = REFERENCE,
    ) -> None:
        """`ops` serve batches on a CPU."""
        self._ops = ops
        is_cpu = torch.device(device).type == "cpu"
        ways = [_way_of(sampling) if is_cpu else _Way.GENERAL for sampling in row_sampling]
        self._parts: list[tuple[list[int], torch.Tensor, _Chooser]] = []
        self.needs_history = any(way is not _Way.LIKELIEST for way in ways)
        self.needs_tokens = False  # true if any parameter depends on the tokens of the sequences
        for way in dict.fromkeys(ways) or [_Way.GENERAL]:
            rows = [row for row, its_way in enumerate(ways) if its_way is way]
            own = [row_sampling[row] for row in rows]
            chooser: _Chooser = self._choose_likeliest
            if way is _Way.FEW:
                chooser = FewSampler(own, vocab_size, ops)
            elif way is _Way.GENERAL:
                chooser = general = GeneralSampler(own, vocab_size, device)
                self.needs_tokens = general.needs_tokens
            self._parts.append((rows, torch.tensor(rows, dtype=torch.int64), chooser))

    def __call__(self, logits: torch.Tensor, history: History | None) -> Sampled:
        """Choose from [rows, vocabulary] logits, which stay as they are."""
        if history is None:
            assert not self.needs_history, "these rows need to know how long they are"
            return self._choose_likeliest(logits)
        return self._choose_by_parts(logits, history)

    @torch.inference_mode()
    def _choose_by_parts(self, logits: torch.Tensor, history: History) -> Sampled:
        if len(self._parts) == 1:
            return self._parts[0][-1](logits, history)
        token_ids = torch.empty(len(logits), dtype=torch.int64)
        logprobs, alternatives = torch.empty(len(logits)), None
        for rows, index, chooser in self._parts:
            sampled = chooser(logits[index], history.take(index))
            token_ids[index], logprobs[index] = sampled.token_ids, sampled.logprobs
            if sampled.alternatives is not None:
                alternatives = sampled.alternatives.rename(rows)
        return Sampled(token_ids, logprobs, alternatives)

    def _choose_likeliest(self, logits: torch.Tensor, _: History | None = None) -> Sampled:
        return Sampled(*self._ops.choose_greedy(logits), None)


def _way_of(sampling: RowSampling) -> _Way:
    """Return the way of a sequence on a CPU."""
    params = sampling.params
    has_penalties = params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
    is_limited = sampling.min_new_tokens > 0 and bool(sampling.ending_token_ids)
    if has_penalties or is_limited or params.watermark or params.logit_bias or params.num_alternatives:
        return _Way.GENERAL
    if params.is_greedy:
        return _Way.LIKELIEST
    is_cut = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    return _Way.FEW if is_cut and params.typical_p == 1 else _Way.GENERAL
