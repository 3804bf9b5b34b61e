"""Sample the next token of every sequence in a batch.

On CPUs, each row uses the fastest method that supports its parameters. The choice depends only on the row, so results
do not depend on the rest of the batch. On GPUs with a sampling kernel, the kernel handles all parameters.
"""

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

import torch

from lorax_server.kernels import Ops, reference
from lorax_server.kernels.device import is_host
from lorax_server.sampling.batch import History, SamplerOutput, SequenceSampling, TokenMasks, TopTokens
from lorax_server.sampling.general_sampler import GeneralSampler
from lorax_server.sampling.kernel_sampler import KernelSampler, can_sample
from lorax_server.sampling.topk_sampler import TopKSampler

__all__ = ["History", "Sampler", "SamplerOutput", "SequenceSampling", "TokenMasks", "TopTokens"]


class _Method(Enum):
    GREEDY = auto()
    TOP_K = auto()  # samples from a few candidates
    GENERAL = auto()


class _MethodGroup(NamedTuple):
    """The rows that use the same sampling method."""

    method: _Method
    rows: list[int]
    row_indices: torch.Tensor
    sampler: TopKSampler | GeneralSampler | None


class Sampler:
    """Samples tokens for one batch composition. Create a new sampler when the batch changes."""

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
        methods = [sampling.cached("method", _choose_method, sampling) for sampling in sequence_sampling]
        # On GPUs, one sampler handles the whole batch.
        self._batch_sampler: KernelSampler | GeneralSampler | None = None
        self._groups: list[_MethodGroup] = []
        if is_host(torch.device(device)):
            self._groups = self._group_rows_by_method(methods)
        elif ops.sample_tokens is not None and can_sample(sequence_sampling, vocab_size):
            self._batch_sampler = KernelSampler(sequence_sampling, vocab_size, device, ops.sample_tokens)
        else:
            self._batch_sampler = GeneralSampler(sequence_sampling, vocab_size, device)
        samplers = [self._batch_sampler, *(group.sampler for group in self._groups)]
        self.needs_history = any(method is not _Method.GREEDY for method in methods)
        # True if any parameter depends on previous tokens.
        self.needs_tokens = any(
            each.needs_tokens for each in samplers if isinstance(each, GeneralSampler | KernelSampler)
        )

    @torch.inference_mode()
    def __call__(self, logits: torch.Tensor, history: History | None, masks: TokenMasks | None = None) -> SamplerOutput:
        """Sample a token for each row of `logits`, `[rows, vocabulary]`, without modifying `logits`."""
        return self.sample(logits, history, masks)

    def sample(self, logits: torch.Tensor, history: History | None, masks: TokenMasks | None = None) -> SamplerOutput:
        """Sample tokens, like `__call__`. The caller must already be in inference mode, because entering this mode
        takes microseconds.
        """
        assert history is not None or not self.needs_history, "`history` is required for these sampling parameters"
        if self._batch_sampler is not None:
            return self._batch_sampler(logits, history, masks)
        if len(self._groups) == 1:
            return self._sample_group(self._groups[0], logits, history, masks)
        token_ids = torch.empty(len(logits), dtype=torch.int64)
        logprobs, alternatives = torch.empty(len(logits)), None
        for group in self._groups:
            row_indices = group.row_indices
            row_history = None if history is None else history.select(row_indices)
            row_masks = None if masks is None else masks.select(row_indices, len(logits))
            sampled = self._sample_group(group, logits[row_indices], row_history, row_masks)
            token_ids[row_indices], logprobs[row_indices] = sampled.token_ids, sampled.logprobs
            if sampled.alternatives is not None:
                alternatives = sampled.alternatives.renumber(group.rows)
        return SamplerOutput(token_ids, logprobs, alternatives)

    def _sample_group(
        self, group: _MethodGroup, logits: torch.Tensor, history: History | None, masks: TokenMasks | None
    ) -> SamplerOutput:
        if isinstance(group.sampler, GeneralSampler):
            return group.sampler(logits, history, masks)
        if group.sampler is None:
            numbered = () if masks is None else masks.to_op_args(len(logits))
            sampled = SamplerOutput(*self._ops.choose_greedy(logits, *numbered), None)
            if masks is not None:
                self._set_raw_logprobs(group, logits, sampled)
            return sampled
        assert history is not None
        return group.sampler(logits, history, masks)

    def _set_raw_logprobs(self, group: _MethodGroup, logits: torch.Tensor, sampled: SamplerOutput) -> None:
        """Store log probabilities without masks in `sampled`, for rows that set `raw_logprobs`."""
        raw = [index for index, row in enumerate(group.rows) if self._sequence_sampling[row].params.raw_logprobs]
        if raw:
            rows = slice(None) if len(raw) == len(group.rows) else torch.tensor(raw)
            sampled.logprobs[rows] = self._ops.gather_logprobs(logits[rows], sampled.token_ids[rows, None]).squeeze(-1)

    def _group_rows_by_method(self, methods: Sequence[_Method]) -> list[_MethodGroup]:
        """Group the rows of a CPU batch by sampling method. Groups that are not greedy have their own samplers."""
        groups = []
        for method in dict.fromkeys(methods) or [_Method.GENERAL]:
            rows = [row for row, row_method in enumerate(methods) if row_method is method]
            row_sampling = [self._sequence_sampling[row] for row in rows]
            sampler: TopKSampler | GeneralSampler | None = None
            if method is _Method.TOP_K:
                sampler = TopKSampler(row_sampling, self._vocab_size, self._ops)
            elif method is _Method.GENERAL:
                sampler = GeneralSampler(row_sampling, self._vocab_size)
            groups.append(_MethodGroup(method, rows, torch.tensor(rows, dtype=torch.int64), sampler))
        return groups


def _choose_method(sampling: SequenceSampling) -> _Method:
    """Return the fastest CPU method that supports these parameters."""
    params = sampling.params
    if sampling.modifies_logits or params.num_alternatives:
        return _Method.GENERAL
    if params.is_greedy:
        return _Method.GREEDY
    is_cut = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    return _Method.TOP_K if is_cut and params.typical_p == 1 else _Method.GENERAL
