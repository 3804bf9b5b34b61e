"""Sampling ops on a CPU, which compute greedy tokens, log probabilities and top-k scores.

`choose_greedy` and `gather_logprobs` sum in the same order, so both return bitwise equal log probabilities.
"""

import torch

from lorax_server.kernels.cpu.library import DTYPES, Library


class CpuSampling:
    """Sampling ops for CPUs. Logits are `[rows, vocabulary]` of any dtype."""

    _library: Library

    def choose_greedy(
        self,
        logits: torch.Tensor,
        token_masks: torch.Tensor | None = None,
        mask_indices: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Implement `Ops.choose_greedy`. If a row contains NaN, return its first NaN token and the log
        probability NaN.
        """
        logits = _with_unit_stride(logits)
        rows, vocabulary = logits.shape
        token_masks, mask_indices = _check_masks(logits, token_masks, mask_indices)
        token_ids = torch.empty(rows, dtype=torch.int64)
        logprobs = torch.empty(rows, dtype=torch.float32)
        self._library.choose_greedy(
            *(DTYPES[logits.dtype], logits.data_ptr(), logits.stride(0), rows, vocabulary),
            *_mask_args(token_masks, mask_indices),
            *(token_ids.data_ptr(), logprobs.data_ptr()),
        )
        return token_ids, logprobs

    def gather_logprobs(
        self,
        logits: torch.Tensor,
        token_ids: torch.Tensor,
        temperatures: torch.Tensor | None = None,
        token_masks: torch.Tensor | None = None,
        mask_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Implement `Ops.gather_logprobs`. Token IDs outside the vocabulary get NaN."""
        logits, token_ids = _with_unit_stride(logits), token_ids.contiguous()
        rows, count = token_ids.shape
        if token_ids.dtype != torch.int64 or rows != len(logits):
            raise ValueError(f"token_ids must be {len(logits)} rows of int64 (got {rows} rows of {token_ids.dtype})")
        if temperatures is not None:
            if temperatures.shape != (rows,) or temperatures.dtype != torch.float32:
                raise ValueError(f"temperatures must be ({rows},) float32")
            temperatures = temperatures.contiguous()
        token_masks, mask_indices = _check_masks(logits, token_masks, mask_indices)
        logprobs = torch.empty(rows, count, dtype=torch.float32)
        self._library.gather_logprobs(
            *(DTYPES[logits.dtype], logits.data_ptr(), logits.stride(0), *logits.shape),
            *(None if temperatures is None else temperatures.data_ptr(), *_mask_args(token_masks, mask_indices)),
            *(token_ids.data_ptr(), count, logprobs.data_ptr()),
        )
        return logprobs

    def top_k_scores(
        self,
        logits: torch.Tensor,
        count: int,
        token_masks: torch.Tensor | None = None,
        mask_indices: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Implement `Ops.top_k_scores`. If scores are equal, the lower token ID comes first. Missing tokens have ID 0
        and score -infinity.
        """
        logits = _with_unit_stride(logits)
        rows, vocabulary = logits.shape
        token_masks, mask_indices = _check_masks(logits, token_masks, mask_indices)
        if not 0 < count <= vocabulary:
            raise ValueError(f"count must be in [1, {vocabulary}] (got {count})")
        best = torch.empty(rows, count, dtype=torch.float32)
        token_ids = torch.empty(rows, count, dtype=torch.int64)
        self._library.top_k_scores(
            *(DTYPES[logits.dtype], logits.data_ptr(), logits.stride(0), rows, vocabulary, count),
            *(*_mask_args(token_masks, mask_indices), best.data_ptr(), token_ids.data_ptr()),
        )
        return best, token_ids


def _with_unit_stride(logits: torch.Tensor) -> torch.Tensor:
    if logits.shape[-1] == 0:
        raise ValueError("the vocabulary must not be empty")
    return logits if logits.stride(-1) == 1 else logits.contiguous()


def _check_masks(
    logits: torch.Tensor, token_masks: torch.Tensor | None, mask_indices: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return contiguous token masks and mask indices. Raise `ValueError` if the kernels would read out of bounds."""
    if token_masks is None or mask_indices is None:
        return None, None
    rows, vocabulary = logits.shape
    if token_masks.dtype != torch.int32 or mask_indices.dtype != torch.int64 or mask_indices.shape != (rows,):
        raise ValueError(f"`token_masks` must be int32, and `mask_indices` ({rows},) int64")
    if token_masks.shape[1] * 32 < vocabulary or int(mask_indices.max()) >= len(token_masks):
        raise ValueError(f"{len(token_masks)} masks of {token_masks.shape[1]} words do not cover {vocabulary} tokens")
    return token_masks.contiguous(), mask_indices.contiguous()


def _mask_args(
    token_masks: torch.Tensor | None, mask_indices: torch.Tensor | None
) -> tuple[int | None, int, int | None]:
    if token_masks is None or mask_indices is None:
        return None, 0, None
    return token_masks.data_ptr(), token_masks.shape[1], mask_indices.data_ptr()
