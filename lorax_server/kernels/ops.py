"""The op table: what a set of kernels must offer. A module with these functions is one.

Keys and values live in blocks, `[num_blocks, num_kv_heads, block_size, head_dim]` per layer: the tokens of a block
lie next to each other for each head, so attention reads whole stretches. A slot is `block * block_size + offset`.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True)
class AttentionSpec:
    """What is fixed about a layer's attention."""

    scale: float
    window: int | None = None
    """How many tokens a query sees, itself included; None for all before it."""
    k_scale: float = 1.0
    v_scale: float = 1.0
    """Stored keys and values are divided by these; of use only in a float8 cache."""


@dataclass(frozen=True)
class PagedBatch:
    """Where the tokens of one forward lie, the same for every layer."""

    block_tables: torch.Tensor  # [num_seqs, max_blocks]
    input_lengths: torch.Tensor  # [num_seqs] tokens of this forward
    cache_lengths: torch.Tensor  # [num_seqs] tokens in the cache before it
    slots: torch.Tensor  # [num_tokens] where this forward's keys and values go; -1 for nowhere
    written: torch.Tensor | None = None  # indices of the tokens that `slots` speaks of; None for all
    derived: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What an implementation works out in the first layer and uses again in the others."""
        if key not in self.derived:
            self.derived[key] = make()
        value: T = self.derived[key]
        return value


@dataclass(frozen=True)
class LoraSegments:
    """One target's factors for the tokens of a batch: `A` is `[rank, in]`, `B` is `[rank, out]`, in one flat buffer."""

    buffer: torch.Tensor  # [num_elements]
    a_offsets: torch.Tensor  # [num_segments] first element of A
    b_offsets: torch.Tensor  # [num_segments] first element of B
    ranks: torch.Tensor  # [num_segments] 0 where the adapter has nothing here
    scales: torch.Tensor  # [num_segments]
    bounds: list[int]  # num_segments + 1 token positions: segment i is tokens bounds[i] to bounds[i + 1]


class Ops(Protocol):
    """The table. A cache and a tensor named `out` are written, everything else is only read unless it says so."""

    def write_kv(
        self,
        k: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: PagedBatch,
        spec: AttentionSpec,
    ) -> None:
        """Store this forward's keys and values in their slots."""
        ...

    def prefill_attention(
        self,
        q: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        k: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: PagedBatch,
        spec: AttentionSpec,
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
        """Causal attention of any number of tokens per sequence over the cached tokens and over each other."""
        ...

    def decode_attention(
        self,
        q: torch.Tensor,  # [num_seqs, num_heads, head_dim]
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: PagedBatch,
        spec: AttentionSpec,
    ) -> torch.Tensor:  # [num_seqs, num_heads, head_dim]
        """Attention of one token per sequence, already in the cache, over its sequence."""
        ...

    def rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`x + residual`, normalised; and that sum itself. `eps` is one float32."""
        ...

    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotate, in place, the first n dimensions of each head of `[num_tokens, heads, head_dim]`.

        The angles are `[num_tokens, n / 2]`; dimension i turns with dimension i + n / 2.
        """
        ...

    def gated_activation(
        self, gate_up: torch.Tensor, activation: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """`activation(gate) * up` of `[num_tokens, 2 * n]`."""
        ...

    def lora_shrink(self, x: torch.Tensor, segments: LoraSegments) -> torch.Tensor:  # [num_tokens, max rank]
        """Each token's input through its own adapter's A; zeros past the rank."""
        ...

    def lora_expand(self, low_rank: torch.Tensor, segments: LoraSegments, out: torch.Tensor) -> None:
        """Add each token's scaled result of its own adapter's B to `out` `[num_tokens, n]`."""
        ...
