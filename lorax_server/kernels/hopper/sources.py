"""The CUDA sources of kernel variants. Each variant is compiled separately when a model needs it."""

import ctypes
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Protocol

import torch

from lorax_server.kernels.hopper.arguments import (
    COMPUTE_THREADS,
    DequantizeArgs,
    GateArgs,
    LinearArgs,
    NormArgs,
    PlanArgs,
    PromptLoraArgs,
    QuantizedWeights,
    RoundArgs,
    SumPartsArgs,
    UnpackArgs,
    assert_layout,
    write_constants,
)

CUDA_TYPES = {torch.bfloat16: "BFloat16", torch.float16: "Float16"}
ACTIVATIONS = {"silu": "Silu", "gelu": "Gelu", "gelu_tanh": "GeluTanh", "relu": "Relu"}
GATE_THREADS = 256
ROUND_THREADS = 512
PROMPT_COLUMNS = 512  # per block
HEIGHTS = (8, 16, 32, 64, 128)  # maximum numbers of batch rows, one per linear variant
TILE_BYTES = 128 * 128  # 128 columns x 64 weights x 2 bytes
MAX_SHARED_BYTES = 227 * 1024  # per block
TWO_BLOCKS_SHARED_BYTES = 113 * 1024  # per block, with two blocks per SM
TABLE_BYTES = 256 * 128  # table of pairs of levels
STEP_INPUTS = 128  # inputs per stage of a quantized product
ADD_LORA_SHARED_BYTES = 150 * 1024  # shared memory of the LoRA-only kernel


class Variant(Protocol):
    """The settings of one kernel, which is compiled separately. Variants are hashable and compare by their fields."""

    @property
    def shared_bytes(self) -> int:
        """Return the dynamic shared memory per block, in bytes."""
        ...

    @property
    def source(self) -> str:
        """Return the complete CUDA source of the kernel."""
        ...


@dataclass(frozen=True)
class LinearVariant:
    """Settings of a kernel for linear layers with up to `height` rows, with or without LoRA."""

    dtype: torch.dtype
    height: int
    stages: int
    cluster: int
    with_lora: bool

    @property
    def ring_bytes(self) -> int:
        return self.stages * (TILE_BYTES + self.height * 128)

    @property
    def shared_bytes(self) -> int:
        return self.ring_bytes + self.stages * 16

    @property
    def blocks_per_sm(self) -> int:
        return 2 if 2 * self.shared_bytes <= MAX_SHARED_BYTES else 1

    @property
    def source(self) -> str:
        product = f"DenseProduct<{CUDA_TYPES[self.dtype]}, {self.height}, {self.stages}>"
        return _write_linear(self, product, "dense_product.cu", "linear_kernel", "TensorMap")


