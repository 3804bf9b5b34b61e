"""The base class of paged models. Implements the forward pass, allocates the KV cache, and loads the embedding and the
LM head.
"""

from typing import Any, Protocol

import torch
from torch import nn

from lorax_server.adapters.batch import AdapterBatchData
from lorax_server.adapters.target import AdapterTarget
from lorax_server.distributed import shard_vocab
from lorax_server.errors import ConfigError, InputError
from lorax_server.kernels import AttentionSpec, QuantizedMatrix
from lorax_server.kernels.device import allocate_zeros, is_host
from lorax_server.layers.attention import KVCache, PagedContext, Seqlen
from lorax_server.layers.embedding import TensorParallelEmbedding
from lorax_server.layers.linear import MultiAdapterHead
from lorax_server.models.draft_heads import DraftHeads
from lorax_server.weights import Weights

MIN_WARMUP_LAYERS = 2  # the first layer has no residual, so it runs different kernels than the second

PagedOutput = tuple[torch.Tensor, torch.Tensor | None]


class Decoder(Protocol):
    """A model without its LM head.

    `embed` may read the batch on the host. `run_layers` only launches kernels, so it can be recorded as a graph.
    """

    num_warmup_layers: int  # number of leading layers that together launch every kernel

    def embed(self, input_ids: torch.Tensor, ctx: PagedContext) -> torch.Tensor:
        """Return the first layer's input, `[num_tokens, size]`."""
        ...

    def run_layers(self, x: torch.Tensor, ctx: PagedContext, count: int | None = None) -> torch.Tensor:
        """Return the hidden states after all layers, or after the first `count` layers."""
        ...


