"""The CUDA sources of kernel variants. Each variant is compiled separately when a model needs it."""

import ctypes
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Protocol

import torch

from lorax_server.kernels.hopper.arguments import (
    GateArgs,
    LinearArgs,
    NormArgs,
    PlanArgs,
    PromptLoraArgs,
    SumPartsArgs,
    assert_layout,
    write_constants,
)

CUDA_TYPES = {torch.bfloat16: "BFloat16", torch.float16: "Float16"}
ACTIVATIONS = {"silu": "Silu", "gelu": "Gelu", "gelu_tanh": "GeluTanh", "relu": "Relu"}
GATE_THREADS = 256
PROMPT_COLUMNS = 512  # per block
HEIGHTS = (8, 16, 32, 64, 128)  # maximum numbers of batch rows, one per linear variant
TILE_BYTES = 128 * 128  # 128 columns x 64 weights x 2 bytes
MAX_SHARED_BYTES = 227 * 1024  # per block
TWO_BLOCKS_SHARED_BYTES = 113 * 1024  # per block, with two blocks per SM
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
    def shared_bytes(self) -> int:
        return self.stages * (TILE_BYTES + self.height * 128 + 16)

    @property
    def blocks_per_sm(self) -> int:
        return 2 if 2 * self.shared_bytes <= MAX_SHARED_BYTES else 1

    @property
    def source(self) -> str:
        lora = "true" if self.with_lora else "false"
        arguments = f"{CUDA_TYPES[self.dtype]}, {self.height}, {self.stages}, {self.cluster}, {lora}"
        return "\n".join(
            (
                read_source("primitives.cu"),
                read_source("lora.cu"),
                _write_wgmma(self.height),
                read_source("linear.cu"),
                assert_layout(LinearArgs),
                f'extern "C" __global__ void __cluster_dims__({self.cluster}) '
                f"__launch_bounds__(THREADS, {self.blocks_per_sm}) linear_kernel(const __grid_constant__ TensorMap w, "
                "const __grid_constant__ TensorMap x, const __grid_constant__ LinearArgs p) {",
                f"  linear<{arguments}>(&w, &x, p);",
                "}",
            )
        )


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
    """Settings of a prompt LoRA kernel. `step` is `sum_parts`, `expand_prompt`, or `gate_prompt` with an activation."""

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


def _write_wgmma(height: int) -> str:
    """Return the source of a WGMMA function for 64 columns of W and `height` rows of x, with explicit registers."""
    count = height // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))

    def instruction(dtype: str) -> str:
        return (
            f'asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n'
            f"wgmma.mma_async.sync.aligned.m64n{height}k16.f32.{dtype}.{dtype} "
            f'{{{sums}}}, %{count}, %{count + 1}, p, 1, 1, 0, 0;\\n}}\\n" : {outputs} : "l"(a), "l"(b), "r"(1));'
        )

    return (
        f"template <class Number> DEVICE void wgmma(float (&d)[{count}], u64 a, u64 b) {{\n"
        f"  if constexpr (Number::is_bfloat16) {instruction('bf16')}\n  else {instruction('f16')}\n}}"
    )