@dataclass(frozen=True)
class PackedFormat:
    """The format of a quantized matrix in the layout of `quantized_product.cu`."""

    kind: str  # `int4`, `int8`, `float8` or `levels4`
    groups: int  # groups with a scale, in 128 inputs: 1, 2 or 4
    has_float_scales: bool  # float32 instead of float16
    shift: str  # `none`, `zeros` or `offsets`

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the weights in a record of 128 columns x 128 inputs."""
        return 128 * STEP_INPUTS // (2 if self.kind.endswith("4") else 1)

    @property
    def record_bytes(self) -> int:
        numbers = 128 * self.groups
        scales = numbers * (4 if self.has_float_scales else 2)
        shifts = {"none": 0, "zeros": 2 * numbers, "offsets": scales}[self.shift]
        return self.weight_bytes + scales + shifts

    @property
    def table_bytes(self) -> int:
        return TABLE_BYTES if self.kind == "levels4" else 0

    @property
    def can_use_wgmma(self) -> bool:
        return self.shift != "offsets"

    def write_types(self, dtype: torch.dtype) -> str:
        """Return the template arguments that describe this format."""
        number, floats = CUDA_TYPES[dtype], "true" if self.has_float_scales else "false"
        shift = f"Shift::{self.shift.upper()}"
        unpacking = f"{self.kind.capitalize()}<{number}, {shift}>"
        return f"{number}, {unpacking}, Record128<{unpacking}, {self.groups}, {floats}, {shift}>"


@dataclass(frozen=True)
class QuantizedVariant:
    """Settings of a kernel for quantized linear layers with up to `height` rows, with or without LoRA."""

    dtype: torch.dtype
    format: PackedFormat
    height: int
    uses_wgmma: bool  # instead of mma.sync
    tiles: int  # tiles of 128 columns per block, 1 with WGMMA
    stages: int
    cluster: int
    with_lora: bool

    @property
    def columns(self) -> int:
        """Return the number of columns per block."""
        return 128 * self.tiles

    @property
    def ring_bytes(self) -> int:
        return self.stages * (self.tiles * self.format.record_bytes + self.height * STEP_INPUTS * 2)

    @property
    def shared_bytes(self) -> int:
        return self.ring_bytes + self.stages * 16 + self.format.table_bytes

    @property
    def blocks_per_sm(self) -> int:
        return 2 if self.shared_bytes <= TWO_BLOCKS_SHARED_BYTES else 1

    @property
    def source(self) -> str:
        types = self.format.write_types(self.dtype)
        if self.uses_wgmma:
            product = f"WideQuantizedProduct<{types}, {self.height}, {self.stages}>"
        else:
            product = f"QuantizedProduct<{types}, {self.height}, {self.tiles}, {self.stages}>"
        return _write_linear(self, product, "quantized_product.cu", "quantized_linear_kernel", "QuantizedWeights")


@dataclass(frozen=True)
class DequantizeVariant:
    """Settings of the kernel that dequantizes a matrix."""

    dtype: torch.dtype
    format: PackedFormat

    @property
    def shared_bytes(self) -> int:
        return self.format.table_bytes + self.format.record_bytes + 128 * (STEP_INPUTS + 8) * 2

    @property
    def source(self) -> str:
        call = f"dequantize<{self.format.write_types(self.dtype)}>(p);"
        kernel = write_kernel(f"{COMPUTE_THREADS}, 2", DequantizeArgs, call)
        parts = map(read_source, ("primitives.cu", "lora.cu", "quantized_product.cu"))
        return "\n".join((*parts, kernel))


@dataclass(frozen=True)
class UnpackVariant:
    """Settings of the kernel that unpacks 8-bit floats with a float32 scale per row."""

    shared_bytes: int = 128 * (STEP_INPUTS + 16)

    @property
    def source(self) -> str:
        record = "Record128<Float8<BFloat16, Shift::NONE>, 1, true, Shift::NONE>"
        kernel = write_kernel(f"{COMPUTE_THREADS}, 4", UnpackArgs, f"unpack_float8<{record}>(p);")
        parts = map(read_source, ("primitives.cu", "lora.cu", "quantized_product.cu"))
        return "\n".join((*parts, kernel))


@dataclass(frozen=True)
class RoundVariant:
    """Settings of the kernel that rounds activations to 8-bit floats."""

    dtype: torch.dtype
    is_wide: bool  # the rounded values are written as 16-bit floats
    shared_bytes: int = 0

    @property
    def source(self) -> str:
        call = f"round_rows<{CUDA_TYPES[self.dtype]}, {'true' if self.is_wide else 'false'}>(p);"
        parts = map(read_source, ("primitives.cu", "lora.cu", "norm_gate.cu", "round_rows.cu"))
        return "\n".join((*parts, write_kernel(str(ROUND_THREADS), RoundArgs, call)))


@dataclass(frozen=True)
class AddLoraVariant:
    """Settings of the kernel that adds LoRA to a cuBLAS product."""

    dtype: torch.dtype

    @property
    def shared_bytes(self) -> int:
        return ADD_LORA_SHARED_BYTES

    @property
    def source(self) -> str:
        call = write_kernel("THREADS, 1", LinearArgs, f"add_lora<{CUDA_TYPES[self.dtype]}>(p);")
        return "\n".join((read_source("primitives.cu"), read_source("lora.cu"), call))


@dataclass(frozen=True)
class PlanVariant:
    """Settings of the kernel that writes the LoRA plan (see `LoraPlan`)."""

    shared_bytes: int = 0

    @property
    def source(self) -> str:
        parts = map(read_source, ("primitives.cu", "lora.cu", "lora_plan.cu"))
        return "\n".join((*parts, assert_layout(PlanArgs)))


@dataclass(frozen=True)
class NormVariant:
    """Settings of an RMSNorm kernel. Each thread handles `chunks` x 8 elements."""

    dtype: torch.dtype
    chunks: int
    shared_bytes: int = 0

    @property
    def source(self) -> str:
        call = write_kernel("1024", NormArgs, f"rms_norm<{CUDA_TYPES[self.dtype]}, {self.chunks}>(p);")
        return "\n".join((read_source("primitives.cu"), read_source("lora.cu"), read_source("norm_gate.cu"), call))


@dataclass(frozen=True)
class GateVariant:
    """Settings of a kernel that computes `activation(gate) * up`."""

    dtype: torch.dtype
    activation: str
    shared_bytes: int = 0

    @property
    def source(self) -> str:
        call = f"gate<{CUDA_TYPES[self.dtype]}, {ACTIVATIONS[self.activation]}>(p);"
        kernel = write_kernel(str(GATE_THREADS), GateArgs, call)
        return "\n".join((read_source("primitives.cu"), read_source("lora.cu"), read_source("norm_gate.cu"), kernel))


@dataclass(frozen=True)
class PromptLoraVariant:
    """Settings of a prompt LoRA kernel. `step` is `sum_parts`, `expand_prompt`, `add_prompt`, or `gate_prompt` with an
    activation.
    """

    dtype: torch.dtype
    step: str
    activation: str | None = None
    shared_bytes: int = 0

    @property
    def source(self) -> str:
        types = CUDA_TYPES[self.dtype] + (f", {ACTIVATIONS[self.activation]}" if self.activation else "")
        args = SumPartsArgs if self.step == "sum_parts" else PromptLoraArgs
        parts = map(read_source, ("primitives.cu", "lora.cu", "norm_gate.cu", "prompt_lora.cu"))
        return "\n".join((*parts, write_kernel("PROMPT_THREADS, 2", args, f"{self.step}<{types}>(p);")))


def write_kernel(bounds: str, args: type[ctypes.Structure], call: str) -> str:
    """Return the CUDA source for a kernel that executes `call`. The kernel's name is the name of the called function
    plus `_kernel`.
    """
    name = re.split(r"\W", call, maxsplit=1)[0] + "_kernel"
    head = f'extern "C" __global__ void __launch_bounds__({bounds}) {name}(const __grid_constant__ {args.__name__} p)'
    return f"{assert_layout(args)}\n{head} {{ {call} }}"


def find_kernel(source: str) -> str:
    """Return the kernel name in `source`, as shown by profilers."""
    (name,) = re.findall(r"(\w+_kernel)\(const __grid_constant__", source)
    return str(name)


@cache
def read_source(name: str) -> str:
    text = (files("lorax_server.kernels.hopper") / name).read_text()
    return f"{write_constants()}\n{text}" if name == "primitives.cu" else text


def _write_linear(variant: LinearVariant | QuantizedVariant, product: str, file: str, kernel: str, weights: str) -> str:
    """Return the CUDA source of a linear layer. `product` is the product class in `file`, and `weights` its type of
    weights.
    """
    lora = "true" if variant.with_lora else "false"
    bounds = f"__cluster_dims__({variant.cluster}) __launch_bounds__(THREADS, {variant.blocks_per_sm})"
    call = f"linear<{CUDA_TYPES[variant.dtype]}, {product}, {variant.cluster}, {lora}>(&w, &x, p);"
    return "\n".join(
        (
            read_source("primitives.cu"),
            read_source("lora.cu"),
            _write_wgmma(variant.height),
            read_source(file),
            read_source("linear.cu"),
            assert_layout(LinearArgs),
            assert_layout(QuantizedWeights) if weights == "QuantizedWeights" else "",
            f'extern "C" __global__ void {bounds} {kernel}(const __grid_constant__ {weights} w, '
            "const __grid_constant__ TensorMap x, const __grid_constant__ LinearArgs p) {",
            f"  {call}",
            "}",
        )
    )


def _write_wgmma(height: int) -> str:
    """Return the source of WGMMA functions for 64 columns of W and `height` rows of x, with explicit registers.

    `wgmma` adds a product to `d`, with W in shared memory. In `wgmma_from_registers`, W is in registers, and `adds` is
    0 if the product replaces `d`.
    """
    count = height // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))

    def instruction(dtype: str, left: str, transposed: str, inputs: str, condition: int) -> str:
        return (
            f'asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{condition}, 0;\\n'
            f"wgmma.mma_async.sync.aligned.m64n{height}k16.f32.{dtype}.{dtype} "
            f'{{{sums}}}, {left}, %{condition - 1}, p, 1, 1, {transposed};\\n}}\\n" : {outputs} : {inputs});'
        )

    def function(head: str, *arguments: Any) -> str:
        return (
            f"template <class Number> DEVICE void {head} {{\n"
            f"  if constexpr (Number::is_bfloat16) {instruction('bf16', *arguments)}\n"
            f"  else {instruction('f16', *arguments)}\n}}"
        )

    registers = ", ".join(f"%{count + i}" for i in range(4))
    return "\n".join(
        (
            f"#define WGMMA_ROWS {height}",
            function(
                f"wgmma(float (&d)[{count}], u64 a, u64 b)", f"%{count}", "0, 0", '"l"(a), "l"(b), "r"(1)', count + 2
            ),
            function(
                f"wgmma_from_registers(float (&d)[{count}], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int adds)",
                f"{{{registers}}}",
                "0",
                '"r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(adds)',
                count + 5,
            ),
        )
    )
