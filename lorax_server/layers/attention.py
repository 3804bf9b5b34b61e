"""Attention, paged and padded, behind one call.

A model's forward packs its inputs into one of two contexts and hands that down; the layers work on flat
`[num_tokens, hidden]` and call `ctx.attend`. So each model is written once and runs both ways.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch

from lorax_server.adapters.batch import AdapterBatchData
from lorax_server.kernels import AttentionSpec, CosSin, HostLengths, LayerCache, Ops, PagedBatch, reference

KVCache = list[LayerCache]  # by layer


@dataclass
class Seqlen:
    """The lengths of a batch's sequences, as callers of a paged forward pass them."""

    input_lengths: torch.Tensor  # [num_seqs] tokens of this forward
    cache_lengths: torch.Tensor  # [num_seqs] tokens that are in the cache already
    cu_seqlen_q: torch.Tensor | None = None  # [num_seqs + 1]
    max_q: int | None = None
    max_k: int | None = None
    # [num_seqs] They choose length-dependent rotary angles for a sequence's whole life; without them the sequence's
    # length in this forward does.
    prompt_lengths: torch.Tensor | None = None
    host_lengths: HostLengths | None = None  # both lengths on the host, where the caller has them
    stores_all: bool = False  # as in `PagedBatch`


class Context(Protocol):
    """The side of both contexts that the layers of a model see."""

    @property
    def position_ids(self) -> torch.Tensor: ...  # [num_tokens]

    @property
    def max_position(self) -> int: ...  # above every position

    @property
    def adapter_data(self) -> AdapterBatchData | None: ...

    def rope_lengths(self) -> torch.Tensor:
        """Return, for each token, the length that its sequence's rotary scaling is chosen by."""
        ...

    def attend(
        self,
        layer_id: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        spec: AttentionSpec,
        angles: CosSin | None = None,
    ) -> torch.Tensor:
        """Rotate queries and keys, store keys and values, and attend.

        From `[num_tokens, heads, head_dim]` to `[num_tokens, hidden]`; queries and keys may be changed in place.
        """
        ...

    def record(self, hidden_states: torch.Tensor) -> None:
        """Keep the states between two layers, where the caller asked for them."""
        ...


@dataclass(frozen=True, kw_only=True)
class PagedContext(PagedBatch):
    """The batch that the ops take, with its cache and adapters: flat tokens, whose keys and values live in blocks."""

    ops: Ops
    kv_cache: KVCache
    position_ids: torch.Tensor  # [num_tokens] on the device
    max_position: int  # on the host
    prompt_lengths: torch.Tensor | None = None  # [num_seqs] as in `Seqlen`
    token_prompt_lengths: torch.Tensor | None = None  # [num_tokens] those of each token's sequence, instead
    adapter_data: AdapterBatchData | None = None
    cross_attention_states: torch.Tensor | None = None  # for layers of `create_layer_fn`; ours do not read it

    def rope_lengths(self) -> torch.Tensor:
        if self.token_prompt_lengths is not None:
            return self.token_prompt_lengths
        lengths = self.prompt_lengths
        if lengths is None:
            lengths = self.input_lengths + self.cache_lengths
        if self.cu_seqlens is None:  # each sequence has one token
            return lengths
        # Without its size the host would wait for the device to learn it.
        return torch.repeat_interleave(lengths, self.input_lengths, output_size=len(self.position_ids))

    def attend(
        self,
        layer_id: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        spec: AttentionSpec,
        angles: CosSin | None = None,
    ) -> torch.Tensor:
        return self.ops.attend(q, k, v, angles, self.kv_cache[layer_id], self, spec).flatten(1)

    def record(self, hidden_states: torch.Tensor) -> None:
        """Keep nothing: no caller of a paged forward can ask for the states between the layers."""


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
        self,
        layer_id: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        spec: AttentionSpec,
        angles: CosSin | None = None,
    ) -> torch.Tensor:
        if angles is not None:
            reference.rotary(q, *angles)
            reference.rotary(k, *angles)
        q, k, v = (self.rectangle(x).transpose(1, 2) for x in (q, k, v))
        if self.past is not None:
            k = torch.cat([self.past[layer_id][0], k], dim=2)
            v = torch.cat([self.past[layer_id][1], v], dim=2)
        self.present.append((k, v))
        scores = reference.score(q.float(), k.float(), spec)
        if spec.slopes is not None:
            scores = scores + spec.slopes[:, None, None] * self._distances
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
        """Return flat tokens as `[num_seqs, num_new, ...]`."""
        rows: torch.Tensor = flat.unflatten(0, (self.num_seqs, self.num_new))
        return rows

    @cached_property
    def _distances(self) -> torch.Tensor:
        """The places of all keys, less that of each new token: `[new, cached and new]`."""
        keys = torch.arange(self.attention_mask.shape[1], device=self.attention_mask.device)
        return keys - keys[len(keys) - self.num_new :, None]

    @cached_property
    def _visible(self) -> torch.Tensor:
        """The keys that each new token may look at: `[num_seqs, 1, new, cached and new]`."""
        num_keys = self.attention_mask.shape[1]
        keys = torch.arange(num_keys, device=self.attention_mask.device)
        queries = keys[num_keys - self.num_new :]
        causal = keys[None] <= queries[:, None]
        visible: torch.Tensor = causal & self.attention_mask.bool()[:, None, None]
        return visible
