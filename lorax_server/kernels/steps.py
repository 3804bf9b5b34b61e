"""Attention in steps, for sets of kernels that have no code for all of it at once."""

from collections.abc import Sequence
from typing import Protocol

import torch

from lorax_server.kernels.ops import AttentionSpec, CosSin, LayerCache, PagedBatch


class AttentionSteps(Protocol):
    """The steps. Shapes are those of `Ops`."""

    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotate, in place, the first n dimensions of each head of `[num_tokens, heads, head_dim]`.

        The angles are `[num_tokens, n / 2]`; dimension i turns with dimension i + n / 2.
        """
        ...

    def write_kv(
        self, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, batch: PagedBatch, spec: AttentionSpec
    ) -> None:
        """Store this forward's keys and values in their slots."""
        ...

    def prefill_attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: LayerCache,
        batch: PagedBatch,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """Attend causally from any number of tokens per sequence to the cached tokens and to each other."""
        ...

    def decode_attention(
        self, q: torch.Tensor, cache: LayerCache, batch: PagedBatch, spec: AttentionSpec
    ) -> torch.Tensor:
        """Attend from one token per sequence, whose key and value are in the cache, to its sequence."""
        ...


def attend_in_steps(
    steps: AttentionSteps,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    angles: CosSin | None,
    cache: LayerCache,
    batch: PagedBatch,
    spec: AttentionSpec,
) -> torch.Tensor:
    """Attend as `Ops.attend`, one step after the other."""
    if angles is not None:
        for heads in _join_heads(q, k):
            steps.rotary(heads, *angles)
    steps.write_kv(k, v, cache, batch, spec)
    if batch.cu_seqlens is None:
        return steps.decode_attention(q, cache, batch, spec)
    return steps.prefill_attention(q, k, v, cache, batch, spec)


def _join_heads(q: torch.Tensor, k: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return queries and keys as one tensor, if they lie side by side, so that one call rotates them."""
    end = q.data_ptr() + q.shape[1] * q.stride(1) * q.itemsize
    if q.stride() != k.stride() or k.data_ptr() != end:
        return q, k
    return (q.as_strided((q.shape[0], q.shape[1] + k.shape[1], q.shape[2]), q.stride()),)
