"""The base of paged architectures: forward, KV cache, embedding and head."""

from typing import Any, Protocol

import torch
from torch import nn

from lorax_server.adapters.batch import AdapterBatchData
from lorax_server.distributed import shard_vocab
from lorax_server.errors import ConfigError, InputError
from lorax_server.kernels import AttentionSpec
from lorax_server.kernels.device import allocate_zeros, is_host
from lorax_server.layers.attention import KVCache, PagedContext, Seqlen
from lorax_server.layers.embedding import TensorParallelEmbedding
from lorax_server.layers.linear import MultiAdapterHead
from lorax_server.weights import Weights

MIN_WARMUP_LAYERS = 2  # layers, if all are of one kind: the first layer has no residual yet

PagedOutput = tuple[torch.Tensor, torch.Tensor | None]


class Decoder(Protocol):
    """A model without its head, in two halves.

    `embed` may read the batch on the host. `run_layers` only launches kernels on the context's tensors, so its graph
    can be replayed with other contents.
    """

    num_warmup_layers: int  # the number of first layers that together launch every kernel

    def embed(self, input_ids: torch.Tensor, ctx: PagedContext) -> torch.Tensor:
        """Return `[num_tokens, size]`, the first layer's inputs."""
        ...

    def run_layers(self, x: torch.Tensor, ctx: PagedContext, count: int | None = None) -> torch.Tensor:
        """Return the hidden states that the head reads: after all layers, or after the first `count`."""
        ...


class PagedCausalLM(nn.Module):
    """A causal language model whose keys and values live in blocks."""

    model: Decoder
    lm_head: MultiAdapterHead

    def __init__(self, config: Any, weights: Weights, kv_shape: tuple[int, int]) -> None:
        """`kv_shape` is the number of key and value heads on this rank, and the size of a head."""
        super().__init__()
        self.config = config
        self.ops = weights.ops
        self.device = weights.device
        self.dtype = weights.dtype
        self.kv_shape = kv_shape
        self.kv_dtype = torch.float8_e4m3fn if kv_is_quantized(config) else weights.dtype
        self.num_layers: int = config.num_hidden_layers

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Allocate the cache of every layer: zeros, because attention reads past a sequence's end, at weight 0.

        On a CPU it takes memory as it is used.
        """
        num_kv_heads, head_dim = self.kv_shape
        shape = (num_blocks, num_kv_heads, block_size, head_dim)

        def zeros() -> torch.Tensor:
            return allocate_zeros(shape, self.kv_dtype, self.device)

        return [(zeros(), zeros()) for _ in range(self.num_layers)]

    def make_context(self, kv_cache: KVCache, seqlen: Seqlen, position_ids: torch.Tensor, **more: Any) -> PagedContext:
        """Pack the inputs of a forward for the layers; `more` are fields of `PagedContext`."""
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
        """Return logits of the tokens in `lm_head_indices` (None: of all), and those of speculated tokens, if any.

        `cu_seqlen_prefill` is None when every sequence has exactly one token. With `skip_lm_head` the first output
        is the hidden states instead. Outputs are inference tensors: nothing can be trained through them.
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
    if config.tie_word_embeddings and not weights.has(f"{name}.weight") and weights.has(f"{head_name}.weight"):
        stored = head_name
    return TensorParallelEmbedding(weights, stored, config.vocab_size, size, target_name=name)


def load_head(
    weights: Weights, config: Any, prefix: str, embedding: TensorParallelEmbedding, *, bias: bool = False
) -> MultiAdapterHead:
    """Load the head: its own tensor if the checkpoint has one, otherwise the embedding's if the two are tied.

    A fine-tune may store its own head under a config that still says tied. transformers uses this head, and so do we.
    """
    name, target_name = find_head(weights, prefix), f"{prefix}lm_head"
    size, shard = embedding.weight.shape[1], shard_vocab(weights.process_group, config.vocab_size)
    added = weights.get_sharded(f"{name}.bias", 0, shard, (config.vocab_size,)) if bias else None
    if config.tie_word_embeddings and not weights.has(f"{name}.weight"):
        assert isinstance(embedding.weight, torch.Tensor)
        head = MultiAdapterHead(embedding.weight, target_name, config.vocab_size, weights, bias=added)
        (target,) = head.targets
        assert target.weight is not None
        embedding.replace_weight(target.weight)
        return head
    if is_host(weights.device) and isinstance(embedding.weight, torch.Tensor):
        embedding.replace_weight(
            embedding.weight.clone()
        )  # a view of a mapped file would keep all of the file in memory
    return MultiAdapterHead.load(weights, name, size, config.vocab_size, target_name, bias=added)


def find_head(weights: Weights, prefix: str) -> str:
    """Return the head's name in the checkpoint: `lm_head`, or `embed_out` in GPT-NeoX checkpoints."""
    has_other = weights.has(f"{prefix}embed_out.weight") and not weights.has(f"{prefix}lm_head.weight")
    return f"{prefix}embed_out" if has_other else f"{prefix}lm_head"


def kv_is_quantized(config: Any) -> bool:
    return getattr(config, "quantize", None) == "fp8-kv"


def load_attention_spec(
    weights: Weights, config: Any, prefix: str, scale: float, window: int | None = None
) -> AttentionSpec:
    """Describe a layer's attention. The scales of a float8 cache come from the checkpoint, or are 1."""
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
    """Reject a sequence that is longer than the table of learned positions."""
    if ctx.max_position > limit:
        raise InputError(f"a sequence of {ctx.max_position} tokens is longer than the model's {limit} positions")
