"""The ABI of the native library: its structs, enums and functions, as they are declared in C++.

The library exports its declarations as text (`native/abi.h`). `check_abi` compares them with this module at load time,
so a struct field or argument that differs between Python and C++ raises `AbiError`.
"""

import ctypes
import re
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any

from lorax_server.kernels.ops import Field

DECLARATIONS = """
struct Paged { const int32_t* tables; const int64_t* inputs; const int64_t* cached; const int64_t* slots;
  const int64_t* stored; int64_t width; int64_t sequences; int64_t count; int64_t kv_heads; int64_t block_size;
  int64_t head_dim; int32_t dtype; };
struct Matrix { const void* panels; const void* bias; int64_t outputs; int64_t inputs; int32_t stored; int32_t dtype;
  int32_t bits; int32_t block; int32_t has_offsets; int32_t has_wide_scales; int32_t uses_dot; };
struct Lora { const void* buffer; const int64_t* table; const float* scales; const int64_t* features; int64_t targets;
  const int64_t* bounds; const int64_t* adapters; int64_t segments; int64_t expert; };
void linear(const Matrix* matrix, const void* x, int64_t ldx, int64_t rows, void* out, const Lora* lora,
  int64_t first, int64_t count, int64_t gate);
void run_experts(const Matrix* gate_up, const Matrix* down, int64_t experts, const void* x, int64_t ldx, int64_t rows,
  const int64_t* chosen, const float* weights, int64_t top_k, void* out, const Lora* lora, int64_t first, int64_t gate,
  float alpha, float limit);
void get_cpu_features(int64_t* panel, int64_t* tile_inputs, int64_t* weight_bias, int64_t* has_tiles,
  int64_t* has_dot);
void look_up_rows(const Matrix* matrix, int64_t first, const int64_t* rows, int64_t count, void* out);
void rms_norm(int64_t dtype, const void* x, int64_t token_stride, int64_t head_stride, const void* residual,
  const void* weight, int64_t is_wide, const float* eps, void* normed, void* total, int64_t tokens, int64_t heads,
  int64_t size, const Lora* lora, int64_t target);
void layer_norm(int64_t dtype, const void* x, int64_t token_stride, int64_t head_stride, const void* weight,
  const void* bias, float eps, void* normed, int64_t tokens, int64_t heads, int64_t size, const Lora* lora,
  int64_t target);
void scale_and_shift(int64_t dtype, void* x, int64_t stride, int64_t tokens, const Lora* lora, int64_t first,
  int64_t last);
void gate(int64_t dtype, int64_t kind, const void* x, int64_t stride, void* out, int64_t rows, int64_t width);
void activate(int64_t dtype, int64_t kind, const void* x, void* out, int64_t count);
void choose_greedy(int64_t dtype, const void* scores, int64_t stride, int64_t rows, int64_t vocabulary,
  const uint32_t* token_masks, int64_t width, const int64_t* mask_indices, int64_t* ids, float* logprobs);
void gather_logprobs(int64_t dtype, const void* scores, int64_t stride, int64_t rows, int64_t vocabulary,
  const float* temperatures, const uint32_t* token_masks, int64_t width, const int64_t* mask_indices,
  const int64_t* ids, int64_t count, float* logprobs);
void top_k_scores(int64_t dtype, const void* scores, int64_t stride, int64_t rows, int64_t vocabulary, int64_t count,
  const uint32_t* token_masks, int64_t width, const int64_t* mask_indices, float* best, int64_t* ids);
void rotary(void* x, int64_t token, int64_t head, int64_t tokens, int64_t heads, const float* cosine,
  const float* sine, int64_t half, int64_t dtype);
void write_kv(const Paged* batch, const char* k, int64_t k_token, int64_t k_head, const char* v, int64_t v_token,
  int64_t v_head, char* keys, char* values);
void decode_attention(const Paged* batch, const void* q, int64_t token, int64_t head, const void* keys,
  const void* values, void* out, int64_t heads, float scale, int64_t window, float cap, const float* slopes,
  const float* sinks);
void prefill_attention(const Paged* batch, const void* q, int64_t q_token, int64_t q_head, const void* k,
  int64_t k_token, int64_t k_head, const void* v, int64_t v_token, int64_t v_head, const void* keys,
  const void* values, void* out, int64_t heads, float scale, int64_t window, float cap, const float* slopes,
  const float* sinks);
void run_graph(const int64_t* calls, int64_t count, int64_t words);
"""
POINTER_OR_INT = ctypes.c_void_p  # also for int64_t, because ctypes converts c_void_p arguments three times as fast
FIELD_TYPES = {"int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32}


class Dtype(IntEnum):
    """Tensor dtypes and weight layouts. `BFLOAT16_PAIRS` is the weight layout for AMX, and `QUANTIZED` the layout of
    `BlockPanels`.
    """

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    BFLOAT16_PAIRS = 3
    QUANTIZED = 4


class ActivationKind(IntEnum):
    """Activations that the native kernels compute."""

    NONE = 0
    SILU = 1
    GELU_TANH = 2
    CLAMPED_SWIGLU = 3  # only for experts
    GELU = 4
    QUICK_GELU = 5
    RELU = 6
    SIGMOID = 7


ENUMS: dict[str, Mapping[str, int]] = {
    "Dtype": Dtype.__members__,
    "ActivationKind": ActivationKind.__members__,
    "Field": {**Field.__members__, "FIELDS": len(Field)},
}


def _parse(pattern: str) -> dict[str, str]:
    return {name: " ".join(body.split()) for name, body in re.findall(pattern, DECLARATIONS, re.DOTALL)}


STRUCTS = _parse(r"struct (\w+) {(.*?)};")
FUNCTIONS = _parse(r"void (\w+)\((.*?)\);")
ARGUMENT_TYPES = {
    name: tuple(
        ctypes.c_float if argument.strip().startswith("float ") else POINTER_OR_INT for argument in text.split(",")
    )
    for name, text in FUNCTIONS.items()
}


def struct_fields(struct: str) -> list[tuple[str, Any]]:
    """Return the ctypes `_fields_` for a C++ struct."""
    declarations = [text.strip().rsplit(" ", 1) for text in STRUCTS[struct].rstrip(";").split(";")]
    return [(name, ctypes.c_void_p if "*" in kind else FIELD_TYPES[kind]) for kind, name in declarations]


class AbiError(Exception):
    """Raised if a struct, enum or function declaration differs between Python and the native library."""


def check_abi(read: Callable[[str], str]) -> None:
    """Raise `AbiError` if a library declaration differs from this module. `read(name)` returns a declaration."""
    for name, expected in (STRUCTS | FUNCTIONS).items():
        if read(name) != expected:
            raise AbiError(f"`{name}` is declared as ({read(name)}) in C++, but as ({expected}) in Python")
    for enum, members in ENUMS.items():
        for entry in read(enum).split(", "):
            name, value = entry.split(" = ")
            if members.get(name) != int(value):
                raise AbiError(f"`{enum}.{name}` is {value} in C++, but {members.get(name)} in Python")
