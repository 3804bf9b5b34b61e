"""Top-k, top-p and min-p sampling on CPUs from a small set of candidate tokens.

These filters nearly always keep few tokens, so working on the best candidates avoids several passes over the whole
vocabulary. If a row needs more candidates, it falls back to `GeneralSampler`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lorax_server.kernels import Ops
from lorax_server.sampling.batch import MIN_TEMPERATURE, History, SamplerOutput, SequenceSampling, TokenMasks
from lorax_server.sampling.general_sampler import GeneralSampler
from lorax_server.sampling.random_uniform import HostUniforms

NUM_CANDIDATES = 256  # candidates per row; finding twice as many takes 50% longer

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
_Masks = tuple[torch.Tensor, torch.Tensor] | tuple[()]  # token masks and the mask index of each row


class _Candidates(NamedTuple):
    """The most likely tokens of each row in descending order. All arrays are `[rows, tokens]`."""

    token_ids: Ints
    scores: Floats  # logits divided by the temperature
    weights: Floats  # probabilities divided by the best token's probability


class TopKSampler:
    """A sampler for rows that set only temperature, top-k, top-p and min-p.

    Sums are computed sequentially in float64, so results do not depend on thread count or other rows.
    """

    def __init__(self, sequence_sampling: Sequence[SequenceSampling], vocab_size: int, ops: Ops) -> None:
        params = [sampling.params for sampling in sequence_sampling]
        self._sequence_sampling = sequence_sampling
        self._vocab_size = vocab_size
        self._ops = ops
        self._num_candidates = min(NUM_CANDIDATES, vocab_size)
        self._temperatures = torch.tensor([max(p.temperature, MIN_TEMPERATURE) for p in params])
        self._top_k = np.array([min(p.top_k or vocab_size, vocab_size) for p in params])
        self._uses_k = self._top_k < vocab_size
        self._uses_p = np.array([p.top_p < 1 for p in params])
        # Rounded to float32 to match `GeneralSampler`.
        self._mass = 1 - np.array([1 - p.top_p for p in params], np.float32).astype(np.float64)
        self._min_p = np.array([p.min_p for p in params], np.float32).astype(np.float64)
        self._top_p_rows = np.flatnonzero(self._uses_p & ~self._uses_k)  # rows with top-p and without top-k
        self._raw = np.flatnonzero([p.raw_logprobs for p in params])
        self._uniforms = HostUniforms([p.seed for p in params])

    def __call__(self, logits: torch.Tensor, history: History, masks: TokenMasks | None = None) -> SamplerOutput:
        numbered = () if masks is None else masks.to_op_args(len(logits))
        candidates = self._find_candidates(logits, numbered)
        with np.errstate(invalid="ignore", divide="ignore"):  # rows with NaN fall back to GeneralSampler below
            keep_mask = self._filter_candidates(candidates, self._sum_weights(logits, candidates, numbered))
            token_ids, logprobs = self._draw_candidates(candidates, keep_mask, history)
        self._set_raw_logprobs(logits, token_ids, logprobs)
        incomplete = np.flatnonzero(~self._is_complete(candidates, keep_mask))
        if len(incomplete):
            rows = torch.from_numpy(incomplete)
            general_sampler = GeneralSampler(
                [self._sequence_sampling[row] for row in incomplete.tolist()], self._vocab_size
            )
            row_masks = None if masks is None else masks.select(rows, len(logits))
            sampled = general_sampler(logits[rows], history.select(rows), row_masks)
            token_ids[incomplete], logprobs[incomplete] = sampled.token_ids.numpy(), sampled.logprobs.numpy()
        return SamplerOutput(torch.from_numpy(token_ids), torch.from_numpy(logprobs), None)

    def _find_candidates(self, logits: torch.Tensor, masks: _Masks) -> _Candidates:
        best, token_ids = self._ops.top_k_scores(logits, self._num_candidates, *masks)
        scores = best.div_(self._temperatures[:, None]).double().numpy()
        with np.errstate(invalid="ignore"):
            return _Candidates(token_ids.numpy(), scores, np.exp(scores - scores[:, :1]))

    def _sum_weights(self, logits: torch.Tensor, candidates: _Candidates, masks: _Masks) -> Floats:
        """Return each row's total weight over all tokens, `[rows]`. Only rows with top-p use the result."""
        if self._num_candidates == self._vocab_size:
            return candidates.weights.cumsum(-1)[:, -1]
        totals = np.ones(len(logits))
        if len(self._top_p_rows):
            temperatures, best = self._temperatures, torch.from_numpy(candidates.token_ids[self._top_p_rows, :1])
            if len(self._top_p_rows) < len(logits):
                rows = torch.from_numpy(self._top_p_rows)
                logits, temperatures = logits[rows], temperatures[rows]
                masks = (masks[0], masks[1][rows]) if masks else ()
            logprobs = self._ops.gather_logprobs(logits, best, temperatures, *masks).numpy()
            totals[self._top_p_rows] = np.exp(-logprobs[:, 0].astype(np.float64))
        return totals

    def _filter_candidates(self, candidates: _Candidates, totals: Floats) -> Bools:
        """Return a bool array `[rows, candidates]` that is True for candidates that top-k, top-p and min-p keep."""
        row_indices = np.arange(len(candidates.scores))
        worst = candidates.scores[row_indices, np.minimum(self._top_k, self._num_candidates) - 1]
        keep_mask: Bools = (candidates.scores >= worst[:, None]) | ~self._uses_k[:, None]
        if self._uses_p.any():
            weights = candidates.weights * keep_mask
            summed = weights.cumsum(-1)
            totals = np.where(self._uses_k, summed[:, -1], totals)
            is_before = (summed - weights < (self._mass * totals)[:, None]) & keep_mask
            counts = np.where(self._uses_p, np.maximum(is_before.sum(-1), 1), keep_mask.sum(-1))
            keep_mask = self._keep_best(candidates, keep_mask, counts)
        return keep_mask & (candidates.weights >= self._min_p[:, None])

    def _keep_best(self, candidates: _Candidates, keep_mask: Bools, counts: Ints) -> Bools:
        """Return `keep_mask`, reduced to the `counts` best tokens of each row. If tokens are equally likely, higher
        token IDs are kept.
        """
        last = candidates.scores[np.arange(len(counts)), counts - 1][:, None]
        keep_mask = keep_mask & (candidates.scores >= last)
        for row in np.flatnonzero(keep_mask.sum(-1) > counts):
            equals = np.flatnonzero(candidates.scores[row] == last[row])
            by_id = equals[candidates.token_ids[row, equals].argsort()]
            keep_mask[row, by_id[: keep_mask[row].sum() - counts[row]]] = False
        return keep_mask

    def _is_complete(self, candidates: _Candidates, keep_mask: Bools) -> Bools:
        """Return a bool array `[rows]` that is True for rows where no token outside the candidates could be kept."""
        complete: Bools = np.isfinite(candidates.scores[:, 0])
        if self._num_candidates < self._vocab_size:
            worst = np.where(keep_mask, candidates.scores, np.inf).min(-1)
            is_last = (candidates.scores[:, -1] < worst) & (~self._uses_k | (self._top_k <= self._num_candidates))
            complete &= is_last | np.isneginf(candidates.scores[:, -1])  # all other tokens are masked
        return complete

    def _draw_candidates(
        self, candidates: _Candidates, keep_mask: Bools, history: History
    ) -> tuple[Ints, npt.NDArray[np.float32]]:
        """Sample by inverse transform in vocabulary order. Return token IDs and log probabilities, both `[rows]`."""
        row_indices = np.arange(len(keep_mask))
        width = int(np.flatnonzero(keep_mask.any(0)).max(initial=0)) + 1
        token_ids = np.where(keep_mask, candidates.token_ids, self._vocab_size)[:, :width]
        order = token_ids.argsort(-1)
        weights = np.take_along_axis(candidates.weights[:, :width] * keep_mask[:, :width], order, -1)
        summed = weights.cumsum(-1)
        shares = self._uniforms.draw_at((history.lengths - history.prompt_lengths).numpy()) * summed[:, -1]
        candidate_indices = np.minimum((summed <= shares[:, None]).sum(-1), np.maximum(keep_mask.sum(-1), 1) - 1)
        chosen = token_ids[row_indices, order[row_indices, candidate_indices]]
        return chosen, np.log(weights[row_indices, candidate_indices] / summed[:, -1]).astype(np.float32)

    def _set_raw_logprobs(self, logits: torch.Tensor, token_ids: Ints, logprobs: npt.NDArray[np.float32]) -> None:
        if len(self._raw):
            of_raw = logits if len(self._raw) == len(logits) else logits[torch.from_numpy(self._raw)]
            chosen = torch.from_numpy(token_ids[self._raw, None]).clamp(max=self._vocab_size - 1)
            logprobs[self._raw] = self._ops.gather_logprobs(of_raw, chosen).squeeze(-1).numpy()
