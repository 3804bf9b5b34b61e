"""Draw from a few of the likeliest tokens, on a CPU.

Top-k, top-p and min-p nearly always leave few tokens. Those are found first, and all else looks at them alone, instead
of several times at the whole vocabulary. Rows that cannot be decided so are left to `GeneralSampler`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lorax_server.kernels import Ops
from lorax_server.sampling.batch import COLDEST, History, Sampled, SequenceSampling, TokenMasks
from lorax_server.sampling.general import GeneralSampler
from lorax_server.sampling.uniform import HostUniforms

NUM_FEW = 256  # torch takes half as long again to find twice as many

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
_Masks = tuple[torch.Tensor, torch.Tensor] | tuple[()]  # words and numbers, as `Ops` take them


class _Few(NamedTuple):
    """The likeliest tokens of each row, the best first: all arrays are [rows, tokens]."""

    token_ids: Ints
    scores: Floats  # divided by the temperature
    weights: Floats  # probabilities, divided by that of the best


class FewSampler:
    """The parameters of rows that are drawn, with top-k, top-p or min-p and no others but the temperature.

    Sums are float64 and go from one token to the next, so that neither threads nor other rows change them.
    """

    def __init__(self, sequence_sampling: Sequence[SequenceSampling], vocab_size: int, ops: Ops) -> None:
        params = [sampling.params for sampling in sequence_sampling]
        self._sequence_sampling = sequence_sampling
        self._vocab_size = vocab_size
        self._ops = ops
        self._num_few = min(NUM_FEW, vocab_size)
        self._temperatures = torch.tensor([max(p.temperature, COLDEST) for p in params])
        self._top_k = np.array([min(p.top_k or vocab_size, vocab_size) for p in params])
        self._uses_k = self._top_k < vocab_size
        self._uses_p = np.array([p.top_p < 1 for p in params])
        # As float32, like all parameters of `GeneralSampler`.
        self._mass = 1 - np.array([1 - p.top_p for p in params], np.float32).astype(np.float64)
        self._min_p = np.array([p.min_p for p in params], np.float32).astype(np.float64)
        self._summed = np.flatnonzero(self._uses_p & ~self._uses_k)  # rows whose top-p is that of all tokens
        self._raw = np.flatnonzero([p.raw_logprobs for p in params])
        self._uniforms = HostUniforms([p.seed for p in params])

    def __call__(self, logits: torch.Tensor, history: History, masks: TokenMasks | None = None) -> Sampled:
        numbered = () if masks is None else masks.by_number(len(logits))
        few = self._find_few(logits, numbered)
        with np.errstate(invalid="ignore", divide="ignore"):  # of rows without numbers, which are not decided here
            kept = self._cut(few, self._finish_record(logits, few, numbered))
            token_ids, logprobs = self._draw(few, kept, history)
        self._take_raw_logprobs(logits, token_ids, logprobs)
        undecided = np.flatnonzero(~self._is_decided(few, kept))
        if len(undecided):
            rows = torch.from_numpy(undecided)
            general = GeneralSampler([self._sequence_sampling[row] for row in undecided.tolist()], self._vocab_size)
            own_masks = None if masks is None else masks.take(rows, len(logits))
            sampled = general(logits[rows], history.take(rows), own_masks)
            token_ids[undecided], logprobs[undecided] = sampled.token_ids.numpy(), sampled.logprobs.numpy()
        return Sampled(torch.from_numpy(token_ids), torch.from_numpy(logprobs), None)

    def _find_few(self, logits: torch.Tensor, masks: _Masks) -> _Few:
        best, token_ids = self._ops.find_best(logits, self._num_few, *masks)
        scores = best.div_(self._temperatures[:, None]).double().numpy()
        with np.errstate(invalid="ignore"):
            return _Few(token_ids.numpy(), scores, np.exp(scores - scores[:, :1]))

    def _finish_record(self, logits: torch.Tensor, few: _Few, masks: _Masks) -> Floats:
        """Return [rows] the weights of all tokens that top-p counts, added up, where they are not among the few."""
        if self._num_few == self._vocab_size:
            return few.weights.cumsum(-1)[:, -1]
        totals = np.ones(len(logits))
        if len(self._summed):
            temperatures, best = self._temperatures, torch.from_numpy(few.token_ids[self._summed, :1])
            if len(self._summed) < len(logits):
                rows = torch.from_numpy(self._summed)
                logits, temperatures = logits[rows], temperatures[rows]
                masks = (masks[0], masks[1][rows]) if masks else ()
            logprobs = self._ops.find_logprobs(logits, best, temperatures, *masks).numpy()
            totals[self._summed] = np.exp(-logprobs[:, 0].astype(np.float64))
        return totals

    def _cut(self, few: _Few, totals: Floats) -> Bools:
        """Apply top-k, top-p and min-p; return which tokens are kept."""
        numbers = np.arange(len(few.scores))
        worst = few.scores[numbers, np.minimum(self._top_k, self._num_few) - 1]
        kept: Bools = (few.scores >= worst[:, None]) | ~self._uses_k[:, None]
        if self._uses_p.any():
            weights = few.weights * kept
            summed = weights.cumsum(-1)
            totals = np.where(self._uses_k, summed[:, -1], totals)
            is_before = (summed - weights < (self._mass * totals)[:, None]) & kept
            counts = np.where(self._uses_p, np.maximum(is_before.sum(-1), 1), kept.sum(-1))
            kept = self._keep_best(few, kept, counts)
        return kept & (few.weights >= self._min_p[:, None])

    def _keep_best(self, few: _Few, kept: Bools, counts: Ints) -> Bools:
        """Keep so many of each row; of equals those of higher id."""
        last = few.scores[np.arange(len(counts)), counts - 1][:, None]
        kept = kept & (few.scores >= last)
        for row in np.flatnonzero(kept.sum(-1) > counts):
            equals = np.flatnonzero(few.scores[row] == last[row])
            by_id = equals[few.token_ids[row, equals].argsort()]
            kept[row, by_id[: kept[row].sum() - counts[row]]] = False
        return kept

    def _is_decided(self, few: _Few, kept: Bools) -> Bools:
        """Tell for each row whether the tokens that were not looked at cannot be among those that are kept."""
        decided: Bools = np.isfinite(few.scores[:, 0])
        if self._num_few < self._vocab_size:
            worst = np.where(kept, few.scores, np.inf).min(-1)
            is_last = (few.scores[:, -1] < worst) & (~self._uses_k | (self._top_k <= self._num_few))
            decided &= is_last | np.isneginf(few.scores[:, -1])  # then no other has a chance, as under a narrow mask
        return decided

    def _draw(self, few: _Few, kept: Bools, history: History) -> tuple[Ints, npt.NDArray[np.float32]]:
        """Return [rows] the token at which weights, summed in the order of the vocabulary, pass a random share of all,
        and [rows] its log probability."""
        numbers = np.arange(len(kept))
        width = int(np.flatnonzero(kept.any(0)).max(initial=0)) + 1
        token_ids = np.where(kept, few.token_ids, self._vocab_size)[:, :width]
        order = token_ids.argsort(-1)
        weights = np.take_along_axis(few.weights[:, :width] * kept[:, :width], order, -1)
        summed = weights.cumsum(-1)
        shares = self._uniforms.at((history.lengths - history.prompt_lengths).numpy()) * summed[:, -1]
        places = np.minimum((summed <= shares[:, None]).sum(-1), np.maximum(kept.sum(-1), 1) - 1)
        chosen = token_ids[numbers, order[numbers, places]]
        return chosen, np.log(weights[numbers, places] / summed[:, -1]).astype(np.float32)

    def _take_raw_logprobs(self, logits: torch.Tensor, token_ids: Ints, logprobs: npt.NDArray[np.float32]) -> None:
        if len(self._raw):
            of_raw = logits if len(self._raw) == len(logits) else logits[torch.from_numpy(self._raw)]
            chosen = torch.from_numpy(token_ids[self._raw, None]).clamp(max=self._vocab_size - 1)
            logprobs[self._raw] = self._ops.find_logprobs(of_raw, chosen).squeeze(-1).numpy()
