"""Kernel arguments, as ctypes structs that mirror the CUDA structs, and constants that Python and CUDA share.

Every CUDA source receives these constants and asserts the layout of its struct, so a mismatch is a compile error.
"""

import ctypes
from typing import Any

from lorax_server.kernels.ops import MAX_RANK, Field
from lorax_server.kernels.sampling import MAX_ALTERNATIVES, MAX_VOCAB, RAW, ROW_PARAMS_DTYPE, SAMPLED, WATERMARK

MAP_BYTES = 128  # size of a CUDA tensor map
MAX_SLICES = 3  # maximum number of target modules per linear layer
THREADS = 288  # threads per block of the linear kernel
COMPUTE_THREADS = 256  # of them, without the warp that fetches data
PLAN_THREADS = 256  # equals the maximum number of rows in a plan
PROMPT_THREADS = 256
SAMPLE_THREADS = 1024
ITEM_RANKS, PART_RANKS = 16, 64  # ranks per work item of shrink and expand
SEGMENT_TOKENS = 256  # tokens per partial sum
SPLIT_TOKENS, MAX_SPLITS = 256, 32  # KV split size, and maximum splits per sequence

POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
_Fields = list[tuple[str, Any]]


def _fields(kind: Any, names: str) -> _Fields:
    return [(name, kind) for name in names.split()]


class LinearArgs(ctypes.Structure):
    """Arguments of the fused linear kernel and of the LoRA-only kernel."""

    _fields_ = [
        *_fields(ctypes.c_ubyte * (2 * MAP_BYTES), "a"),
        *_fields(ctypes.c_ubyte * (2 * MAX_SLICES * MAP_BYTES), "b"),
        *_fields(POINTER, "x buffer y v d bias table adapters items records parts num_items num_parts num_tiles flags"),
        *_fields(POINTER, "counters row_scales"),
        *_fields(INT, "K"),
        *_fields(INT * MAX_SLICES, "N"),
        *_fields(
            INT, "slices x_stride y_stride M T max_items max_parts target num_targets lora_blocks steps early zero"
        ),
        ("_padding", ctypes.c_ubyte * 52),  # pads the struct to a multiple of its alignment
    ]


LEVEL_WORDS = ctypes.c_uint32 * 8  # two 16-bit levels per word


class QuantizedWeights(ctypes.Structure):
    _fields_ = [("records", POINTER), ("levels", LEVEL_WORDS)]


class DequantizeArgs(ctypes.Structure):
    _fields_ = [("weights", QuantizedWeights), ("out", POINTER), *_fields(INT, "first rows inputs")]


class UnpackArgs(ctypes.Structure):
    _fields_ = [*_fields(POINTER, "records values scales"), *_fields(INT, "rows inputs")]


class RoundArgs(ctypes.Structure):
    _fields_ = [*_fields(POINTER, "x values scales"), *_fields(INT, "n")]


class PlanArgs(ctypes.Structure):
    _fields_ = [
        *_fields(POINTER, "adapters table scales records items parts num_items num_parts num_tiles flags"),
        *_fields(INT, "M T num_targets max_items max_parts"),
    ]


class NormArgs(ctypes.Structure):
    _fields_ = [
        *_fields(POINTER, "x residual weight out total eps buffer table adapters flags"),
        *_fields(INT, "n target num_targets"),
    ]


class GateArgs(ctypes.Structure):
    _fields_ = [*_fields(POINTER, "gate_up out"), *_fields(INT, "n")]


class PromptLoraArgs(ctypes.Structure):
    _fields_ = [
        *_fields(POINTER, "v buffer bias y out tiles table"),
        *_fields(INT, "target num_targets y_stride slices padded_rank"),
        *_fields(INT * MAX_SLICES, "N"),
    ]


class SumPartsArgs(ctypes.Structure):
    _fields_ = [
        *_fields(POINTER, "parts v adapters table scales"),
        *_fields(INT, "num_parts tokens slices padded_rank target num_targets"),
    ]


