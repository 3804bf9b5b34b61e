"""Attention of sequences with several new tokens over the paged cache, on the tensor cores."""

import ctypes
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lorax_server.errors import EngineError
from lorax_server.kernels.hopper.driver import MAP_BYTES, Kernels, tensor_map
from lorax_server.kernels.hopper.sources import NUMBERS, Variant, read_source
from lorax_server.kernels.ops import AttentionSpec, LayerCache, PagedBatch

HEAD_DIMS = (64, 80, 96, 128, 256)
NO_WINDOW = 2**30
MAX_MAPS = 4096  # that are kept: those of the caches, and those of queries at places that come again
MAX_IDLE_ROWS = 8
Tiles = npt.NDArray[np.int32]


@dataclass(frozen=True)
class PrefillVariant:
    """Attention of sequences with several new tokens."""

    dtype: torch.dtype
    head_dim: int
    soft_cap: bool
    stages: int = 2
    turns: bool = False
    groups: int = 2  # of 64 rows

    @property
    def keys(self) -> int:
        """Return the keys of a tile."""
        return 128 if self.head_dim <= 128 else 64

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
        return chunks * 128 * (self.rows + 2 * self.stages * self.keys) + 16 + 32 * self.stages

    @property
    def source(self) -> str:
        flags = ", ".join("true" if flag else "false" for flag in (self.soft_cap, self.turns))
        arguments = f"{NUMBERS[self.dtype]}, {self.head_dim}, {self.keys}, {self.stages}, {self.groups}, {flags}"
        return "\n".join(
            (
                read_source("prelude.cu"),
                _wgmma_attention(self.head_dim, self.keys),
                read_source("prefill.cu"),
                f'extern "C" __global__ void __launch_bounds__({self.threads}, 1) prefill_kernel('
                "const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, "
                "const __grid_constant__ TensorMap v, const __grid_constant__ PrefillArgs p) {",
                f"  prefill<{arguments}>(&q, &k, &v, p);",
                "}",
            )
        )


