"""Rotation, the cache of keys and values, and attention over it: one native call each.

A cache of another dtype than the model's, which is float8, goes through the reference: these kernels read and write
only the model's own dtype.
"""

import ctypes

import torch

from lorax_server.kernels import reference
from lorax_server.kernels.cpu.abi import list_fields
from lorax_server.kernels.cpu.library import DTYPES, Library
from lorax_server.kernels.cpu.structs import Described
from lorax_server.kernels.ops import AttentionSpec, CosSin, LayerCache, PagedBatch

WHOLE = 2**60  # a window that no sequence is longer than


class Paged(ctypes.Structure):
    """The places of a batch's tokens in caches of one shape."""

    _fields_ = list_fields("Paged")


class CpuAttention:
    """Attention, and its steps, which have the arguments and results of the reference's."""

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

    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotate as the op table says."""
        tokens, heads, _ = x.shape
        angles, turned = cos, sin
        if cos.dtype != torch.float32 or not (cos.is_contiguous() and sin.is_contiguous()):
            angles, turned = cos.float().contiguous(), sin.float().contiguous()
        self._library.rotary(
            x.data_ptr(),
            *_strides(x),
            tokens,
            heads,
            angles.data_ptr(),
            turned.data_ptr(),
            angles.shape[1],
            DTYPES[x.dtype],
        )

    def write_kv(
        self, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, batch: PagedBatch, spec: AttentionSpec
    ) -> None:
        """Store as the op table says; what a fresh block held before stays there, since no kernel here reads it."""
        keys, values = cache
        if k.dtype != keys.dtype:
            return reference.write_kv(k, v, cache, batch, spec)
        self._library.write_kv(
            _describe(batch, keys).address,
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
        """Attend as the op table says. A row has the same bits in every batch; that of an empty sequence is zeros."""
        keys, values = cache
        if q.dtype != keys.dtype:
            return reference.decode_attention(q, cache, batch, spec)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        self._library.decode_attention(
            _describe(batch, keys).address,
            q.data_ptr(),
            *_strides(q),
            keys.data_ptr(),
            values.data_ptr(),
            out.data_ptr(),
            q.shape[1],
            *_describe_rule(spec),
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
        """Attend as the op table says.

        A row has the same bits in every batch, and however its prompt was cut. Only a sequence with one new token has
        the bits of `decode_attention`, which adds in another order.
        """
        keys, values = cache
        if q.dtype != keys.dtype:
            return reference.prefill_attention(q, k, v, cache, batch, spec)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        self._library.prefill_attention(
            _describe(batch, keys).address,
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
            *_describe_rule(spec),
        )
        return out


def _join_heads(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return queries and keys as one tensor, if they lie side by side, so that one call rotates them."""
    end = q.data_ptr() + q.shape[1] * q.stride(1) * q.itemsize
    if q.stride() != k.stride() or k.data_ptr() != end:
        return q, k
    return (q.as_strided((q.shape[0], q.shape[1] + k.shape[1], q.shape[2]), q.stride()),)


def _describe_rule(spec: AttentionSpec) -> tuple[float, int, float, int | None]:
    """Return scale, window, soft cap (0 for none) and the address of slopes, which live as long as the model."""
    slopes = None if spec.slopes is None else spec.slopes.data_ptr()
    return spec.scale, spec.window or WHOLE, spec.soft_cap or 0.0, slopes


def _strides(x: torch.Tensor) -> tuple[int, int]:
    token, head, dimension = x.stride()
    if dimension != 1:
        raise ValueError("the numbers of a head must lie side by side")
    return token, head


def _describe(batch: PagedBatch, keys: torch.Tensor) -> Described:
    """Return the struct of a batch, which is the same for all layers with caches of one shape."""
    return batch.once(("cpu", keys.shape), _describe_paged, batch, keys)


def _describe_paged(batch: PagedBatch, keys: torch.Tensor) -> Described:
    tables = _plain(batch.block_tables, torch.int32)
    inputs, cached, slots = (_plain(x, torch.int64) for x in (batch.input_lengths, batch.cache_lengths, batch.slots))
    stored = None if batch.stored is None else _plain(batch.stored, torch.int64)
    if not keys.is_contiguous():
        raise ValueError("the cache must be contiguous")
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
    return Described(ctypes.addressof(struct), (struct, tables, inputs, cached, slots, stored))


def _plain(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x if x.dtype == dtype and x.is_contiguous() else x.to(dtype).contiguous()
