"""Launch decode attention: RoPE, KV cache write, attention and split merging in one kernel."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from lorax_server.kernels.hopper.arguments import MAX_SPLITS, PLAN_THREADS, SPLIT_TOKENS, DecodeArgs, DecodePlanArgs
from lorax_server.kernels.hopper.driver import Kernels
from lorax_server.kernels.hopper.sources import (
    CUDA_TYPES,
    MAX_SHARED_BYTES,
    TWO_BLOCKS_SHARED_BYTES,
    read_source,
    write_kernel,
)
from lorax_server.kernels.ops import AttentionSpec, CosSin, LayerCache, PagedBatch

SOURCES = ("primitives.cu", "decode_attention.cu", "mma_warps.cu", "epilogue_warps.cu")
HEAD_DIMS = (64, 80, 96, 128, 256)
MAX_HEADS_PER_KV = 16  # maximum number of query heads per KV head
ENTRY_BYTES = 32  # size of `Entry` in decode_attention.cu
THREADS = 256


@dataclass(frozen=True)
class DecodePlanVariant:
    """Settings of the kernel that lists the KV splits of sequences with one new token."""

    shared_bytes: int = 0

    @property
    def source(self) -> str:
        call = write_kernel("PLAN_THREADS", DecodePlanArgs, "plan_decode(p);")
        return "\n".join((*map(read_source, SOURCES), call))


@dataclass(frozen=True)
class DecodeVariant:
    """Settings of a decode attention kernel. `tiles` is the number of groups of eight query heads per KV head."""

    dtype: torch.dtype
    is_float8: bool  # True if the KV cache is float8
    head_dim: int
    tiles: int

    @property
    def stages(self) -> int:
        """Return how many pipeline stages fit into shared memory, at most 8.

        Two blocks run per SM if at least three stages fit.
        """
        for limit in (TWO_BLOCKS_SHARED_BYTES, MAX_SHARED_BYTES):
            stages = (limit - self._fixed_bytes) // self._stage_bytes
            if stages >= 3:
                break
        return min(8, stages)

    @property
    def shared_bytes(self) -> int:
        return self._fixed_bytes + self.stages * self._stage_bytes

    @property
    def blocks_per_sm(self) -> int:
        return 2 if self.shared_bytes <= TWO_BLOCKS_SHARED_BYTES else 1

    @property
    def _stage_bytes(self) -> int:
        row = self.head_dim * (1 if self.is_float8 else 2)
        chunks = row // 16
        tokens = 32 if self.is_float8 else 16
        return 4 * 2 * tokens * (row if chunks % 8 == 0 or chunks % 2 else row + 16)

    @property
    def _fixed_bytes(self) -> int:
        queries = 8 * self.tiles
        buffers = 2 * (queries * (2 * self.head_dim + 16) + 2 * self.head_dim * 4 + ENTRY_BYTES)
        return buffers + 2 * queries * (self.head_dim + 4) * 4 + 4 * queries * 8 + queries * MAX_SPLITS * 4

    @property
    def source(self) -> str:
        float8 = "true" if self.is_float8 else "false"
        arguments = f"{CUDA_TYPES[self.dtype]}, {float8}, {self.head_dim}, {self.tiles}, {self.stages}"
        call = write_kernel(f"DECODE_THREADS, {self.blocks_per_sm}", DecodeArgs, f"decode<{arguments}>(p);")
        sizes = {f"DecodeBlock<{arguments}>::BYTES": self.shared_bytes, "sizeof(Entry)": ENTRY_BYTES}
        check = "\n".join(f"static_assert({actual} == {expected});" for actual, expected in sizes.items())
        return "\n".join((*map(read_source, SOURCES), check, call))


class _Plan(NamedTuple):
    """The batch's KV splits, at fixed device addresses. A graph replay updates them."""

    entries: torch.Tensor  # [max_entries, ENTRY_BYTES]
    num_entries: torch.Tensor


class _Scratch(NamedTuple):
    """Partial results of KV splits, which the last thread block of each sequence merges. The counters are 0 between
    launches.
    """

    sums: torch.Tensor
    softmax_stats: torch.Tensor
    counters: torch.Tensor


