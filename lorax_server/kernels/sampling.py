"""The rows of a batch as a kernel that samples all of them at once takes them, each with parameters of its own."""

from typing import NamedTuple

import numpy as np
import torch

MAX_VOCAB = 2048 * 256  # segments of a row, and tokens of a segment
MAX_LISTED = 2048  # alternatives of a row
SAMPLED, RAW, WATERMARK = 1, 2, 4  # flags
# The parameters of a row.
ROW = np.dtype(
    [
        ("seed", np.uint64),
        *((name, np.float32) for name in ("temperature", "rest", "min_p", "typical_p")),
        *((name, np.int32) for name in ("top_k", "flags", "changed", "listed", "num_alternatives", "min_new")),
        *((name, np.float32) for name in ("repetition", "frequency", "presence")),
        *((name, np.int32) for name in ("biases", "biases_end", "forbidden", "forbidden_end", "pad")),
    ]
)


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