class _PrefillArgs(ctypes.Structure):
    """`PrefillArgs` of prefill.cu, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("tiles", "tables", "out")),
        *((name, ctypes.c_int) for name in ("items", "heads", "group", "pack", "tokens")),
        *((name, ctypes.c_int) for name in ("block_size", "box", "num_blocks", "table_stride", "window")),
        *((name, ctypes.c_float) for name in ("factor", "cap")),
    )


class _Map(ctypes.Structure):
    """A tensor map, as a launch takes it."""

    _fields_ = (("words", ctypes.c_ubyte * MAP_BYTES),)


class PrefillAttention:
    """Attends from all tokens of every sequence that has more than one new token to its sequence, all in the cache.

    The heads that share a KV head are packed into the rows of a block, so that a short chunk fills the rows, too.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._num_sms: int = torch.cuda.get_device_properties(kernels.device).multi_processor_count
        self._maps: dict[tuple[object, ...], _Map] = {}

    def fits(self, q: torch.Tensor, cache: LayerCache, spec: AttentionSpec) -> bool:
        """Return whether the kernel serves these tensors."""
        keys = cache[0]
        return (
            q.dtype in NUMBERS
            and q.shape[-1] in HEAD_DIMS
            and q.shape[1] % keys.shape[1] == 0
            and keys.shape[2] % 8 == 0
            and all(x.dtype == q.dtype and x.shape[-1] == q.shape[-1] and _can_copy(x) for x in (q, *cache))
            and all(x.is_contiguous() for x in cache)
            and spec.scale > 0
        )

    def variants(self, dtype: torch.dtype, head_dim: int, specs: Iterable[AttentionSpec]) -> set[Variant]:
        """Return the kernels that layers of these constants need."""
        if dtype not in NUMBERS or head_dim not in HEAD_DIMS:
            return set()
        return {PrefillVariant(dtype, head_dim, spec.soft_cap is not None) for spec in specs}

    def __call__(
        self, out: torch.Tensor, q: torch.Tensor, cache: LayerCache, batch: PagedBatch, spec: AttentionSpec
    ) -> None:
        """Write the rows of `out`, which is contiguous, of sequences with several new tokens, and no others."""
        keys, heads = cache[0], q.shape[1]
        variant = PrefillVariant(q.dtype, q.shape[2], spec.soft_cap is not None)
        pack = choose_pack(heads // keys.shape[1], variant.rows)
        tokens = variant.rows // pack
        tiles = batch.once(("packed tiles", tokens), _place_tiles, batch, tokens)
        if not len(tiles):
            return
        box = math.gcd(keys.shape[2], variant.keys)
        args = _PrefillArgs(tiles=tiles.data_ptr(), tables=batch.block_tables.data_ptr(), out=out.data_ptr())
        args.items, args.heads, args.group = len(tiles) * (heads // pack), heads, heads // keys.shape[1]
        args.pack, args.tokens = pack, tokens
        args.block_size, args.box, args.num_blocks = keys.shape[2], box, keys.shape[0]
        args.table_stride, args.window = batch.block_tables.stride(0), spec.window or NO_WINDOW
        args.factor = (spec.soft_cap or spec.scale) * math.log2(math.e)
        if spec.soft_cap is not None:
            args.cap = 2 * math.log2(math.e) * spec.scale / spec.soft_cap
        maps = [self._map(_query_map, q, (pack, tokens)), *(self._map(_cache_map, x, box) for x in cache)]
        blocks = min(args.items, self._num_sms)
        self._kernels.get(variant).launch(blocks, variant.threads, [*maps, args], early=True)

    def _map(self, make: Callable[..., bytes], tensor: torch.Tensor, box: int | tuple[int, int]) -> _Map:
        key = (make, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), box)
        if key not in self._maps:
            if len(self._maps) >= MAX_MAPS:
                self._maps.clear()
            self._maps[key] = _Map.from_buffer_copy(make(tensor, box))
        return self._maps[key]


def _query_map(q: torch.Tensor, box: tuple[int, int]) -> bytes:
    """Describe boxes of some heads of some tokens, 64 columns each."""
    strides = [stride * q.itemsize for stride in (q.stride(1), q.stride(0))]
    return tensor_map(q, q.shape[::-1], strides, (64, *box))


def _cache_map(cache: torch.Tensor, rows: int) -> bytes:
    """Describe boxes of some rows of one head of a block: groups of eight rows, in them chunks of 64 columns.

    Where the last chunk is not full, a box has one chunk. Beyond the last column come zeros.
    """
    num_blocks, num_heads, block_size, width = cache.shape
    chunks = width // 64 if width % 64 == 0 else 1
    sizes = (64 if width % 64 == 0 else width, 8, chunks, block_size // 8, num_blocks * num_heads)
    strides = [count * cache.itemsize for count in (width, 64, 8 * width, block_size * width)]
    return tensor_map(cache, sizes, strides, (64, 8, chunks, rows // 8, 1))


def choose_pack(group: int, rows: int) -> int:
    """Return how many of the heads that share a KV head a block packs: all, or as many as leave few rows idle."""
    divisors = [pack for pack in range(1, min(group, rows) + 1) if group % pack == 0]
    return max(pack for pack in divisors if rows % pack <= MAX_IDLE_ROWS)


def list_tiles(inputs: Iterable[int], cached: Iterable[int], tokens: int) -> Tiles:
    """Cut the sequences with several new tokens into tiles: `[tiles, 4]`, those with the most keys first.

    A tile is its sequence, its first token in the batch, that token's position, and the tokens from there to the
    sequence's end.
    """
    new, before = (np.array(list(lengths), dtype=np.int64) for lengths in (inputs, cached))
    starts = np.cumsum(new) - new
    counts = np.where(new > 1, -(-new // tokens), 0)
    sequence = np.repeat(np.arange(len(new)), counts)
    offset = (np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)) * tokens
    position = before[sequence] + offset
    tiles = np.stack((sequence, starts[sequence] + offset, position, new[sequence] - offset), axis=1)
    return tiles[np.argsort(-position, kind="stable")].astype(np.int32)


def _place_tiles(batch: PagedBatch, tokens: int) -> torch.Tensor:
    """Copy the tiles of a batch to its device, without a wait if the host knows the lengths."""
    if batch.block_tables.dtype != torch.int32 or batch.block_tables.stride(1) != 1:
        raise EngineError("block tables are rows of int32")
    inputs, cached = batch.host_lengths or (batch.input_lengths.tolist(), batch.cache_lengths.tolist())
    tiles = torch.from_numpy(list_tiles(inputs, cached, tokens))
    return tiles.pin_memory().to(batch.block_tables.device, non_blocking=True) if len(tiles) else tiles


def _can_copy(tensor: torch.Tensor) -> bool:
    """Return whether the copy engine can read a tensor: whole elements next to each other, places of 16 bytes."""
    strides = tensor.stride()
    return strides[-1] == 1 and all(stride % 8 == 0 for stride in strides[:-1]) and tensor.data_ptr() % 16 == 0


def _wgmma_attention(head_dim: int, keys: int) -> str:
    """Write the matrix instructions of attention, and the waits for them, which name all their registers."""
    rows, weights = "u64 a", "const u32* a"
    scores = ", ".join(f'"+f"(s[{i}])' for i in range(keys // 2))
    sums = ", ".join(f'"+f"(o[{i}])' for i in range(head_dim // 2))
    words = ", ".join(f'"+r"(w[{i}])' for i in range(keys // 4))
    wait = "wgmma.wait_group.sync.aligned"
    return "\n".join(
        (
            _product("start_scores", keys, rows, ('"l"(a)',), accumulate=False),
            _product("add_scores", keys, rows, ('"l"(a)',), accumulate=True),
            _product("add_values", head_dim, weights, [f'"r"(a[{i}])' for i in range(4)], accumulate=True),
            f"template <int PENDING> DEVICE void wait_scores(float (&s)[{keys // 2}]) {{",
            f'  asm volatile("{wait} %{keys // 2};" : {scores} : "n"(PENDING) : "memory");\n}}',
            f"DEVICE void wait_values(float (&o)[{head_dim // 2}], u32 (&w)[{keys // 4}]) {{",
            f'  asm volatile("{wait} 0;" : {sums}, {words} : : "memory");\n}}',
        )
    )


def _product(name: str, columns: int, argument: str, a: Sequence[str], accumulate: bool) -> str:
    """Write a product of 64 rows: `a` is the place of a matrix in shared memory, or its registers.

    With registers, the other matrix lies with its rows along K, and is transposed.
    """
    count = columns // 2
    sums, first = (
        ", ".join(f"%{i}" for i in range(start, end)) for start, end in ((0, count), (count, count + len(a)))
    )
    left, flags = (f"{{{first}}}", "1, 1, 1") if len(a) > 1 else (first, "1, 1, 0, 0")
    outputs = ", ".join(f'"{"+" if accumulate else "="}f"(d[{i}])' for i in range(count))

    def instruction(dtype: str) -> str:
        return (
            f'asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, {int(accumulate)}, 0;\\n'
            f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{dtype}.{dtype} "
            f'{{{sums}}}, {left}, %{count + len(a)}, p, {flags};\\n}}\\n" : {outputs} : {", ".join(a)}, "l"(b));'
        )

    return (
        f"template <class Number> DEVICE void {name}(float (&d)[{count}], {argument}, u64 b) {{\n"
        f"  if constexpr (Number::is_bfloat16) {instruction('bf16')}\n  else {instruction('f16')}\n}}"
    )