class DecodeAttention:
    """Launches decode attention on one device. All steps share the scratch memory, so run one step at a time on one
    stream.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._num_sms: int = torch.cuda.get_device_properties(kernels.device).multi_processor_count
        self._scratch: list[_Scratch] = []  # the largest is last; captured graphs can use smaller allocations

    @staticmethod
    def supports(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, batch: PagedBatch) -> bool:
        """Return True if the kernel supports these tensors. Otherwise the Triton kernel is used."""
        keys, values = cache
        return (
            q.dtype in CUDA_TYPES
            and keys.dtype == values.dtype
            and keys.dtype in (q.dtype, torch.float8_e4m3fn)
            and q.shape[2] in HEAD_DIMS
            and q.shape[1] % keys.shape[1] == 0
            and q.shape[1] <= MAX_HEADS_PER_KV * keys.shape[1]
            and q.stride(2) == k.stride(2) == v.stride(2) == 1
            and keys.is_contiguous()
            and values.is_contiguous()
            and batch.stored is None
            and batch.block_tables.stride(1) == 1
            and batch.block_tables.dtype == torch.int32
            and _is_contiguous_of(batch.slots, torch.int64)
            and (batch.cu_seqlens is None or _is_contiguous_of(batch.cu_seqlens, torch.int32))
        )

    @staticmethod
    def variant(q: torch.Tensor, cache: LayerCache) -> DecodeVariant:
        heads_per_kv = q.shape[1] // cache[0].shape[1]
        return DecodeVariant(q.dtype, cache[0].dtype.itemsize == 1, q.shape[2], -(-heads_per_kv // 8))

    def __call__(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        angles: CosSin | None,
        cache: LayerCache,
        batch: PagedBatch,
        spec: AttentionSpec,
        *,
        stores: bool,
    ) -> None:
        """Write the rows of `out` for sequences with one new token, and zeros for padding rows.

        With `stores`, also apply RoPE and store the new keys and values.
        """
        key = "splits", spec.window_or_max
        is_new = key not in batch.derived
        plan = batch.cached(key, self._make_plan, batch, cache[0].shape[2], spec.window_or_max)
        num_kv_heads, head_dim = cache[0].shape[1], cache[0].shape[3]
        scratch = self._reserve_scratch(len(batch.block_tables), len(plan.entries), q.shape[1], num_kv_heads, head_dim)
        args = _make_args(q, k, v, angles, cache, batch, spec)
        args.out = out.data_ptr()
        if stores:
            args.slots = batch.slots.data_ptr()
        args.entries, args.num_entries = plan.entries.data_ptr(), plan.num_entries.data_ptr()
        args.sums, args.softmax_stats, args.counters = (tensor.data_ptr() for tensor in scratch)
        variant = self.variant(q, cache)
        blocks = min(self._num_sms * variant.blocks_per_sm, len(plan.entries) * num_kv_heads)
        # An early launch prefetches before the previous kernel finishes, so it must not directly follow the plan.
        self._kernels.get(variant).launch(blocks, THREADS, [args], early=not is_new)

    def _make_plan(self, batch: PagedBatch, block_size: int, window: int) -> _Plan:
        device, num_seqs = batch.block_tables.device, len(batch.block_tables)
        longest = min(batch.block_tables.shape[1] * block_size, window)
        max_entries = num_seqs * min(MAX_SPLITS, max(1, -(-longest // SPLIT_TOKENS)))
        plan = _Plan(
            torch.empty(max_entries, ENTRY_BYTES, dtype=torch.uint8, device=device),
            torch.empty(1, dtype=torch.int32, device=device),
        )
        lengths = batch.input_lengths.long().contiguous(), batch.cache_lengths.long().contiguous()
        args = DecodePlanArgs(*(length.data_ptr() for length in lengths), None, plan.entries.data_ptr())
        args.num_entries, args.num_seqs, args.window = plan.num_entries.data_ptr(), num_seqs, window
        if batch.cu_seqlens is not None:
            args.bounds = batch.cu_seqlens.data_ptr()
        self._kernels.get(DecodePlanVariant()).launch(1, PLAN_THREADS, [args], early=False)
        return plan

    def _reserve_scratch(
        self, num_seqs: int, num_entries: int, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> _Scratch:
        """Return scratch memory that is large enough. Earlier allocations stay valid, because captured graphs use them.

        Sizes are powers of two, so the total is at most twice the largest allocation.
        """
        num_places, num_counters = num_entries * num_heads, num_seqs * num_kv_heads
        for scratch in self._scratch:
            if (
                len(scratch.sums) >= num_places * head_dim
                and len(scratch.softmax_stats) >= 2 * num_places
                and len(scratch.counters) >= num_counters
            ):
                return scratch
        device, num_places, num_counters = (
            self._kernels.device,
            _next_power_of_two(num_places),
            _next_power_of_two(num_counters),
        )
        new_scratch = _Scratch(
            torch.empty(num_places * head_dim, dtype=torch.float32, device=device),
            torch.empty(2 * num_places, dtype=torch.float32, device=device),
            torch.zeros(num_counters, dtype=torch.int32, device=device),
        )
        self._scratch.append(new_scratch)
        return new_scratch


def _make_args(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    angles: CosSin | None,
    cache: LayerCache,
    batch: PagedBatch,
    spec: AttentionSpec,
) -> DecodeArgs:
    """Return the kernel arguments that depend on the caller's tensors."""
    args = DecodeArgs(k_cache=cache[0].data_ptr(), v_cache=cache[1].data_ptr())
    args.q, args.k, args.v = q.data_ptr(), k.data_ptr(), v.data_ptr()
    args.q_token, args.k_token, args.v_token = q.stride(0), k.stride(0), v.stride(0)
    args.q_head, args.k_head, args.v_head = q.stride(1), k.stride(1), v.stride(1)
    if angles is not None:
        if not all(_is_contiguous_of(angle, torch.float32) for angle in angles):
            raise ValueError("attention needs contiguous float32 angles")
        args.cos, args.sin, args.half = angles[0].data_ptr(), angles[1].data_ptr(), angles[0].shape[1]
        args.angle_token = angles[0].stride(0)
    args.tables, args.table_stride = batch.block_tables.data_ptr(), batch.block_tables.stride(0)
    num_kv_heads, block_size = cache[0].shape[1:3]
    args.kv_heads, args.heads_per_kv, args.block_size = num_kv_heads, q.shape[1] // num_kv_heads, block_size
    args.block_shift = block_size.bit_length() - 1 if block_size.bit_count() == 1 else -1
    is_float8 = cache[0].dtype.itemsize == 1
    args.k_scale, args.v_scale = (spec.k_scale, spec.v_scale) if is_float8 else (1.0, 1.0)
    args.scale, args.soft_cap = spec.scale * args.k_scale, spec.soft_cap or 0.0
    return args


def _next_power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << max(0, count - 1).bit_length()


def _is_contiguous_of(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype == dtype and tensor.is_contiguous()
