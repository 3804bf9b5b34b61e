"""Attention of sequences with one new token, from its rotation to the joined stretches, in one launch."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from lorax_server.kernels.hopper.arguments import MAX_SPLITS, PLAN_THREADS, STRETCH, DecodeArgs, DecodePlanArgs
from lorax_server.kernels.hopper.driver import Kernels
from lorax_server.kernels.hopper.sources import NUMBERS, SHARED_BYTES, TWO_BLOCKS_BYTES, read_source, write_kernel
from lorax_server.kernels.ops import AttentionSpec, CosSin, LayerCache, PagedBatch

SOURCES = ("prelude.cu", "decode.cu", "workers.cu", "clerks.cu")
HEAD_DIMS = (64, 80, 96, 128, 256)
MAX_SHARING = 16  # query heads of one head of keys
ENTRY_BYTES = 32  # of `Entry` of decode.cu
THREADS = 256


@dataclass(frozen=True)
class DecodePlanVariant:
    """The stretches of sequences with one new token."""

    shared_bytes: int = 0

    @property
    def source(self) -> str:
        call = write_kernel("PLAN_THREADS", DecodePlanArgs, "plan_decode(p);")
        return "\n".join((*map(read_source, SOURCES), call))


@dataclass(frozen=True)
class DecodeVariant:
    """Attention from one new token of each sequence: `tiles` of eight query heads share a head of keys."""

    dtype: torch.dtype
    is_float8: bool  # of the cache
    head_dim: int
    tiles: int

    @property
    def stages(self) -> int:
        """As many as let two blocks share a processor; of large heads, as one can have."""
        for limit in (TWO_BLOCKS_BYTES, SHARED_BYTES):
            stages = (limit - self._fixed_bytes) // self._stage_bytes
            if stages >= 3:
                break
        return min(8, stages)

    @property
    def shared_bytes(self) -> int:
        return self._fixed_bytes + self.stages * self._stage_bytes

    @property
    def blocks_per_sm(self) -> int:
        return 2 if self.shared_bytes <= TWO_BLOCKS_BYTES else 1

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
        arguments = f"{NUMBERS[self.dtype]}, {float8}, {self.head_dim}, {self.tiles}, {self.stages}"
        call = write_kernel(f"DECODE_THREADS, {self.blocks_per_sm}", DecodeArgs, f"decode<{arguments}>(p);")
        sizes = {f"DecodeBlock<{arguments}>::BYTES": self.shared_bytes, "sizeof(Entry)": ENTRY_BYTES}
        check = "\n".join(f"static_assert({found} == {expected});" for found, expected in sizes.items())
        return "\n".join((*map(read_source, SOURCES), check, call))


class _Plan(NamedTuple):
    """The stretches of a batch, in fixed places on the device: a graph works them out again when it is replayed."""

    entries: torch.Tensor  # [most, ENTRY_BYTES]
    num_entries: torch.Tensor


class _Scratch(NamedTuple):
    """Sums that the stretches of sequences leave for the last of them. Counters are 0 between launches."""

    sums: torch.Tensor
    masses: torch.Tensor
    counters: torch.Tensor


class DecodeAttention:
    """Launches the kernels of one device. One step at a time may be under way, on one stream: steps share scratch."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._num_sms: int = torch.cuda.get_device_properties(kernels.device).multi_processor_count
        self._scratch: list[_Scratch] = []  # the largest last; graphs may hold the others

    @staticmethod
    def fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, batch: PagedBatch) -> bool:
        """Return whether the kernel can do this attention: others are left to another implementation."""
        keys, values = cache
        return (
            q.dtype in NUMBERS
            and keys.dtype == values.dtype
            and keys.dtype in (q.dtype, torch.float8_e4m3fn)
            and q.shape[2] in HEAD_DIMS
            and q.shape[1] % keys.shape[1] == 0
            and q.shape[1] <= MAX_SHARING * keys.shape[1]
            and q.stride(2) == k.stride(2) == v.stride(2) == 1
            and keys.is_contiguous()
            and values.is_contiguous()
            and batch.stored is None
            and batch.block_tables.stride(1) == 1
            and batch.block_tables.dtype == torch.int32
            and _is_row(batch.slots, torch.int64)
            and (batch.cu_seqlens is None or _is_row(batch.cu_seqlens, torch.int32))
        )

    @staticmethod
    def variant(q: torch.Tensor, cache: LayerCache) -> DecodeVariant:
        sharing = q.shape[1] // cache[0].shape[1]
        return DecodeVariant(q.dtype, cache[0].dtype.itemsize == 1, q.shape[2], -(-sharing // 8))

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
        """Write the rows of `out` that belong to sequences with one new token, and, if it `stores`, their keys and
        values. Rows of padding get zeros."""
        key = "stretches", spec.reach
        is_new = key not in batch.derived
        plan = batch.once(key, self._make_plan, batch, cache[0].shape[2], spec.reach)
        num_kv_heads, head_dim = cache[0].shape[1], cache[0].shape[3]
        scratch = self._reserve(len(batch.block_tables), len(plan.entries), q.shape[1], num_kv_heads, head_dim)
        args = _describe(q, k, v, angles, cache, batch, spec)
        args.out = out.data_ptr()
        if stores:
            args.slots = batch.slots.data_ptr()
        args.entries, args.num_entries = plan.entries.data_ptr(), plan.num_entries.data_ptr()
        args.sums, args.masses, args.counters = (tensor.data_ptr() for tensor in scratch)
        variant = self.variant(q, cache)
        blocks = min(self._num_sms * variant.blocks_per_sm, len(plan.entries) * num_kv_heads)
        # What is fetched before the kernel waits must be there: so the first launch after a plan is not early.
        self._kernels.get(variant).launch(blocks, THREADS, [args], early=not is_new)

    def _make_plan(self, batch: PagedBatch, block_size: int, window: int) -> _Plan:
        device, num_seqs = batch.block_tables.device, len(batch.block_tables)
        longest = min(batch.block_tables.shape[1] * block_size, window)
        most = num_seqs * min(MAX_SPLITS, max(1, -(-longest // STRETCH)))
        plan = _Plan(
            torch.empty(most, ENTRY_BYTES, dtype=torch.uint8, device=device),
            torch.empty(1, dtype=torch.int32, device=device),
        )
        lengths = batch.input_lengths.long().contiguous(), batch.cache_lengths.long().contiguous()
        args = DecodePlanArgs(*(length.data_ptr() for length in lengths), None, plan.entries.data_ptr())
        args.num_entries, args.num_seqs, args.window = plan.num_entries.data_ptr(), num_seqs, window
        if batch.cu_seqlens is not None:
            args.bounds = batch.cu_seqlens.data_ptr()
        self._kernels.get(DecodePlanVariant()).launch(1, PLAN_THREADS, [args], early=False)
        return plan

    def _reserve(self, num_seqs: int, num_entries: int, num_heads: int, num_kv_heads: int, head_dim: int) -> _Scratch:
        """Return scratch memory that is large enough; what graphs were captured with stays as it is.

        It grows by doubling, so that all of it together is at most twice the largest.
        """
        num_places, num_counters = num_entries * num_heads, num_seqs * num_kv_heads
        for scratch in self._scratch:
            if (
                len(scratch.sums) >= num_places * head_dim
                and len(scratch.masses) >= 2 * num_places
                and len(scratch.counters) >= num_counters
            ):
                return scratch
        device, num_places, num_counters = self._kernels.device, _double(num_places), _double(num_counters)
        made = _Scratch(
            torch.empty(num_places * head_dim, dtype=torch.float32, device=device),
            torch.empty(2 * num_places, dtype=torch.float32, device=device),
            torch.zeros(num_counters, dtype=torch.int32, device=device),
        )
        self._scratch.append(made)
        return made


def _describe(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    angles: CosSin | None,
    cache: LayerCache,
    batch: PagedBatch,
    spec: AttentionSpec,
) -> DecodeArgs:
    """Fill in the arguments that come from the caller."""
    args = DecodeArgs(k_cache=cache[0].data_ptr(), v_cache=cache[1].data_ptr())
    args.q, args.k, args.v = q.data_ptr(), k.data_ptr(), v.data_ptr()
    args.q_token, args.k_token, args.v_token = q.stride(0), k.stride(0), v.stride(0)
    args.q_head, args.k_head, args.v_head = q.stride(1), k.stride(1), v.stride(1)
    if angles is not None:
        if not all(_is_row(angle, torch.float32) for angle in angles):
            raise ValueError("attend needs angles of float32 without gaps")
        args.cos, args.sin, args.half = angles[0].data_ptr(), angles[1].data_ptr(), angles[0].shape[1]
        args.angle_token = angles[0].stride(0)
    args.tables, args.table_stride = batch.block_tables.data_ptr(), batch.block_tables.stride(0)
    num_kv_heads, block_size = cache[0].shape[1:3]
    args.kv_heads, args.sharing, args.block_size = num_kv_heads, q.shape[1] // num_kv_heads, block_size
    args.block_shift = block_size.bit_length() - 1 if block_size.bit_count() == 1 else -1
    is_float8 = cache[0].dtype.itemsize == 1
    args.k_scale, args.v_scale = (spec.k_scale, spec.v_scale) if is_float8 else (1.0, 1.0)
    args.scale, args.soft_cap = spec.scale * args.k_scale, spec.soft_cap or 0.0
    return args


def _double(count: int) -> int:
    """Return the next power of two."""
    return 1 << max(0, count - 1).bit_length()


def _is_row(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype == dtype and tensor.is_contiguous()
