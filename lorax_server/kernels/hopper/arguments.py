"""The arguments of the kernels: structs with the fields of their namesakes in CUDA, and the constants that both share.

Every source asserts that its struct has these fields at these places, and gets the constants from here: a field or a
number that differs is an error of the compiler.
"""

import ctypes
from typing import Any

from lorax_server.kernels.ops import MAX_RANK, Field
from lorax_server.kernels.sampling import MAX_LISTED, MAX_VOCAB, RAW, ROW, SAMPLED, WATERMARK

MAP_BYTES = 128  # of a tensor map
MAX_SLICES = 3  # targets of a linear
THREADS = 288  # of a linear
PLAN_THREADS = 256  # as many as a plan may have rows
PROMPT_THREADS = 256
CHOOSE_THREADS = 1024
ITEM_RANKS, PART_RANKS = 16, 64  # pieces of a rank, which are shrunk and expanded
SEGMENT = 256  # tokens of a row that are summed up together
STRETCH, MAX_SPLITS = 256, 32  # cached tokens that are attended to together, and their most of a sequence

POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
_Fields = list[tuple[str, Any]]


def _fields(kind: Any, names: str) -> _Fields:
    return [(name, kind) for name in names.split()]


class Args(ctypes.Structure):
    """Of a linear with LoRA, and of LoRA alone."""

    _fields_ = [
        *_fields(ctypes.c_ubyte * (2 * MAP_BYTES), "a"),
        *_fields(ctypes.c_ubyte * (2 * MAX_SLICES * MAP_BYTES), "b"),
        *_fields(POINTER, "x buffer y v d bias table adapters items records parts num_items num_parts num_tiles flags"),
        *_fields(POINTER, "counters"),
        *_fields(INT, "K"),
        *_fields(INT * MAX_SLICES, "N"),
        *_fields(
            INT, "slices x_stride y_stride M T max_items max_parts target num_targets lora_blocks steps early zero"
        ),
        ("_fill", ctypes.c_ubyte * 60),  # up to a multiple of its alignment
    ]


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


class PromptArgs(ctypes.Structure):
    _fields_ = [
        *_fields(POINTER, "v buffer bias y out tiles table"),
        *_fields(INT, "target num_targets y_stride slices room"),
        *_fields(INT * MAX_SLICES, "N"),
    ]


class SumArgs(ctypes.Structure):
    _fields_ = [
        *_fields(POINTER, "parts v adapters table scales"),
        *_fields(INT, "num_parts tokens slices room target num_targets"),
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
        *_fields(POINTER, "k_cache v_cache q k v out cos sin slots tables entries num_entries sums masses counters"),
        *_fields(ctypes.c_int64, "q_token k_token v_token angle_token table_stride"),
        *_fields(INT, "q_head k_head v_head half kv_heads sharing block_size block_shift"),
        *_fields(FLOAT, "scale k_scale v_scale soft_cap"),
    ]


class ChooseArgs(ctypes.Structure):
    _fields_ = [
        *_fields(
            POINTER, "logits params lengths prompt_lengths tokens changed counts changed_rows entry_ids entry_values"
        ),
        *_fields(POINTER, "mask_rows mask_words token_ids logprobs listed_ids listed_logprobs"),
        *_fields(ctypes.c_longlong, "stride tokens_stride"),
        *_fields(INT, "vocab width num_masks mask_width most"),
    ]


CONSTANTS: dict[str, int] = {
    "MAX_RANK": MAX_RANK,
    "FIELDS": len(Field),
    **{f"FIELD_{field.name}": int(field) for field in Field},
    **{"THREADS": THREADS, "PLAN_THREADS": PLAN_THREADS, "PROMPT_THREADS": PROMPT_THREADS},
    **{"ITEM_RANKS": ITEM_RANKS, "PART_RANKS": PART_RANKS, "STRETCH": STRETCH, "MAX_SPLITS": MAX_SPLITS},
    **{
        "CHOOSE_THREADS": CHOOSE_THREADS,
        "SEGMENT": SEGMENT,
        "MAX_SEGMENTS": MAX_VOCAB // SEGMENT,
        "LISTED": MAX_LISTED,
    },
    **{"SAMPLED": SAMPLED, "RAW": RAW, "WATERMARK": WATERMARK},
}


def write_constants() -> str:
    return "\n".join(f"constexpr int {name} = {value};" for name, value in CONSTANTS.items())


def check_layout(struct: type[ctypes.Structure]) -> str:
    """Write assertions that the struct of this name in CUDA has these fields at these places, and no others."""
    places = {field[0]: getattr(struct, field[0]).offset for field in struct._fields_ if not field[0].startswith("_")}
    return _write_assertions(struct.__name__, ctypes.sizeof(struct), places)


def check_rows() -> str:
    """Write the same assertions for the parameters of a row."""
    assert ROW.fields is not None
    return _write_assertions("RowParams", ROW.itemsize, {name: place[1] for name, place in ROW.fields.items()})


def _write_assertions(name: str, size: int, places: dict[str, int]) -> str:
    # NVRTC has no `offsetof`; this is how its front end spells it.
    offsets = {f"__INTADDR__(&(({name}*)0)->{field})": at for field, at in places.items()}
    checks = {f"sizeof({name})": size, **offsets}
    reason = f"Python has another layout of {name}"
    return "\n".join(f'static_assert({found} == {expected}, "{reason}");' for found, expected in checks.items())
