"""Launch the kernels that choose tokens."""

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from lorax_server.kernels.hopper.sources import NUMBERS, read_source, write_kernel

if TYPE_CHECKING:  # a program that describes rows need not have a GPU
    from lorax_server.kernels.hopper.driver import Kernels

LOGITS = {**NUMBERS, torch.float32: "Float32"}
THREADS = 1024
SHARED_BYTES = 50 * 1024  # at least those of `Shared` of rows.cu
MAX_VOCAB = 2048 * 256  # segments of a row, and tokens of a segment
MAX_LISTED = 2048  # alternatives of a row
SAMPLED, RAW, WATERMARK = 1, 2, 4  # flags
# `RowParams` of sampling.cu, field by field.
ROW = np.dtype(
    [
        ("seed", np.uint64),
        *((name, np.float32) for name in ("temperature", "rest", "min_p", "typical_p")),
        *((name, np.int32) for name in ("top_k", "flags", "changed", "listed", "num_alternatives", "min_new")),
        *((name, np.float32) for name in ("repetition", "frequency", "presence")),
        *((name, np.int32) for name in ("biases", "biases_end", "forbidden", "forbidden_end", "pad")),
    ]
)


@dataclass(frozen=True)
class SampleVariant:
    """A step of sampling by logits of a type: `change` scores by penalties, or `choose` tokens."""

    dtype: torch.dtype
    step: str
    shared_bytes: int = SHARED_BYTES

    @property
    def source(self) -> str:
        call = write_kernel(str(THREADS), "ChooseArgs", f"{self.step}<{LOGITS[self.dtype]}>(p);")
        parts = map(read_source, ("prelude.cu", "rows.cu", "select.cu", "sampling.cu"))
        return "\n".join((*parts, call))


class RowBatch(NamedTuple):
    """The parameters of a batch's rows, on the device."""

    params: torch.Tensor  # [rows] of `ROW`, as bytes of any type
    changed_rows: torch.Tensor  # [changed rows] int32: those with penalties, biases or forbidden tokens
    entry_ids: torch.Tensor  # int32, of biases and forbidden tokens
    entry_values: torch.Tensor  # float32
    num_asking: int  # rows that ask for alternatives
    most: int  # alternatives of a row


class RowInputs(NamedTuple):
    """The tensors that change from step to step. Without a comment, int64 and by row, or None if no row looks at it."""

    logits: torch.Tensor  # [rows, vocabulary]
    lengths: torch.Tensor | None = None
    prompt_lengths: torch.Tensor | None = None
    tokens: torch.Tensor | None = None  # [rows, tokens]
    mask_rows: torch.Tensor | None = None  # [masks]
    mask_words: torch.Tensor | None = None  # [masks, words] int32


class ChosenRows(NamedTuple):
    """The chosen tokens, and the alternatives of rows that ask for them."""

    token_ids: torch.Tensor  # [rows]
    logprobs: torch.Tensor  # [rows] float32
    listed_ids: torch.Tensor  # [asking rows, most]
    listed_logprobs: torch.Tensor


class _ChooseArgs(ctypes.Structure):
    """`ChooseArgs` of sampling.cu, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "params", "lengths", "prompt_lengths", "tokens")),
        *((name, ctypes.c_void_p) for name in ("changed", "counts", "changed_rows", "entry_ids", "entry_values")),
        *((name, ctypes.c_void_p) for name in ("mask_rows", "mask_words", "token_ids", "logprobs")),
        *((name, ctypes.c_void_p) for name in ("listed_ids", "listed_logprobs")),
        *((name, ctypes.c_longlong) for name in ("stride", "tokens_stride")),
        *((name, ctypes.c_int) for name in ("vocab", "width", "num_masks", "mask_width", "most")),
    )


def choose_rows(kernels: "Kernels", batch: RowBatch, inputs: RowInputs) -> ChosenRows:
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
    args = _ChooseArgs(
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
        kernels.get(SampleVariant(logits.dtype, "change")).launch(num_changed, THREADS, [args], early=False)
    if rows:
        kernels.get(SampleVariant(logits.dtype, "choose")).launch(rows, THREADS, [args], early=False)
    return chosen


def _in_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose rows are plain; they may lie anywhere."""
    return tensor if tensor.shape[-1] < 2 or tensor.stride(-1) == 1 else tensor.contiguous()
