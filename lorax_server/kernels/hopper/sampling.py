"""Launch the kernels that choose tokens."""

from dataclasses import dataclass

import torch

from lorax_server.kernels.hopper.arguments import CHOOSE_THREADS, ChooseArgs, check_rows
from lorax_server.kernels.hopper.driver import Kernels
from lorax_server.kernels.hopper.sources import NUMBERS, read_source, write_kernel
from lorax_server.kernels.sampling import ChosenRows, RowBatch, RowInputs

LOGITS = {**NUMBERS, torch.float32: "Float32"}
SHARED_BYTES = 50 * 1024  # at least those of `Shared` of rows.cu


@dataclass(frozen=True)
class SampleVariant:
    """A step of sampling by logits of a type: `change` scores by penalties, or `choose` tokens."""

    dtype: torch.dtype
    step: str
    shared_bytes: int = SHARED_BYTES

    @property
    def source(self) -> str:
        call = write_kernel("CHOOSE_THREADS", ChooseArgs, f"{self.step}<{LOGITS[self.dtype]}>(p);")
        parts = map(read_source, ("prelude.cu", "rows.cu", "select.cu", "sampling.cu"))
        return "\n".join((*parts, check_rows(), call))


def choose_rows(kernels: Kernels, batch: RowBatch, inputs: RowInputs) -> ChosenRows:
    """Choose a token for each row. The host waits for nothing."""
    inputs = RowInputs(*(None if each is None else _in_rows(each) for each in inputs))  # type: ignore[arg-type]
    logits = inputs.logits if inputs.logits.dtype in LOGITS else inputs.logits.float()
    rows, vocab = logits.shape
    device, num_changed = logits.device, len(batch.changed_rows)
    chosen = ChosenRows(
        torch.empty(rows, dtype=torch.int64, device=device),
        torch.empty(rows, device=device),
        torch.zeros(batch.num_asking, batch.most, dtype=torch.int64, device=device),
        torch.zeros(batch.num_asking, batch.most, device=device),
    )
    width = -(-vocab // 8) * 8
    changed = torch.empty(num_changed, width, device=device)
    counts = torch.empty(num_changed, width, dtype=torch.int32, device=device)
    args = ChooseArgs(
        params=batch.params.data_ptr(),
        changed=changed.data_ptr(),
        counts=counts.data_ptr(),
        changed_rows=batch.changed_rows.data_ptr(),
        entry_ids=batch.entry_ids.data_ptr(),
        entry_values=batch.entry_values.data_ptr(),
        stride=logits.stride(0),
        vocab=vocab,
        width=width,
        most=batch.most,
        **{name: tensor.data_ptr() for name, tensor in chosen._asdict().items()},
        **{name: tensor.data_ptr() for name, tensor in inputs._asdict().items() if tensor is not None},
    )
    args.logits = logits.data_ptr()
    if inputs.tokens is not None:
        args.tokens_stride = inputs.tokens.stride(0)
    if inputs.mask_words is not None:
        args.num_masks, args.mask_width = len(inputs.mask_words), inputs.mask_words.stride(0)
    if num_changed:
        kernels.get(SampleVariant(logits.dtype, "change")).launch(num_changed, CHOOSE_THREADS, [args], early=False)
    if rows:
        kernels.get(SampleVariant(logits.dtype, "choose")).launch(rows, CHOOSE_THREADS, [args], early=False)
    return chosen


def _in_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose rows are plain; they may lie anywhere."""
    return tensor if tensor.shape[-1] < 2 or tensor.stride(-1) == 1 else tensor.contiguous()
