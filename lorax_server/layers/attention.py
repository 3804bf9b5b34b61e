"""The context that a forward pass provides to the layers.

Layers take flat `[num_tokens, hidden]` tensors and call `ctx.attend`, which reads and writes the KV cache.
"""

from dataclasses import dataclass

import torch

from lorax_server.adapters.batch import AdapterBatchData
from lorax_server.kernels import AttentionSpec, CosSin, HostLengths, LayerCache, Ops, PagedBatch

KVCache = list[LayerCache]  # indexed by layer


@dataclass
class Seqlen:
    """The sequence lengths for a paged forward pass, on the device and optionally also on the host."""

    input_lengths: torch.Tensor  # [num_seqs] tokens in this forward pass
    cache_lengths: torch.Tensor  # [num_seqs] tokens already in the cache
    cu_seqlen_q: torch.Tensor | None = None  # [num_seqs + 1]
    max_q: int | None = None
    max_k: int | None = None
    # [num_seqs] Length-dependent RoPE scaling uses the prompt length for all steps. None: the current length.
    prompt_lengths: torch.Tensor | None = None
    host_lengths: HostLengths | None = None  # the same lengths in host memory, if available
    stores_all: bool = False  # see `PagedBatch`


@dataclass(frozen=True, kw_only=True)
class PagedContext(PagedBatch):
    """The batch in a forward pass, with its KV cache, positions and adapters."""

    ops: Ops
    kv_cache: KVCache
    position_ids: torch.Tensor  # [num_tokens] on the device
    max_position: int  # on the host
    prompt_lengths: torch.Tensor | None = None  # [num_seqs] see `Seqlen`
    token_prompt_lengths: torch.Tensor | None = None  # [num_tokens] per token; overrides `prompt_lengths`
    adapter_data: AdapterBatchData | None = None
    cross_attention_states: torch.Tensor | None = None  # only for custom layers from `create_layer_fn`

    def rope_lengths(self) -> torch.Tensor:
        """Return, for each token, the sequence length that selects the RoPE scaling."""
        if self.token_prompt_lengths is not None:
            return self.token_prompt_lengths
        lengths = self.prompt_lengths
        if lengths is None:
            lengths = self.input_lengths + self.cache_lengths
        if self.cu_seqlens is None:  # each sequence has one token
            return lengths
        # Without `output_size`, torch synchronizes with the device.
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
        """Apply RoPE, store keys and values in the cache, and return the attention output.

        Inputs are `[num_tokens, heads, head_dim]`, the output is `[num_tokens, hidden]`. `q` and `k` may be modified.
        """
        return self.ops.attend(q, k, v, angles, self.kv_cache[layer_id], self, spec).flatten(1)


@dataclass(frozen=True, kw_only=True)
class SequenceContext(PagedContext):
    """A batch of whole sequences without a KV cache, for models that do not generate text."""

    lengths: list[int]  # on the host
    first_tokens: torch.Tensor  # [num_seqs] index of each sequence's first token
    token_types: torch.Tensor  # [num_tokens] 1 for the tokens of the second text in a pair, else 0

    def attend(
        self,
        layer_id: int,  # noqa: ARG002 - there is no KV cache
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        spec: AttentionSpec,
        angles: CosSin | None = None,
    ) -> torch.Tensor:
        return self.ops.attend_sequences(q, k, v, angles, self.lengths, spec).flatten(1)
