"""The sources of the kernels' variants. Each variant is compiled on its own, when a model needs it."""

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import torch

NUMBERS = {torch.bfloat16: "BFloat16", torch.float16: "Float16"}
ACTIVATIONS = {"silu": "Silu", "gelu": "Gelu", "gelu_tanh": "GeluTanh", "relu": "Relu"}
GATE_THREADS = 256
PROMPT_THREADS = 256
PROMPT_COLUMNS = 512  # of a block
HEIGHTS = (8, 16, 32, 64, 128)  # rows of x that a product is made for
THREADS = 288
PLAN_THREADS = 256
TILE_BYTES = 128 * 128  # 128 columns of 64 weights
SHARED_BYTES = 227 * 1024  # that a block may have
PREFILL_STAGES = 2  # of keys and values
LORA_BYTES = 150 * 1024  # of shared memory for LoRA alone


class LinearVariant(NamedTuple):
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
                _text("prelude.cu"),
                _text("lora.cu"),
                _wgmma(self.height),
                _text("linear.cu"),
                f'extern "C" __global__ void __cluster_dims__({self.cluster}) '
                f"__launch_bounds__(THREADS, {self.blocks_per_sm}) kernel(const __grid_constant__ TensorMap w, "
                "const __grid_constant__ TensorMap x, const __grid_constant__ Args p) {",
                f"  linear<{arguments}>(&w, &x, p);",
                "}",
            )
        )


class AddLoraVariant(NamedTuple):
    """LoRA alone, added to what another library has computed."""

    dtype: torch.dtype

    @property
    def shared_bytes(self) -> int:
        return LORA_BYTES

    @property
    def source(self) -> str:
        head = 'extern "C" __global__ void __launch_bounds__(THREADS, 1) kernel(const __grid_constant__ Args p)'
        return "\n".join((_text("prelude.cu"), _text("lora.cu"), f"{head} {{ add_lora<{NUMBERS[self.dtype]}>(p); }}"))


class PlanVariant(NamedTuple):
    """The plan of a batch, which LoRA follows."""

    shared_bytes: int = 0

    @property
    def source(self) -> str:
        return "\n".join((_text("prelude.cu"), _text("lora.cu"), _text("plan.cu")))


class NormVariant(NamedTuple):
    """The norm of rows, of which a thread has some times eight elements."""

    dtype: torch.dtype
    chunks: int
    shared_bytes: int = 0

    @property
    def source(self) -> str:
        call = f"rms_norm<{NUMBERS[self.dtype]}, {self.chunks}>(p);"
        head = 'extern "C" __global__ void __launch_bounds__(1024) kernel(const __grid_constant__ NormArgs p)'
        return "\n".join((_text("prelude.cu"), _text("lora.cu"), _text("small.cu"), f"{head} {{ {call} }}"))


class GateVariant(NamedTuple):
    """`activation(gate) * up`."""

    dtype: torch.dtype
    activation: str
    shared_bytes: int = 0

    @property
    def source(self) -> str:
        call = f"gate<{NUMBERS[self.dtype]}, {ACTIVATIONS[self.activation]}>(p);"
        head = (
            f'extern "C" __global__ void __launch_bounds__({GATE_THREADS}) kernel(const __grid_constant__ GateArgs p)'
        )
        return "\n".join((_text("prelude.cu"), _text("lora.cu"), _text("small.cu"), f"{head} {{ {call} }}"))


class PromptVariant(NamedTuple):
    """A step of the LoRA of prompts: `sum_parts`, `expand_prompt`, or `gate_prompt` with an activation."""

    dtype: torch.dtype
    step: str
    activation: str | None = None
    shared_bytes: int = 0

    @property
    def source(self) -> str:
        types = NUMBERS[self.dtype] + (f", {ACTIVATIONS[self.activation]}" if self.activation else "")
        args = "SumArgs" if self.step == "sum_parts" else "PromptArgs"
        head = (
            f'extern "C" __global__ void __launch_bounds__(PROMPT_THREADS, 2) kernel(const __grid_constant__ {args} p)'
        )
        parts = map(_text, ("prelude.cu", "lora.cu", "small.cu", "prompt.cu"))
        return "\n".join((*parts, f"{head} {{ {self.step}<{types}>(p); }}"))


