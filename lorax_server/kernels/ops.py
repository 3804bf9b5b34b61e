"""The op table: what a set of kernels must offer. A module with these functions is one.

Keys and values live in blocks, `[num_blocks, num_kv_heads, block_size, head_dim]` per layer: the tokens of a block
lie next to each other for each head, so attention reads whole stretches. A slot is `block * block_size + offset`.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
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


class Remembers:
    """Has a place for what is worked out in the first layer and used again in the others."""

    derived: dict[Hashable, Any]

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self.derived:
            self.derived[key] = make()
        value: T = self.derived[key]
        return value


@dataclass(frozen=True)
class PagedBatch(Remembers):
    """Where the tokens of one forward lie, the same for every layer."""

    block_tables: torch.Tensor  # [num_seqs, max_blocks]
    input_lengths: torch.Tensor  # [num_seqs] tokens of this forward
    cache_lengths: torch.Tensor  # [num_seqs] tokens in the cache before it
    slots: torch.Tensor  # [num_tokens] where this forward's keys and values go; -1 for nowhere
    written: torch.Tensor | None = None  # indices of the tokens that `slots` speaks of; None for all
    derived: dict[Hashable, Any] = field(default_factory=dict, repr=False)


class Field(IntEnum):
    """Columns of the adapters' table. The first seven are offsets into the buffer, -1 where an adapter has nothing."""

    A = 0  # [rank, in]; of an embedding [in, rank], so that a token's part is one row
    B = 1  # [rank, out]
    FACTOR = 2  # [out] the output is multiplied by this
    SHIFT = 3  # [out] and this is then added
    ROW_IDS = 4  # [rows] int32, ascending: which of this rank's tokens have a row of their own
    ROWS = 5  # [rows, size] those rows
    NEW_ROWS = 6  # [new rows, size] rows of the tokens that come after the base model's vocabulary
    RANK = 7
    NUM_ROWS = 8
    NUM_NEW_ROWS = 9


NUM_OFFSETS = Field.RANK


@dataclass(frozen=True)
class LoraBatch(Remembers):
    """The adapters of a batch of tokens: where the weights of all lie, and which tokens belong to which."""

    buffer: torch.Tensor  # [num_elements]
    table: torch.Tensor  # [num_adapters, num_targets, len(Field)]; adapter 0 is the base model and has nothing
    scales: torch.Tensor  # [num_adapters, num_targets]
    widths: torch.Tensor  # [num_targets, 2] inputs and outputs
    bounds: list[int]  # segment i, a run of one adapter's tokens, is tokens bounds[i] to bounds[i + 1]
    adapters: list[int]  # of each segment
    derived: dict[Hashable, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class LoraTarget:
    """A row of the table's second dimension, and where its outputs lie among those of its layer."""

    index: int
    columns: slice


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

    def add_lora(self, out: torch.Tensor, x: torch.Tensor, batch: LoraBatch, targets: Sequence[LoraTarget]) -> None:
        """Add each token's scaled `x @ A.T @ B` of its own adapter to `out`, at targets that follow one another."""
        ...

    def scale_and_shift(self, out: torch.Tensor, batch: LoraBatch, targets: Sequence[LoraTarget]) -> None:
        """Multiply each token's output by its adapter's factor and add its adapter's shift, where it has them."""
        ...
