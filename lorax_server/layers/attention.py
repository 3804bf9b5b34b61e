"""The context of a paged forward.

A model's forward packs its inputs into a context and passes it down. The layers work on flat `[num_tokens, hidden]` and
call `ctx.attend`.
"""

from dataclasses import dataclass

import torch

from lorax_server.adapters.batch import AdapterBatchData
from lorax_server.kernels import AttentionSpec, CosSin, HostLengths, LayerCache, Ops, PagedBatch

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
        """Return, for each token, the length that its sequence's rotary scaling is chosen by."""
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
        """Rotate queries and keys, store keys and values, and attend.

        From `[num_tokens, heads, head_dim]` to `[num_tokens, hidden]`; queries and keys may be changed in place.
        """
        return self.ops.attend(q, k, v, angles, self.kv_cache[layer_id], self, spec).flatten(1)
