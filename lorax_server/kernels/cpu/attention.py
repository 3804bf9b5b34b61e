"""RoPE, KV cache writes and attention on a CPU. Each op is one native call.

The native kernels require a KV cache in the model dtype. Float8 caches use the reference ops.
"""

import ctypes
from collections.abc import Sequence

import torch

from lorax_server.kernels import reference, whole_sequences
from lorax_server.kernels.cpu.abi import struct_fields
from lorax_server.kernels.cpu.library import DTYPES, Library
from lorax_server.kernels.cpu.structs import NativeStruct
from lorax_server.kernels.ops import AttentionSpec, CosSin, LayerCache, PagedBatch

UNLIMITED_WINDOW = 2**60  # larger than any sequence length


class Paged(ctypes.Structure):
    """The struct with a batch's sequence lengths and cache locations. `native/rotary_kv_cache.h` defines it in C++."""

    _fields_ = struct_fields("Paged")


class CpuAttention:
    """Attention ops for CPUs, with the same signatures as in `reference`."""

    _library: Library

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        angles: CosSin | None,
        cache: LayerCache,
        batch: PagedBatch,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        if angles is not None:
            for heads in _join_heads(q, k):
                self.rotary(heads, *angles)
        self.write_kv(k, v, cache, batch, spec)
        if batch.cu_seqlens is None:
            return self.decode_attention(q, cache, batch, spec)
        return self.prefill_attention(q, k, v, cache, batch, spec)

    def attend_sequences(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        angles: CosSin | None,
        lengths: Sequence[int],
        spec: AttentionSpec,
    ) -> torch.Tensor:
        if spec.soft_cap is not None or spec.sinks is not None:
            return reference.attend_sequences(q, k, v, angles, lengths, spec)
        if angles is not None:
            for heads in _join_heads(q, k):
                self.rotary(heads, *angles)
        return whole_sequences.attend(q, k, v, lengths, spec)

    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Apply RoPE, like `reference.rotary`."""
        tokens, heads, _ = x.shape
        cosines, sines = cos, sin
        if cos.dtype != torch.float32 or not (cos.is_contiguous() and sin.is_contiguous()):
            cosines, sines = cos.float().contiguous(), sin.float().contiguous()
        self._library.rotary(
            x.data_ptr(),
            *_strides(x),
            tokens,
            heads,
            cosines.data_ptr(),
            sines.data_ptr(),
            cosines.shape[1],
            DTYPES[x.dtype],
        )

    def write_kv(
        self, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, batch: PagedBatch, spec: AttentionSpec
    ) -> None:
        """Store keys and values, like `reference.write_kv`."""
        keys, values = cache
        if k.dtype != keys.dtype:
            return reference.write_kv(k, v, cache, batch, spec)
        self._library.write_kv(
            _paged_struct(batch, keys).address,
            k.data_ptr(),
            *_strides(k),
            v.data_ptr(),
            *_strides(v),
            keys.data_ptr(),
            values.data_ptr(),
        )

    def decode_attention(
        self, q: torch.Tensor, cache: LayerCache, batch: PagedBatch, spec: AttentionSpec
    ) -> torch.Tensor:
        """Return decode attention outputs. Results are bitwise batch-invariant. Empty sequences produce zeros."""
        keys, values = cache
        if q.dtype != keys.dtype:
            return reference.decode_attention(q, cache, batch, spec)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        self._library.decode_attention(
            _paged_struct(batch, keys).address,
            q.data_ptr(),
            *_strides(q),
            keys.data_ptr(),
            values.data_ptr(),
            out.data_ptr(),
            q.shape[1],
            *_score_args(spec),
        )
        return out

    def prefill_attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: LayerCache,
        batch: PagedBatch,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """Return prefill attention outputs.

        Results are bitwise independent of the batch and of prefill chunk boundaries, with one exception: a chunk of one
        token uses `decode_attention`, which sums in a different order.
        """
        keys, values = cache
        if q.dtype != keys.dtype:
            return reference.prefill_attention(q, k, v, cache, batch, spec)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        self._library.prefill_attention(
            _paged_struct(batch, keys).address,
            q.data_ptr(),
            *_strides(q),
            k.data_ptr(),
            *_strides(k),
            v.data_ptr(),
            *_strides(v),
            keys.data_ptr(),
            values.data_ptr(),
            out.data_ptr(),
            q.shape[1],
            *_score_args(spec),
        )
        return out


def _join_heads(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return queries and keys as one tensor if they are adjacent in memory, so that one call rotates both."""
    end = q.data_ptr() + q.shape[1] * q.stride(1) * q.itemsize
    if q.stride() != k.stride() or k.data_ptr() != end:
        return q, k
    return (q.as_strided((q.shape[0], q.shape[1] + k.shape[1], q.shape[2]), q.stride()),)


def _score_args(spec: AttentionSpec) -> tuple[float, int, float, int | None, int | None]:
    """Return a layer's scale, window and soft cap (0 means no cap), and the addresses of its ALiBi slopes and attention
    sinks.
    """
    slopes, sinks = (None if x is None else x.data_ptr() for x in (spec.slopes, spec.sinks))
    return spec.scale, spec.window or UNLIMITED_WINDOW, spec.soft_cap or 0.0, slopes, sinks


def _strides(x: torch.Tensor) -> tuple[int, int]:
    token, head, dimension = x.stride()
    if dimension != 1:
        raise ValueError("the last dimension of queries, keys and values must have stride 1")
    return token, head


def _paged_struct(batch: PagedBatch, keys: torch.Tensor) -> NativeStruct:
    """Return the `Paged` struct for a batch. All layers with the same cache shape share it."""
    return batch.cached(("cpu", keys.shape), _make_paged_struct, batch, keys)


def _make_paged_struct(batch: PagedBatch, keys: torch.Tensor) -> NativeStruct:
    tables = _as_contiguous(batch.block_tables, torch.int32)
    inputs, cached, slots = (
        _as_contiguous(x, torch.int64) for x in (batch.input_lengths, batch.cache_lengths, batch.slots)
    )
    stored = None if batch.stored is None else _as_contiguous(batch.stored, torch.int64)
    if not keys.is_contiguous():
        raise ValueError("the KV cache must be contiguous")
    _, kv_heads, block_size, head_dim = keys.shape
    struct = Paged(
        tables.data_ptr(),
        inputs.data_ptr(),
        cached.data_ptr(),
        slots.data_ptr(),
        None if stored is None else stored.data_ptr(),
        tables.shape[1],
        len(inputs),
        len(slots),
        kv_heads,
        block_size,
        head_dim,
        DTYPES[keys.dtype],
    )
    return NativeStruct(ctypes.addressof(struct), (struct, tables, inputs, cached, slots, stored))


def _as_contiguous(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x if x.dtype == dtype and x.is_contiguous() else x.to(dtype).contiguous()
