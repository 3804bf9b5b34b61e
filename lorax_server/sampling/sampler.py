"""Choose the next token of many sequences at once, each with sampling parameters of its own.

On a CPU the common ways of choosing have code of their own, which does less. It is a sequence's own parameters that
decide which code serves it, so that its result does not depend on its neighbours. On some GPUs a kernel does it all.
"""

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

import torch

from lorax_server.kernels import Ops, reference
from lorax_server.kernels.device import is_host
from lorax_server.sampling.batch import History, Sampled, SequenceSampling, TokenMasks, TopTokens
from lorax_server.sampling.few import FewSampler
from lorax_server.sampling.general import GeneralSampler
from lorax_server.sampling.rows import RowSampler, can_choose

__all__ = ["History", "Sampled", "Sampler", "SequenceSampling", "TokenMasks", "TopTokens"]


class _Way(Enum):
    LIKELIEST = auto()
    FEW = auto()  # drawn from a few of the likeliest
    GENERAL = auto()


class _Part(NamedTuple):
    """The rows that are chosen in one way."""

    way: _Way
    rows: list[int]
    places: torch.Tensor
    chooser: FewSampler | GeneralSampler | None


class Sampler:
    """Made for a batch, used until the batch changes."""

    def __init__(
        self,
        sequence_sampling: Sequence[SequenceSampling],
        vocab_size: int,
        device: torch.device | str = "cpu",
        ops: Ops = reference,
    ) -> None:
        self._sequence_sampling = sequence_sampling
        self._vocab_size = vocab_size
        self._ops = ops
        ways = [sampling.once("way", _way_of, sampling) for sampling in sequence_sampling]
        # Of a batch that is chosen as a whole, on a GPU.
        self._whole: RowSampler | GeneralSampler | None = None
        self._parts: list[_Part] = []
        if is_host(torch.device(device)):
            self._parts = self._divide(ways)
        elif ops.choose_rows is not None and can_choose(sequence_sampling, vocab_size):
            self._whole = RowSampler(sequence_sampling, vocab_size, device, ops.choose_rows)
        else:
            self._whole = GeneralSampler(sequence_sampling, vocab_size, device)
        choosers = [self._whole, *(part.chooser for part in self._parts)]
        self.needs_history = any(way is not _Way.LIKELIEST for way in ways)
        # True if any parameter depends on the tokens of the sequences.
        self.needs_tokens = any(each.needs_tokens for each in choosers if isinstance(each, GeneralSampler | RowSampler))

    @torch.inference_mode()
    def __call__(self, logits: torch.Tensor, history: History | None, masks: TokenMasks | None = None) -> Sampled:
        """Choose from [rows, vocabulary] logits, which stay as they are."""
        return self.choose(logits, history, masks)

    def choose(self, logits: torch.Tensor, history: History | None, masks: TokenMasks | None = None) -> Sampled:
        """Do the same for a caller that is in inference mode, which takes microseconds to enter."""
        assert history is not None or not self.needs_history, "these rows need to know how long they are"
        if self._whole is not None:
            return self._whole(logits, history, masks)
        if len(self._parts) == 1:
            return self._choose_part(self._parts[0], logits, history, masks)
        token_ids = torch.empty(len(logits), dtype=torch.int64)
        logprobs, alternatives = torch.empty(len(logits)), None
        for part in self._parts:
            places = part.places
            own_history = None if history is None else history.take(places)
            own_masks = None if masks is None else masks.take(places, len(logits))
            sampled = self._choose_part(part, logits[places], own_history, own_masks)
            token_ids[places], logprobs[places] = sampled.token_ids, sampled.logprobs
            if sampled.alternatives is not None:
                alternatives = sampled.alternatives.rename(part.rows)
        return Sampled(token_ids, logprobs, alternatives)

    def _choose_part(
        self, part: _Part, logits: torch.Tensor, history: History | None, masks: TokenMasks | None
    ) -> Sampled:
        if isinstance(part.chooser, GeneralSampler):
            return part.chooser(logits, history, masks)
        if part.chooser is None:
            numbered = () if masks is None else masks.by_number(len(logits))
            sampled = Sampled(*self._ops.choose_greedy(logits, *numbered), None)
            if masks is not None:
                self._take_raw_logprobs(part, logits, sampled)
            return sampled
        assert history is not None
        return part.chooser(logits, history, masks)

    def _take_raw_logprobs(self, part: _Part, logits: torch.Tensor, sampled: Sampled) -> None:
        """Take the log probabilities of rows that ask for raw ones from the scores without masks."""
        raw = [place for place, row in enumerate(part.rows) if self._sequence_sampling[row].params.raw_logprobs]
        if raw:
            rows = slice(None) if len(raw) == len(part.rows) else torch.tensor(raw)
            sampled.logprobs[rows] = self._ops.find_logprobs(logits[rows], sampled.token_ids[rows, None]).squeeze(-1)

    def _divide(self, ways: Sequence[_Way]) -> list[_Part]:
        """Make the parts of a batch on a CPU."""
        parts = []
        for way in dict.fromkeys(ways) or [_Way.GENERAL]:
            rows = [row for row, its_way in enumerate(ways) if its_way is way]
            own = [self._sequence_sampling[row] for row in rows]
            chooser: FewSampler | GeneralSampler | None = None
            if way is _Way.FEW:
                chooser = FewSampler(own, self._vocab_size, self._ops)
            elif way is _Way.GENERAL:
                chooser = GeneralSampler(own, self._vocab_size)
            parts.append(_Part(way, rows, torch.tensor(rows, dtype=torch.int64), chooser))
        return parts


def _way_of(sampling: SequenceSampling) -> _Way:
    """Return the way of a sequence on a CPU."""
    params = sampling.params
    if sampling.changes_scores or params.num_alternatives:
        return _Way.GENERAL
    if params.is_greedy:
        return _Way.LIKELIEST
    is_cut = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    return _Way.FEW if is_cut and params.typical_p == 1 else _Way.GENERAL
