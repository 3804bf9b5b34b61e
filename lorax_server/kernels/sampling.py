"""Arguments and results of the sampling kernel, which supports different parameters for each row."""

from typing import NamedTuple

import numpy as np
import torch

MAX_VOCAB = 2048 * 256  # 2,048 segments of 256 tokens
MAX_ALTERNATIVES = 2048  # maximum number of alternative tokens per row
SAMPLED, RAW, WATERMARK = 1, 2, 4  # bits of the field `flags`
# Sampling parameters of one row, in the layout of the CUDA struct `RowParams`.
ROW_PARAMS_DTYPE = np.dtype(
    [
        ("seed", np.uint64),
        *((name, np.float32) for name in ("temperature", "rest", "min_p", "typical_p")),
        *((name, np.int32) for name in ("top_k", "flags", "changed", "listed", "num_alternatives", "min_new")),
        *((name, np.float32) for name in ("repetition", "frequency", "presence")),
        *((name, np.int32) for name in ("biases", "biases_end", "forbidden", "forbidden_end", "pad")),
    ]
)


class SamplingBatch(NamedTuple):
    """Sampling parameters for all rows in a batch, on the device."""

    params: torch.Tensor  # [rows] `ROW_PARAMS_DTYPE` records as raw bytes
    changed_rows: torch.Tensor  # [changed rows] int32, rows with penalties, biases or forbidden tokens
    entry_ids: torch.Tensor  # int32, token IDs of biases and forbidden tokens
    entry_values: torch.Tensor  # float32
    num_listed_rows: int  # number of rows that return alternatives
    max_alternatives: int  # per row


class SamplingInputs(NamedTuple):
    """Inputs of the sampling kernel that change in each step.

    Optional tensors are None if no row needs them. Tensors are int64 with one entry per row, unless a comment says
    otherwise.
    """

    logits: torch.Tensor  # [rows, vocabulary]
    lengths: torch.Tensor | None = None
    prompt_lengths: torch.Tensor | None = None
    tokens: torch.Tensor | None = None  # [rows, tokens]
    mask_rows: torch.Tensor | None = None  # [masks]
    token_masks: torch.Tensor | None = None  # [masks, words] int32


class SampledTokens(NamedTuple):
    """The sampled tokens of all rows, and the most likely tokens of rows that request alternatives."""

    token_ids: torch.Tensor  # [rows]
    logprobs: torch.Tensor  # [rows] float32
    listed_ids: torch.Tensor  # [listed rows, max_alternatives]
    listed_logprobs: torch.Tensor
