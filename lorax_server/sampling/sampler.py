"""Choose the next token of many sequences at once, each with sampling parameters of its own.

On a CPU the common ways of choosing have code of their own, which does less. It is a sequence's own parameters that
decide which code serves it, so that its result does not depend on its neighbours. On some GPUs a kernel does it all.
"""

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

import torch

from lorax_server.kernels.hopper.sampling import MAX_VOCAB
from lorax_server.sampling.batch import History, RowSampling, Sampled, TokenMasks, TopTokens
from lorax_server.sampling.few import FewSampler
from lorax_server.sampling.general import GeneralSampler
from lorax_server.sampling.rows import RowSampler
from lorax_server.sampling.score_ops import REFERENCE, ScoreOps

__all__ = ["History", "RowSampling", "Sampled", "Sampler", "TokenMasks", "TopTokens"]


class _Way(Enum):
    LIKELIEST = auto()
    FEW = auto()  # drawn from a few of the likeliest
    GENERAL = auto()


class _Part(NamedTuple):
    """The rows that are chosen in one way; those of `GENERAL` may have masks."""

    way: _Way
    rows: list[int]
    places: torch.Tensor
    chooser: FewSampler | GeneralSampler | None


class Sampler:
    """Made for a batch, used until the batch changes."""

    def __init__(
        self,
        row_sampling: Sequence[RowSampling],
        vocab_size: int,
        device: torch.device | str = "cpu",
        ops: ScoreOps = REFERENCE,
    ) -> None:
        self._row_sampling = row_sampling
        self._vocab_size = vocab_size
        self._ops = ops
        ways = [sampling.once("way", _way_of, sampling) for sampling in row_sampling]
        # Of a batch that is chosen as a whole, on a GPU.
        self._whole: RowSampler | GeneralSampler | None = None
        self._parts: list[_Part] = []
        self._masked: tuple[frozenset[int], list[_Part]] = frozenset(), []  # the parts when these rows had masks
        if torch.device(device).type == "cpu":
            self._parts = self._divide(ways)
        elif ops.choose_rows is not None and vocab_size <= MAX_VOCAB:
            self._whole = RowSampler(row_sampling, vocab_size, device, ops.choose_rows)
        else:
            self._whole = GeneralSampler(row_sampling, vocab_size, device)
        choosers = [self._whole, *(part.chooser for part in self._parts)]
        self.needs_history = any(way is not _Way.LIKELIEST for way in ways)
        # True if any parameter depends on the tokens of the sequences.
        self.needs_tokens = any(each.needs_tokens for each in choosers if isinstance(each, GeneralSampler | RowSampler))

    @torch.inference_mode()
    def __call__(self, logits: torch.Tensor, history: History | None, masks: TokenMasks | None = None) -> Sampled:
        """Choose from [rows, vocabulary] logits, which stay as they are."""
        assert history is not None or not self.needs_history, "these rows need to know how long they are"
        if self._whole is not None:
            return self._whole(logits, history, masks)
        if masks is not None:
            return self._choose_masked(logits, history, masks)
        return self._choose_parts(self._parts, logits, history, None)

    def _choose_masked(self, logits: torch.Tensor, history: History | None, masks: TokenMasks) -> Sampled:
        """Choose on a CPU: what is not allowed has no chance, and all else is as without masks.

        Log probabilities that are raw are of the scores without masks. Alternatives that are raw need both scores.
        """
        masked = masks.rows.tolist()
        raw = [row for row in masked if self._row_sampling[row].params.raw_logprobs]
        if any(self._row_sampling[row].params.num_alternatives for row in raw):
            return self._choose_parts(self._divide_masked(frozenset(masked)), logits, history, masks)
        sampled = self._choose_parts(self._parts, masks.apply(logits), history, None)
        if raw:
            scores = logits if len(raw) == len(logits) else logits[raw]
            rows = slice(None) if len(raw) == len(logits) else raw
            sampled.logprobs[rows] = self._ops.find_logprobs(scores, sampled.token_ids[rows, None]).squeeze(-1)
        return sampled

    def _choose_parts(
        self, parts: list[_Part], logits: torch.Tensor, history: History | None, masks: TokenMasks | None
    ) -> Sampled:
        if len(parts) == 1:
            return self._choose_part(parts[0], logits, history, masks)
        token_ids = torch.empty(len(logits), dtype=torch.int64)
        logprobs, alternatives = torch.empty(len(logits)), None
        for part in parts:
            places = part.places
            own_history = None if history is None else history.take(places)
            own_masks = masks.take(places, len(logits)) if masks is not None and part.way is _Way.GENERAL else None
            sampled = self._choose_part(part, logits[places], own_history, own_masks)
            token_ids[places], logprobs[places] = sampled.token_ids, sampled.logprobs
            if sampled.alternatives is not None:
                alternatives = sampled.alternatives.rename(part.rows)
        return Sampled(token_ids, logprobs, alternatives)

    def _choose_part(
        self, part: _Part, logits: torch.Tensor, history: History | None, masks: TokenMasks | None
    ) -> Sampled:
        if part.chooser is None:
            return Sampled(*self._ops.choose_greedy(logits), None)
        if isinstance(part.chooser, GeneralSampler):
            return part.chooser(logits, history, masks)
        assert history is not None
        return part.chooser(logits, history)

    def _divide(self, ways: Sequence[_Way]) -> list[_Part]:
        """Make the parts of a batch on a CPU."""
        parts = []
        for way in dict.fromkeys(ways) or [_Way.GENERAL]:
            rows = [row for row, its_way in enumerate(ways) if its_way is way]
            own = [self._row_sampling[row] for row in rows]
            chooser: FewSampler | GeneralSampler | None = None
            if way is _Way.FEW:
                chooser = FewSampler(own, self._vocab_size, self._ops)
            elif way is _Way.GENERAL:
                chooser = GeneralSampler(own, self._vocab_size)
            parts.append(_Part(way, rows, torch.tensor(rows, dtype=torch.int64), chooser))
        return parts

    def _divide_masked(self, masked: frozenset[int]) -> list[_Part]:
        """Make the parts where rows with masks go the general way, as those of a structure do for many steps."""
        if self._masked[0] != masked or not self._masked[1]:
            ways = [_Way.GENERAL if i in masked else _way_of(each) for i, each in enumerate(self._row_sampling)]
            self._masked = masked, self._divide(ways)
        return self._masked[1]


def _way_of(sampling: RowSampling) -> _Way:
    """Return the way of a sequence on a CPU."""
    params = sampling.params
    if sampling.changes_scores or params.num_alternatives:
        return _Way.GENERAL
    if params.is_greedy:
        return _Way.LIKELIEST
    is_cut = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    return _Way.FEW if is_cut and params.typical_p == 1 else _Way.GENERAL
