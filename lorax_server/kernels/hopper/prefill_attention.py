"""Launch prefill attention over the paged KV cache (WGMMA and TMA)."""

import ctypes
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lorax_server.errors import EngineError
from lorax_server.kernels.hopper.arguments import MAP_BYTES, PrefillArgs, assert_layout
from lorax_server.kernels.hopper.driver import Kernel, Kernels, tensor_map
from lorax_server.kernels.hopper.sources import CUDA_TYPES, read_source
from lorax_server.kernels.ops import AttentionSpec, LayerCache, PagedBatch
from lorax_server.kernels.triton.prefill_attention import plan_tiles_on_device

HEAD_DIMS = (64, 80, 96, 128, 256)
MAX_CACHED_SHAPES = 256  # limit for the tensor map cache
MAX_MAPS_PER_SHAPE = 4096  # limit for tensors of one shape
MAX_IDLE_ROWS = 8  # maximum per block, if the packed heads do not divide the rows
STAGES = 2  # pipeline stages for keys and values
Tiles = npt.NDArray[np.int32]


@dataclass(frozen=True)
class PrefillVariant:
    """Settings of an attention kernel for sequences with several new tokens."""

    dtype: torch.dtype
    head_dim: int
    soft_cap: bool

    @property
    def num_warpgroups(self) -> int:
        """Return the number of compute warpgroups, which process 64 rows each: three if there are enough registers,
        otherwise two.
        """
        return 3 if self.head_dim <= 64 else 2

    @property
    def keys(self) -> int:
        """Return the number of keys per tile, which the number of registers limits."""
        return {64: 112, 256: 64}.get(self.head_dim, 128)

    @property
    def rows(self) -> int:
        """Return the number of rows per thread block, which is the number of tokens times the number of
        packed heads.
        """
        return 64 * self.num_warpgroups

    @property
    def threads(self) -> int:
        return 128 * (self.num_warpgroups + 1)

    @property
    def shared_bytes(self) -> int:
        chunks = -(-self.head_dim // 64)
        query_stages = 2 if self.head_dim <= 128 else 1
        barriers = 2 * query_stages + 4 * STAGES
        return chunks * 128 * (query_stages * self.rows + 2 * STAGES * self.keys) + 8 * barriers

    @property
    def source(self) -> str:
        soft_cap = "true" if self.soft_cap else "false"
        sizes = f"{self.head_dim}, {self.keys}, {STAGES}, {self.num_warpgroups}"
        arguments = f"{CUDA_TYPES[self.dtype]}, {sizes}, {soft_cap}"
        return "\n".join(
            (
                read_source("primitives.cu"),
                _write_attention_wgmma(self.head_dim, self.keys),
                read_source("prefill_attention.cu"),
                assert_layout(PrefillArgs),
                f'extern "C" __global__ void __launch_bounds__({self.threads}, 1) prefill_kernel('
                "const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, "
                "const __grid_constant__ TensorMap v, const __grid_constant__ PrefillArgs p) {",
                f"  prefill<{arguments}>(&q, &k, &v, p);",
                "}",
            )
        )


class _TensorMap(ctypes.Structure):
    """A CUDA tensor map as a kernel argument."""

    _fields_ = (("words", ctypes.c_ubyte * MAP_BYTES),)


class _Launch(NamedTuple):
    """Launch parameters that all layers in a forward pass share."""

    kernel: Kernel
    tiles: torch.Tensor
    args: PrefillArgs
    blocks: int
    threads: int
    query_box: tuple[int, int]  # heads and tokens
    query_maps: dict[int, _TensorMap]  # address -> map, for tensors of one shape
    cache_maps: dict[int, _TensorMap]


class PrefillAttention:
    """Launches attention for all sequences with more than one new token. Their keys and values must already be in the
    cache.

    Query heads that share a KV head are packed into one block, so short prefill chunks also fill all rows of a block.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._num_sms: int = torch.cuda.get_device_properties(kernels.device).multi_processor_count
        self._maps: dict[tuple[object, ...], dict[int, _TensorMap]] = {}

    def supports(self, q: torch.Tensor, cache: LayerCache, spec: AttentionSpec) -> bool:
        """Return True if the kernel supports these tensors."""
        keys, values = cache
        return (
            q.dtype in CUDA_TYPES
            and q.dtype == keys.dtype == values.dtype
            and q.shape[2] in HEAD_DIMS
            and q.shape[2] == keys.shape[3]
            and q.shape[1] % keys.shape[1] == 0
            and keys.shape[2] % 8 == 0
            and keys.is_contiguous()
            and values.is_contiguous()
            and q.stride(2) == 1
            and (q.stride(0) | q.stride(1)) % 8 == 0
            and (q.data_ptr() | keys.data_ptr() | values.data_ptr()) % 16 == 0  # required by TMA
            and spec.scale > 0
        )

    def __call__(
        self, out: torch.Tensor, q: torch.Tensor, cache: LayerCache, batch: PagedBatch, spec: AttentionSpec
    ) -> None:
        """Write the rows of `out` (contiguous) for sequences with several new tokens."""
        key = ("packed prefill", q.dtype, q.shape, q.stride(), cache[0].shape, spec)
        launch = batch.cached(key, self._prepare, q, cache, batch, spec)
        if not len(launch.tiles):
            return
        args = PrefillArgs.from_buffer_copy(launch.args)
        args.out = out.data_ptr()
        queries = _cached_map(launch.query_maps, _query_map, q, launch.query_box)
        keys, values = (_cached_map(launch.cache_maps, _cache_map, x, args.box) for x in cache)
        launch.kernel.launch(launch.blocks, launch.threads, [queries, keys, values, args], early=True)

    def _prepare(self, q: torch.Tensor, cache: LayerCache, batch: PagedBatch, spec: AttentionSpec) -> _Launch:
        """Return the launch parameters that all layers in a forward pass share."""
        if batch.block_tables.dtype != torch.int32 or batch.block_tables.stride(1) != 1:
            raise EngineError("block tables must be int32 with unit row stride")
        num_blocks, num_kv_heads, block_size, head_dim = cache[0].shape
        variant, heads = PrefillVariant(q.dtype, head_dim, spec.soft_cap is not None), q.shape[1]
        pack = choose_packed_heads(heads // num_kv_heads, variant.rows)
        tokens = variant.rows // pack
        plan_tiles = plan_tiles_on_device if batch.in_graph else _copy_tiles_to_device
        tiles = batch.cached(("packed tiles", tokens), plan_tiles, batch, tokens)
        args = PrefillArgs(tiles=tiles.data_ptr(), tables=batch.block_tables.data_ptr())
        args.items, args.heads, args.group = len(tiles) * (heads // pack), heads, heads // num_kv_heads
        args.pack, args.tokens = pack, tokens
        args.block_size, args.box, args.num_blocks = block_size, math.gcd(block_size, variant.keys), num_blocks
        args.table_stride, args.window = batch.block_tables.stride(0), spec.window_or_max
        args.factor = (spec.soft_cap or spec.scale) * math.log2(math.e)
        args.cap = 2 * math.log2(math.e) * spec.scale / (spec.soft_cap or 1)
        if len(self._maps) >= MAX_CACHED_SHAPES:
            self._maps.clear()
        query_maps = self._maps.setdefault((q.dtype, q.shape, q.stride(), pack, tokens), {})
        cache_maps = self._maps.setdefault((q.dtype, cache[0].shape, args.box), {})
        kernel, blocks = self._kernels.get(variant), min(args.items, self._num_sms)
        return _Launch(kernel, tiles, args, blocks, variant.threads, (pack, tokens), query_maps, cache_maps)


def _cached_map(
    maps: dict[int, _TensorMap], make: Callable[..., bytes], tensor: torch.Tensor, box: object
) -> _TensorMap:
    """Return the tensor map for `tensor`, cached by address."""
    address = tensor.data_ptr()
    cached = maps.get(address)
    if cached is None:
        if len(maps) >= MAX_MAPS_PER_SHAPE:
            maps.clear()
        cached = maps[address] = _TensorMap.from_buffer_copy(make(tensor, box))
    return cached


def _query_map(q: torch.Tensor, box: tuple[int, int]) -> bytes:
    """Return a tensor map for queries, with boxes of (heads, tokens) and 64 columns."""
    strides = [stride * q.itemsize for stride in (q.stride(1), q.stride(0))]
    return tensor_map(q, q.shape[::-1], strides, (64, *box))


def _cache_map(cache: torch.Tensor, rows: int) -> bytes:
    """Return a tensor map for the KV cache. A box is `rows` tokens of one head, in groups of eight rows x 64 columns.

    If the width is not a multiple of 64, a box covers 64 columns, and columns past the end read as zero.
    """
    num_blocks, num_heads, block_size, width = cache.shape
    chunks = width // 64 if width % 64 == 0 else 1
    sizes = (64 if width % 64 == 0 else width, 8, chunks, block_size // 8, num_blocks * num_heads)
    strides = [count * cache.itemsize for count in (width, 64, 8 * width, block_size * width)]
    return tensor_map(cache, sizes, strides, (64, 8, chunks, rows // 8, 1))


def choose_packed_heads(group: int, rows: int) -> int:
    """Return the number of query heads per thread block: the largest divisor of `group` that leaves at most
    `MAX_IDLE_ROWS` rows idle.
    """
    divisors = [pack for pack in range(1, min(group, rows) + 1) if group % pack == 0]
    return max(pack for pack in divisors if rows % pack <= MAX_IDLE_ROWS)


def list_prefill_tiles(inputs: Iterable[int], cached: Iterable[int], tokens: int) -> Tiles:
    """Return tiles for sequences with several new tokens, `[tiles, 4]`, in descending order of work.

    The columns are the sequence, the first token in the batch, its position, and the number of tokens up to the end of
    the sequence.
    """
    new, before = (np.array(list(lengths), dtype=np.int64) for lengths in (inputs, cached))
    starts = np.cumsum(new) - new
    counts = np.where(new > 1, -(-new // tokens), 0)
    sequence = np.repeat(np.arange(len(new)), counts)
    offset = (np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)) * tokens
    position = before[sequence] + offset
    tiles = np.stack((sequence, starts[sequence] + offset, position, new[sequence] - offset), axis=1)
    return tiles[np.argsort(-position, kind="stable")].astype(np.int32)


def _copy_tiles_to_device(batch: PagedBatch, tokens: int) -> torch.Tensor:
    """Return the tile list on the device. Synchronizes only if the host does not know the sequence lengths."""
    inputs, cached = batch.read_lengths()
    tiles = torch.from_numpy(list_prefill_tiles(inputs, cached, tokens))
    return tiles.pin_memory().to(batch.block_tables.device, non_blocking=True) if len(tiles) else tiles


def _write_attention_wgmma(head_dim: int, keys: int) -> str:
    """Return CUDA source for the attention WGMMA wrappers and their wait functions.

    The wrappers contain inline PTX with explicit register lists.
    """
    rows, weights = "u64 a", "const u32* a"
    scores = ", ".join(f'"+f"(s[{i}])' for i in range(keys // 2))
    sums = ", ".join(f'"+f"(o[{i}])' for i in range(head_dim // 2))
    words = ", ".join(f'"+r"(w[{i}])' for i in range(keys // 4))
    wait = "wgmma.wait_group.sync.aligned"
    return "\n".join(
        (
            _write_wgmma("start_scores", keys, rows, ('"l"(a)',), "0"),
            _write_wgmma("add_scores", keys, rows, ('"l"(a)',), "1"),
            _write_wgmma("add_values", head_dim, weights, [f'"r"(a[{i}])' for i in range(4)], None),
            f"template <int PENDING> DEVICE void wait_scores(float (&s)[{keys // 2}]) {{",
            f'  asm volatile("{wait} %{keys // 2};" : {scores} : "n"(PENDING) : "memory");\n}}',
            f"DEVICE void wait_values(float (&o)[{head_dim // 2}], u32 (&w)[{keys // 4}]) {{",
            f'  asm volatile("{wait} 0;" : {sums}, {words} : : "memory");\n}}',
        )
    )


def _write_wgmma(name: str, columns: int, argument: str, a: Sequence[str], adds: str | None) -> str:
    """Return the source of a WGMMA function for 64 rows. `a` is a shared memory descriptor or a list of registers.

    With registers, the other operand is transposed. `adds` is "1" to accumulate, "0" to overwrite, or None if the
    generated function has a parameter `adds`.
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
