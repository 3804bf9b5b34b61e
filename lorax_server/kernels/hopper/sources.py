"""The sources of the kernels' variants. Each variant is compiled on its own, when a model needs it."""

import ctypes
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Protocol

import torch

from lorax_server.kernels.hopper.arguments import (
    Args,
    GateArgs,
    NormArgs,
    PlanArgs,
    PromptArgs,
    SumArgs,
    check_layout,
    write_constants,
)

NUMBERS = {torch.bfloat16: "BFloat16", torch.float16: "Float16"}
ACTIVATIONS = {"silu": "Silu", "gelu": "Gelu", "gelu_tanh": "GeluTanh", "relu": "Relu"}
GATE_THREADS = 256
PROMPT_COLUMNS = 512  # of a block
HEIGHTS = (8, 16, 32, 64, 128)  # rows of x that a product is made for
TILE_BYTES = 128 * 128  # 128 columns of 64 weights
SHARED_BYTES = 227 * 1024  # that a block may have
TWO_BLOCKS_BYTES = 113 * 1024  # that each of two blocks on a processor may have
LORA_BYTES = 150 * 1024  # of shared memory for LoRA alone


class Variant(Protocol):
    """One kernel, compiled on its own. Variants of a kind with equal fields are equal, and hashable."""

    @property
    def shared_bytes(self) -> int:
        """The dynamic shared memory of a block."""
        ...

    @property
    def source(self) -> str:
        """The text of one kernel, and of all that it calls."""
        ...


@dataclass(frozen=True)
class LinearVariant:
    """The product of up to `height` rows, with or without LoRA beside it."""

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
        return 2 if 2 * self.shared_bytes <= SHARED_BYTES else 1

    @property
    def source(self) -> str:
        lora = "true" if self.with_lora else "false"
        arguments = f"{NUMBERS[self.dtype]}, {self.height}, {self.stages}, {self.cluster}, {lora}"
        return "\n".join(
            (
                read_source("prelude.cu"),
                read_source("lora.cu"),
                _wgmma(self.height),
                read_source("linear.cu"),
                check_layout(Args),
                f'extern "C" __global__ void __cluster_dims__({self.cluster}) '
                f"__launch_bounds__(THREADS, {self.blocks_per_sm}) linear_kernel(const __grid_constant__ TensorMap w, "
                "const __grid_constant__ TensorMap x, const __grid_constant__ Args p) {",
                f"  linear<{arguments}>(&w, &x, p);",
                "}",
            )
        )


@dataclass(frozen=True)
class AddLoraVariant:
    """LoRA alone, added to what another library has computed."""

    dtype: torch.dtype

    @property
    def shared_bytes(self) -> int:
        return LORA_BYTES

    @property
    def source(self) -> str:
        call = write_kernel("THREADS, 1", Args, f"add_lora<{NUMBERS[self.dtype]}>(p);")
        return "\n".join((read_source("prelude.cu"), read_source("lora.cu"), call))


@dataclass(frozen=True)
class PlanVariant:
    """The plan of a batch, which LoRA follows."""

    shared_bytes: int = 0

    @property
    def source(self) -> str:
        parts = map(read_source, ("prelude.cu", "lora.cu", "plan.cu"))
        return "\n".join((*parts, check_layout(PlanArgs)))


@dataclass(frozen=True)
class NormVariant:
    """The norm of rows, of which a thread has some times eight elements."""

    dtype: torch.dtype
    chunks: int
    shared_bytes: int = 0

    @property
    def source(self) -> str:
        call = write_kernel("1024", NormArgs, f"rms_norm<{NUMBERS[self.dtype]}, {self.chunks}>(p);")
        return "\n".join((read_source("prelude.cu"), read_source("lora.cu"), read_source("small.cu"), call))


@dataclass(frozen=True)
class GateVariant:
    """`activation(gate) * up`."""

    dtype: torch.dtype
    activation: str
    shared_bytes: int = 0

    @property
    def source(self) -> str:
        call = f"gate<{NUMBERS[self.dtype]}, {ACTIVATIONS[self.activation]}>(p);"
        kernel = write_kernel(str(GATE_THREADS), GateArgs, call)
        return "\n".join((read_source("prelude.cu"), read_source("lora.cu"), read_source("small.cu"), kernel))


@dataclass(frozen=True)
class PromptVariant:
    """A step of the LoRA of prompts: `sum_parts`, `expand_prompt`, or `gate_prompt` with an activation."""

    dtype: torch.dtype
    step: str
    activation: str | None = None
    shared_bytes: int = 0

    @property
    def source(self) -> str:
        types = NUMBERS[self.dtype] + (f", {ACTIVATIONS[self.activation]}" if self.activation else "")
        args = SumArgs if self.step == "sum_parts" else PromptArgs
        parts = map(read_source, ("prelude.cu", "lora.cu", "small.cu", "prompt.cu"))
        return "\n".join((*parts, write_kernel("PROMPT_THREADS, 2", args, f"{self.step}<{types}>(p);")))


def write_kernel(bounds: str, args: type[ctypes.Structure], call: str) -> str:
    """Write the kernel of a variant, which calls a function of its source, and is named after it."""
    name = re.split(r"\W", call, maxsplit=1)[0] + "_kernel"
    head = f'extern "C" __global__ void __launch_bounds__({bounds}) {name}(const __grid_constant__ {args.__name__} p)'
    return f"{check_layout(args)}\n{head} {{ {call} }}"


def find_kernel(source: str) -> str:
    """Return the name of the kernel of a source, under which profilers show it."""
    (name,) = re.findall(r"(\w+_kernel)\(const __grid_constant__", source)
    return str(name)


@cache
def read_source(name: str) -> str:
    text = (files("lorax_server.kernels.hopper") / name).read_text()
    return f"{write_constants()}\n{text}" if name == "prelude.cu" else text


def _wgmma(height: int) -> str:
    """Write the instruction that multiplies 64 columns of W by `height` rows of x, which names all its registers."""
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