class PagedCausalLM(nn.Module):
    """A causal language model with a paged KV cache."""

    model: Decoder
    lm_head: MultiAdapterHead
    weight_format = ""  # formats of quantized matrices, such as Q4_K
    unrecorded_targets: tuple[AdapterTarget, ...] = ()  # targets whose adapters recorded steps do not apply

    def __init__(self, config: Any, weights: Weights, kv_shape: tuple[int, int], *, shares_kv: bool = False) -> None:
        """Store the model's settings.

        `kv_shape` is (number of KV heads on this rank, head dimension). With `shares_kv`, the values are the keys, and
        the cache stores them once.
        """
        super().__init__()
        self.config = config
        self.ops = weights.ops
        self.device = weights.device
        self.dtype = weights.dtype
        self.kv_shape = kv_shape
        self.shares_kv = shares_kv
        self.kv_dtype = torch.float8_e4m3fn if kv_is_quantized(config) else weights.dtype
        self.num_layers: int = config.num_hidden_layers
        self.draft_heads: DraftHeads | None = None

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Return a KV cache for every layer. On CPUs, memory is allocated on first use.

        The cache is zeroed, because attention kernels read past the last token with weight 0.
        """
        num_kv_heads, head_dim = self.kv_shape
        shape = (num_blocks, num_kv_heads, block_size, head_dim)

        def zeros() -> torch.Tensor:
            return allocate_zeros(shape, self.kv_dtype, self.device)

        if self.shares_kv:
            return [(shared, shared) for shared in (zeros() for _ in range(self.num_layers))]
        return [(zeros(), zeros()) for _ in range(self.num_layers)]

    def find_targets_after_kv(self) -> frozenset[str]:
        """Return the names of adapter targets that do not affect any keys and values."""
        return frozenset()

    def make_context(self, kv_cache: KVCache, seqlen: Seqlen, position_ids: torch.Tensor, **more: Any) -> PagedContext:
        """Return the context for a forward pass. `more` contains additional `PagedContext` fields."""
        return PagedContext(
            input_lengths=seqlen.input_lengths,
            cache_lengths=seqlen.cache_lengths,
            host_lengths=seqlen.host_lengths,
            prompt_lengths=seqlen.prompt_lengths,
            ops=self.ops,
            kv_cache=kv_cache,
            position_ids=position_ids,
            **more,
        )

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        cu_seqlen_prefill: torch.Tensor | None,
        kv_cache: KVCache,
        block_tables: torch.Tensor,
        slots: torch.Tensor,
        seqlen: Seqlen,
        max_s: int,
        adapter_data: AdapterBatchData | None,
        prefill_cache_indices: torch.Tensor | None = None,
        lm_head_indices: torch.Tensor | None = None,
        cross_attention_states: torch.Tensor | None = None,
        skip_lm_head: bool = False,
    ) -> PagedOutput:
        """Return the logits, and None in place of speculative logits, which are not supported.

        If `lm_head_indices` is given, only the logits of these tokens are computed. `cu_seqlen_prefill` contains the
        index of the first token of each sequence, or is None in decode steps with one token per sequence. With
        `skip_lm_head`, return hidden states instead of logits. Outputs are inference tensors without gradients.
        """
        stored = prefill_cache_indices
        ctx = self.make_context(
            kv_cache,
            seqlen,
            position_ids,
            block_tables=block_tables,
            slots=slots if stored is None else slots[stored],
            stored=stored,
            stores_all=seqlen.stores_all and stored is None,
            cu_seqlens=cu_seqlen_prefill,
            max_position=max_s,
            adapter_data=adapter_data,
            cross_attention_states=cross_attention_states,
        )
        hidden_states = self.model.run_layers(self.model.embed(input_ids, ctx), ctx)
        if lm_head_indices is not None:
            hidden_states = hidden_states[lm_head_indices]
        if skip_lm_head:
            return hidden_states, None
        if lm_head_indices is not None:
            adapter_data = adapter_data and adapter_data.select(lm_head_indices)
        return self.lm_head(hidden_states, adapter_data)  # type: ignore[no-any-return]


def load_embedding(weights: Weights, config: Any, name: str, head_name: str, size: int) -> TensorParallelEmbedding:
    """Load the token embedding. A checkpoint with tied weights may store only the head."""
    stored = name
    is_tied = getattr(config, "tie_word_embeddings", False)  # encoders may lack the field
    if is_tied and not weights.has(f"{name}.weight") and weights.has(f"{head_name}.weight"):
        stored = head_name
    return TensorParallelEmbedding(weights, stored, config.vocab_size, size, target_name=name)


def load_head(
    weights: Weights, config: Any, prefix: str, embedding: TensorParallelEmbedding, *, bias: bool = False
) -> MultiAdapterHead:
    """Load the LM head, or share the embedding's weight if the config ties them and the checkpoint has no head.

    Like transformers, use the head in the checkpoint even if weights are tied in the config.
    """
    name, target_name = find_head(weights, prefix), f"{prefix}lm_head"
    size, shard = embedding.weight.shape[1], shard_vocab(weights.process_group, config.vocab_size)
    added = weights.get_sharded(f"{name}.bias", 0, shard, (config.vocab_size,)) if bias else None
    if config.tie_word_embeddings and not weights.has(f"{name}.weight"):
        assert isinstance(embedding.weight, torch.Tensor | QuantizedMatrix)
        head = MultiAdapterHead(embedding.weight, target_name, config.vocab_size, weights, bias=added)
        (target,) = head.targets
        assert target.weight is not None
        embedding.replace_weight(target.weight)
        return head
    if is_host(weights.device) and isinstance(embedding.weight, torch.Tensor):
        embedding.replace_weight(embedding.weight.clone())  # a view would keep the whole memory-mapped file resident
    return MultiAdapterHead.load(weights, name, size, config.vocab_size, target_name, bias=added)


def find_head(weights: Weights, prefix: str) -> str:
    """Return the LM head's name in the checkpoint: `lm_head`, or `embed_out` for GPT-NeoX."""
    has_other = weights.has(f"{prefix}embed_out.weight") and not weights.has(f"{prefix}lm_head.weight")
    return f"{prefix}embed_out" if has_other else f"{prefix}lm_head"


def kv_is_quantized(config: Any) -> bool:
    return getattr(config, "quantize", None) == "fp8-kv"


def load_attention_spec(
    weights: Weights, config: Any, prefix: str, scale: float, window: int | None = None
) -> AttentionSpec:
    """Return a layer's attention settings. Scales for a float8 KV cache come from the checkpoint (default 1)."""
    if not kv_is_quantized(config):
        return AttentionSpec(scale, window)
    names = (f"{prefix}.k_scale", f"{prefix}.v_scale")
    k_scale, v_scale = (weights.get_scalar(name) if weights.has(name) else 1.0 for name in names)
    return AttentionSpec(scale, window, k_scale, v_scale)


def head_size(hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads != 0:
        raise ConfigError(f"config field hidden_size = {hidden_size} is not a multiple of {num_heads} attention heads")
    return hidden_size // num_heads


def check_positions(ctx: PagedContext, limit: int) -> None:
    """Raise an error if a sequence is longer than the table of learned positions."""
    if ctx.max_position > limit:
        raise InputError(f"sequence length must be at most {limit} for this model (got {ctx.max_position})")
