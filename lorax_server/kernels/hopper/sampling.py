"""Launch the CUDA sampling kernels."""

from dataclasses import dataclass

import torch

from lorax_server.kernels.hopper.arguments import SAMPLE_THREADS, SampleArgs, assert_row_params_layout
from lorax_server.kernels.hopper.driver import Kernels
from lorax_server.kernels.hopper.sources import CUDA_TYPES, read_source, write_kernel
from lorax_server.kernels.sampling import SampledTokens, SamplingBatch, SamplingInputs

LOGITS_CUDA_TYPES = {**CUDA_TYPES, torch.float32: "Float32"}
SAMPLE_SHARED_BYTES = 50 * 1024  # at least the size of `Shared` in score_rows.cu


@dataclass(frozen=True)
class SampleVariant:
    """A sampling kernel for one logits dtype. `step` is `apply_penalties` or `sample`."""

    dtype: torch.dtype
    step: str
    shared_bytes: int = SAMPLE_SHARED_BYTES

    @property
    def source(self) -> str:
        call = write_kernel("SAMPLE_THREADS", SampleArgs, f"{self.step}<{LOGITS_CUDA_TYPES[self.dtype]}>(p);")
        parts = map(read_source, ("primitives.cu", "score_rows.cu", "token_selection.cu", "sampling.cu"))
        return "\n".join((*parts, assert_row_params_layout(), call))


def sample_tokens(kernels: Kernels, batch: SamplingBatch, inputs: SamplingInputs) -> SampledTokens:
    """Sample a token for each row, without synchronizing."""
    inputs = SamplingInputs(*(None if each is None else _with_unit_stride(each) for each in inputs))  # type: ignore[arg-type]
    logits = inputs.logits if inputs.logits.dtype in LOGITS_CUDA_TYPES else inputs.logits.float()
    rows, vocab = logits.shape
    device, num_changed = logits.device, len(batch.changed_rows)
    chosen = SampledTokens(
        torch.empty(rows, dtype=torch.int64, device=device),
        torch.empty(rows, device=device),
        torch.zeros(batch.num_listed_rows, batch.max_alternatives, dtype=torch.int64, device=device),
        torch.zeros(batch.num_listed_rows, batch.max_alternatives, device=device),
    )
    width = -(-vocab // 8) * 8
    changed = torch.empty(num_changed, width, device=device)
    counts = torch.empty(num_changed, width, dtype=torch.int32, device=device)
    args = SampleArgs(
        params=batch.params.data_ptr(),
        changed=changed.data_ptr(),
        counts=counts.data_ptr(),
        changed_rows=batch.changed_rows.data_ptr(),
        entry_ids=batch.entry_ids.data_ptr(),
        entry_values=batch.entry_values.data_ptr(),
        stride=logits.stride(0),
        vocab=vocab,
        width=width,
        max_alternatives=batch.max_alternatives,
        **{name: tensor.data_ptr() for name, tensor in chosen._asdict().items()},
        **{name: tensor.data_ptr() for name, tensor in inputs._asdict().items() if tensor is not None},
    )
    args.logits = logits.data_ptr()
    if inputs.tokens is not None:
        args.tokens_stride = inputs.tokens.stride(0)
    if inputs.token_masks is not None:
        args.num_masks, args.mask_width = len(inputs.token_masks), inputs.token_masks.stride(0)
    if num_changed:
        kernels.get(SampleVariant(logits.dtype, "apply_penalties")).launch(
            num_changed, SAMPLE_THREADS, [args], early=False
        )
    if rows:
        kernels.get(SampleVariant(logits.dtype, "sample")).launch(rows, SAMPLE_THREADS, [args], early=False)
    return chosen


def _with_unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with unit stride in the last dimension."""
    return tensor if tensor.shape[-1] < 2 or tensor.stride(-1) == 1 else tensor.contiguous()