class PrefillArgs(ctypes.Structure):
    _fields_ = [
        *_fields(POINTER, "tiles tables out"),
        *_fields(INT, "items heads group pack tokens block_size box num_blocks table_stride window"),
        *_fields(FLOAT, "factor cap"),
    ]


class DecodePlanArgs(ctypes.Structure):
    _fields_ = [
        *_fields(POINTER, "input_lengths cache_lengths bounds entries num_entries"),
        *_fields(INT, "num_seqs window"),
    ]


class DecodeArgs(ctypes.Structure):
    _fields_ = [
        *_fields(
            POINTER, "k_cache v_cache q k v out cos sin slots tables entries num_entries sums softmax_stats counters"
        ),
        *_fields(ctypes.c_int64, "q_token k_token v_token angle_token table_stride"),
        *_fields(INT, "q_head k_head v_head half kv_heads heads_per_kv block_size block_shift"),
        *_fields(FLOAT, "scale k_scale v_scale soft_cap"),
    ]


class SampleArgs(ctypes.Structure):
    _fields_ = [
        *_fields(
            POINTER, "logits params lengths prompt_lengths tokens changed counts changed_rows entry_ids entry_values"
        ),
        *_fields(POINTER, "mask_rows token_masks token_ids logprobs listed_ids listed_logprobs"),
        *_fields(ctypes.c_longlong, "stride tokens_stride"),
        *_fields(INT, "vocab width num_masks mask_width max_alternatives"),
    ]


CONSTANTS: dict[str, int] = {
    "MAX_RANK": MAX_RANK,
    "FIELDS": len(Field),
    **{f"FIELD_{field.name}": int(field) for field in Field},
    **{
        "THREADS": THREADS,
        "COMPUTE_THREADS": COMPUTE_THREADS,
        "PLAN_THREADS": PLAN_THREADS,
        "PROMPT_THREADS": PROMPT_THREADS,
    },
    **{"ITEM_RANKS": ITEM_RANKS, "PART_RANKS": PART_RANKS, "SPLIT_TOKENS": SPLIT_TOKENS, "MAX_SPLITS": MAX_SPLITS},
    **{
        "SAMPLE_THREADS": SAMPLE_THREADS,
        "SEGMENT_TOKENS": SEGMENT_TOKENS,
        "MAX_SEGMENTS": MAX_VOCAB // SEGMENT_TOKENS,
        "MAX_LISTED_TOKENS": MAX_ALTERNATIVES,
    },
    **{"SAMPLED": SAMPLED, "RAW": RAW, "WATERMARK": WATERMARK},
}


def write_constants() -> str:
    return "\n".join(f"constexpr int {name} = {value};" for name, value in CONSTANTS.items())


def assert_layout(struct: type[ctypes.Structure]) -> str:
    """Return static assertions that the CUDA struct has the same fields, offsets and size as the ctypes struct."""
    field_offsets = {
        field[0]: getattr(struct, field[0]).offset for field in struct._fields_ if not field[0].startswith("_")
    }
    return _write_assertions(struct.__name__, ctypes.sizeof(struct), field_offsets)


def assert_row_params_layout() -> str:
    """Return static assertions that the CUDA struct `RowParams` matches `ROW_PARAMS_DTYPE`."""
    assert ROW_PARAMS_DTYPE.fields is not None
    return _write_assertions(
        "RowParams",
        ROW_PARAMS_DTYPE.itemsize,
        {name: field_info[1] for name, field_info in ROW_PARAMS_DTYPE.fields.items()},
    )


def _write_assertions(name: str, size: int, field_offsets: dict[str, int]) -> str:
    # NVRTC has no `offsetof`; `__INTADDR__` is the built-in equivalent.
    offsets = {f"__INTADDR__(&(({name}*)0)->{field})": field_offset for field, field_offset in field_offsets.items()}
    checks = {f"sizeof({name})": size, **offsets}
    reason = f"Python has another layout of {name}"
    return "\n".join(f'static_assert({actual} == {expected}, "{reason}");' for actual, expected in checks.items())