class PrefillVariant(NamedTuple):
    """Attention of sequences with several new tokens."""

    dtype: torch.dtype
    head_dim: int
    soft_cap: bool

    @property
    def groups(self) -> int:
        """Return the warpgroups that compute, each with 64 rows: three where registers allow."""
        return 3 if self.head_dim <= 64 else 2

    @property
    def keys(self) -> int:
        """Return the keys of a tile: as many as registers allow."""
        return {64: 96, 256: 64}.get(self.head_dim, 128)

    @property
    def rows(self) -> int:
        """Return the rows of a block: queries times heads."""
        return 64 * self.groups

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    @property
    def shared_bytes(self) -> int:
        chunks = -(-self.head_dim // 64)
        query_stages = 2 if self.head_dim <= 128 else 1
        barriers = 2 * query_stages + 4 * PREFILL_STAGES
        return chunks * 128 * (query_stages * self.rows + 2 * PREFILL_STAGES * self.keys) + 8 * barriers

    @property
    def source(self) -> str:
        soft_cap = "true" if self.soft_cap else "false"
        sizes = f"{self.head_dim}, {self.keys}, {PREFILL_STAGES}, {self.groups}"
        arguments = f"{NUMBERS[self.dtype]}, {sizes}, {soft_cap}"
        return "\n".join(
            (
                _text("prelude.cu"),
                _wgmma_attention(self.head_dim, self.keys),
                _text("prefill.cu"),
                f'extern "C" __global__ void __launch_bounds__({self.threads}, 1) kernel('
                "const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, "
                "const __grid_constant__ TensorMap v, const __grid_constant__ PrefillArgs p) {",
                f"  prefill<{arguments}>(&q, &k, &v, p);",
                "}",
            )
        )


Variant = PromptVariant | LinearVariant | AddLoraVariant | PlanVariant | NormVariant | GateVariant | PrefillVariant


@cache
def _text(name: str) -> str:
    return (files("lorax_server.kernels.hopper") / name).read_text()


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


def _wgmma_attention(head_dim: int, keys: int) -> str:
    """Write the matrix instructions of attention, and the waits for them, which name all their registers."""
    rows, weights = "u64 a", "const u32* a"
    scores = ", ".join(f'"+f"(s[{i}])' for i in range(keys // 2))
    sums = ", ".join(f'"+f"(o[{i}])' for i in range(head_dim // 2))
    words = ", ".join(f'"+r"(w[{i}])' for i in range(keys // 4))
    wait = "wgmma.wait_group.sync.aligned"
    return "\n".join(
        (
            _product("start_scores", keys, rows, ('"l"(a)',), "0"),
            _product("add_scores", keys, rows, ('"l"(a)',), "1"),
            _product("add_values", head_dim, weights, [f'"r"(a[{i}])' for i in range(4)], None),
            f"template <int PENDING> DEVICE void wait_scores(float (&s)[{keys // 2}]) {{",
            f'  asm volatile("{wait} %{keys // 2};" : {scores} : "n"(PENDING) : "memory");\n}}',
            f"DEVICE void wait_values(float (&o)[{head_dim // 2}], u32 (&w)[{keys // 4}]) {{",
            f'  asm volatile("{wait} 0;" : {sums}, {words} : : "memory");\n}}',
        )
    )


def _product(name: str, columns: int, argument: str, a: Sequence[str], adds: str | None) -> str:
    """Write a product of 64 rows: `a` is the place of a matrix in shared memory, or its registers.

    With registers, the other matrix lies with its rows along K, and is transposed. `adds`: 1 to add to what the sums
    are, 0 to write them, None if the caller says.
    """
    count = columns // 2
    sums, first = (
        ", ".join(f"%{i}" for i in range(start, end)) for start, end in ((0, count), (count, count + len(a)))
    )
    left, flags = (f"{{{first}}}", "1, 1, 1") if len(a) > 1 else (first, "1, 1, 0, 0")
    outputs = ", ".join(f'"{"=" if adds == "0" else "+"}f"(d[{i}])' for i in range(count))

    inputs = (*a, '"l"(b)') if adds else (*a, '"l"(b)', '"r"(adds)')
    last = "" if adds else ", int adds"

    def instruction(dtype: str) -> str:
        return (
            f'asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, {adds or f"%{count + len(a) + 1}"}, 0;\\n'
            f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{dtype}.{dtype} "
            f'{{{sums}}}, {left}, %{count + len(a)}, p, {flags};\\n}}\\n" : {outputs} : {", ".join(inputs)});'
        )

    return (
        f"template <class Number> DEVICE void {name}(float (&d)[{count}], {argument}, u64 b{last}) {{\n"
        f"  if constexpr (Number::is_bfloat16) {instruction('bf16')}\n  else {instruction('f16')}\n}}"
    )
