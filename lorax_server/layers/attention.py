"""Attention, paged and padded, behind one call.

A model's forward packs what it was given into one of two contexts and hands that down; the layers work on flat
`[num_tokens, hidden]` and call `ctx.attend`. So each model is written once and runs both ways.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch

from lorax_server.adapters.batch import AdapterBatchData
from lorax_server.kernels import AttentionSpec, Ops, PagedBatch

KVCache = list[tuple[torch.Tensor, torch.Tensor]]  # per layer: keys, values


class Seqlen:
    """How long the sequences of a batch are."""

    def __init__(
        self,
        input_lengths: torch.Tensor,  # [num_seqs] tokens of this forward
        cache_lengths: torch.Tensor,  # [num_seqs] tokens that are in the cache already
        cu_seqlen_q: torch.Tensor | None = None,
        max_q: int | None = None,
        max_k: int | None = None,
        prompt_lengths: torch.Tensor | None = None,
    ) -> None:
        """`prompt_lengths` chooses length-dependent rotary angles for a sequence's whole life; without it the
        sequence's length in this forward does."""
        self.input_lengths = input_lengths
        self.cache_lengths = cache_lengths
        self.prompt_lengths = prompt_lengths
        if cu_seqlen_q is None:
            cu_seqlen_q = torch.arange(len(input_lengths) + 1, device=input_lengths.device, dtype=torch.int32)
            max_q = 1
        self.cu_seqlen_q = cu_seqlen_q
        self.max_q = max_q
        self.max_k = max_k

    @property
    def cu_seqlen_k(self) -> torch.Tensor:
        lengths = self.input_lengths + self.cache_lengths
        return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))

    def clamp(self, max: int) -> "Seqlen":
        self.input_lengths = self.input_lengths.clamp(max=max)
        return self


class Context(Protocol):
    """What the layers of a model see of either context."""

    @property
    def position_ids(self) -> torch.Tensor: ...

    @property
    def max_position(self) -> int: ...

    @property
    def adapter_data(self) -> AdapterBatchData | None: ...

    def rope_lengths(self) -> torch.Tensor: ...

    def attend(
        self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor: ...

    def record(self, hidden_states: torch.Tensor) -> None: ...


@dataclass
class PagedContext:
    """Flat tokens of any number of sequences, whose keys and values live in blocks."""

    ops: Ops
    position_ids: torch.Tensor  # [num_tokens]
    cu_seqlen_prefill: torch.Tensor | None  # [num_seqs + 1]; None when every sequence has one token
    kv_cache: KVCache
    block_tables: torch.Tensor  # [num_seqs, max_blocks]
    slots: torch.Tensor  # [num_tokens]
    seqlen: Seqlen
    max_s: int
    adapter_data: AdapterBatchData | None
    prefill_cache_indices: torch.Tensor | None = None  # the tokens to keep in the cache; None for all
    cross_attention_states: torch.Tensor | None = None

    @property
    def max_position(self) -> int:
        return self.max_s

    @cached_property
    def batch(self) -> PagedBatch:
        kept = self.prefill_cache_indices
        return PagedBatch(
            block_tables=self.block_tables,
            input_lengths=self.seqlen.input_lengths,
            cache_lengths=self.seqlen.cache_lengths,
            slots=self.slots if kept is None else self.slots[kept],
            written=kept,
        )

    def rope_lengths(self) -> torch.Tensor:
        lengths = self.seqlen.prompt_lengths
        if lengths is None:
            lengths = self.seqlen.input_lengths + self.seqlen.cache_lengths
        return torch.repeat_interleave(lengths, self.seqlen.input_lengths)

    def attend(
        self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        """Store keys and values, and attend: from `[num_tokens, heads, head_dim]` to `[num_tokens, hidden]`."""
        k_cache, v_cache = self.kv_cache[layer_id]
        self.ops.write_kv(k, v, k_cache, v_cache, self.batch, spec)
        if self.cu_seqlen_prefill is None:
            out = self.ops.decode_attention(q, k_cache, v_cache, self.batch, spec)
        else:
            out = self.ops.prefill_attention(q, k, v, k_cache, v_cache, self.batch, spec)
        return out.flatten(1)

    def record(self, hidden_states: torch.Tensor) -> None:
        """Nothing here asks for the states between the layers."""


@dataclass
class PaddedContext:
    """A rectangle of tokens, padded on the left, with the keys and values of earlier tokens as tensors."""

    num_seqs: int
    num_new: int
    position_ids: torch.Tensor  # [num_seqs * num_new]
    attention_mask: torch.Tensor  # [num_seqs, cached and new tokens]
    past: KVCache | None  # [num_seqs, heads, cached tokens, head_dim]
    adapter_data: AdapterBatchData | None
    max_position: int
    head_mask: torch.Tensor | None = None  # [layers, heads]
    keep_attentions: bool = False
    keep_hidden_states: bool = False
    present: KVCache = field(default_factory=list)
    attentions: list[torch.Tensor] = field(default_factory=list)
    hidden_states: list[torch.Tensor] = field(default_factory=list)

    def rope_lengths(self) -> torch.Tensor:
        return self.attention_mask.sum(1).repeat_interleave(self.num_new)

    def attend(
        self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        q, k, v = (self.rectangle(x).transpose(1, 2) for x in (q, k, v))
        if self.past is not None:
            k = torch.cat([self.past[layer_id][0], k], dim=2)
            v = torch.cat([self.past[layer_id][1], v], dim=2)
        self.present.append((k, v))
        scores = q.float() @ k.float().transpose(-1, -2) * spec.scale
        # Not -inf: a query of padding sees nothing at all, and must not become a NaN.
        scores = scores.masked_fill(~self._visible, torch.finfo(torch.float32).min)
        weights = scores.softmax(-1).to(v.dtype)
        if self.head_mask is not None:
            weights = weights * self.head_mask[layer_id][:, None, None].to(weights.dtype)
        if self.keep_attentions:
            self.attentions.append(weights)
        return (weights @ v).transpose(1, 2).reshape(self.num_seqs * self.num_new, -1)

    def record(self, hidden_states: torch.Tensor) -> None:
        if self.keep_hidden_states:
            self.hidden_states.append(self.rectangle(hidden_states))

    def rectangle(self, flat: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = flat.unflatten(0, (self.num_seqs, self.num_new))
        return rows

    @cached_property
    def _visible(self) -> torch.Tensor:
        """What each new token may look at: `[num_seqs, 1, new, cached and new]`."""
        num_keys = self.attention_mask.shape[1]
        keys = torch.arange(num_keys, device=self.attention_mask.device)
        queries = keys[num_keys - self.num_new :]
        causal = keys[None] <= queries[:, None]
        visible: torch.Tensor = causal & self.attention_mask.bool()[:, None, None]
        return visible
