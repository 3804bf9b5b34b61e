"""What is above the layers and the same for every architecture: the tail of a paged and of a padded forward."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from lorax_server.adapters.batch import AdapterBatchData
from lorax_server.distributed import Shard, shard_units
from lorax_server.errors import ConfigError, InputError, WeightsError
from lorax_server.layers.attention import Context, KVCache, PaddedContext, PagedContext, Seqlen
from lorax_server.layers.linear import MultiAdapterHead
from lorax_server.weights import Weights

PagedOutput = tuple[torch.Tensor, torch.Tensor | None]


class PagedModel(nn.Module):
    """A causal language model whose keys and values live in blocks."""

    model: nn.Module  # (input_ids, ctx) -> hidden states
    lm_head: MultiAdapterHead

    def __init__(self, config: Any, weights: Weights, num_layers: int, num_kv_heads: int, head_dim: int) -> None:
        """`num_kv_heads` are those of this rank."""
        super().__init__()
        self.config = config
        self.ops = weights.ops
        self.device = weights.device
        self.kv_shape = (num_kv_heads, head_dim)
        self.kv_dtype = torch.float8_e4m3fn if kv_is_quantized(config) else weights.dtype
        self.num_layers = num_layers

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Keys and values of every layer. Zeros, because attention reads past a sequence's end, at weight 0."""
        num_kv_heads, head_dim = self.kv_shape
        shape = (num_blocks, num_kv_heads, block_size, head_dim)
        return [
            (
                torch.zeros(shape, dtype=self.kv_dtype, device=self.device),
                torch.zeros(shape, dtype=self.kv_dtype, device=self.device),
            )
            for _ in range(self.num_layers)
        ]

    @torch.inference_mode()
    def run(
        self,
        input_ids: torch.Tensor,
        ctx: PagedContext,
        lm_head_indices: torch.Tensor | None,
        skip_lm_head: bool,
    ) -> PagedOutput:
        hidden_states: torch.Tensor = self.model(input_ids, ctx)
        adapter_data = ctx.adapter_data
        if lm_head_indices is not None:
            hidden_states = hidden_states[lm_head_indices]
            adapter_data = adapter_data and adapter_data.select(lm_head_indices)
        if skip_lm_head:
            return hidden_states, None
        return self.lm_head(hidden_states, adapter_data)  # type: ignore[no-any-return]


class PagedCausalLM(PagedModel):
    """The forward that every paged architecture has."""

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
        """Logits of the tokens in `lm_head_indices` (None: of all), and those of speculated tokens, if any.

        `cu_seqlen_prefill` is None when every sequence has exactly one token. With `skip_lm_head` the first output
        is the hidden states instead.
        """
        ctx = PagedContext(
            self.ops,
            position_ids,
            cu_seqlen_prefill,
            kv_cache,
            block_tables,
            slots,
            seqlen,
            max_s,
            adapter_data,
            prefill_cache_indices,
            cross_attention_states,
        )
        return self.run(input_ids, ctx, lm_head_indices, skip_lm_head)


def load_head(
    weights: Weights, config: Any, name: str, embedding_name: str, in_features: int, tied: bool
) -> MultiAdapterHead:
    """The head, from its own tensor or from the embedding's it is tied to; adapters call it `name` either way."""
    source = embedding_name if tied else name
    return MultiAdapterHead.load(weights, source, in_features, config.vocab_size, target_name=name)


def kv_is_quantized(config: Any) -> bool:
    return getattr(config, "quantize", None) == "fp8-kv"


def kv_scales(weights: Weights, config: Any, prefix: str) -> tuple[float, float]:
    """What stored keys and values are divided by; 1 where a checkpoint brings no scales."""
    if not kv_is_quantized(config):
        return 1.0, 1.0
    return _scale(weights, f"{prefix}.k_scale"), _scale(weights, f"{prefix}.v_scale")


def _scale(weights: Weights, name: str) -> float:
    if not weights.has(name):
        return 1.0
    tensor = weights.get_tensor(name)
    if tensor.numel() != 1:
        raise WeightsError(f"{weights.where(name)}: tensor {name!r} has shape {tuple(tensor.shape)}, not one number")
    return float(tensor)


def head_size(hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads != 0:
        raise ConfigError(f"config field hidden_size = {hidden_size} is not a multiple of {num_heads} attention heads")
    return hidden_size // num_heads


def local_heads(weights: Weights, num_heads: int) -> Shard:
    return shard_units(weights.process_group, [(num_heads, 1)], "num_attention_heads")


def check_positions(ctx: Context, limit: int) -> None:
    """Learned positions end somewhere."""
    if ctx.max_position > limit:
        raise InputError(f"a sequence of {ctx.max_position} tokens is longer than the model's {limit} positions")


def padded_context(
    config: Any,
    input_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    head_mask: torch.Tensor | None,
    past_key_values: Any,
    output_attentions: bool | None,
    output_hidden_states: bool | None,
    adapter_data: AdapterBatchData | None,
) -> PaddedContext:
    """The context of a padded forward; `head_mask` is that of this rank, as `local_head_mask` makes it."""
    tokens = input_ids if input_ids is not None else inputs_embeds
    if tokens is None or (input_ids is not None and inputs_embeds is not None):
        raise ValueError("give exactly one of input_ids and inputs_embeds")
    num_seqs, num_new = tokens.shape[:2]
    num_cached = 0 if past_key_values is None else past_key_values[0][0].shape[2]
    total = num_cached + num_new
    if attention_mask is None:
        attention_mask = torch.ones(num_seqs, total, dtype=torch.long, device=tokens.device)
    if attention_mask.shape != (num_seqs, total):
        raise InputError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, not {(num_seqs, total)}: "
            f"{num_cached} cached and {num_new} new tokens"
        )
    max_position = total if position_ids is None else int(position_ids.max()) + 1
    if position_ids is None:
        position_ids = torch.arange(num_cached, total, device=tokens.device).expand(num_seqs, -1)
    return PaddedContext(
        num_seqs=num_seqs,
        num_new=num_new,
        position_ids=position_ids.reshape(-1),
        attention_mask=attention_mask,
        past=past_key_values,
        adapter_data=adapter_data,
        max_position=max_position,
        head_mask=head_mask,
        keep_attentions=_asked(output_attentions, config, "output_attentions", False),
        keep_hidden_states=_asked(output_hidden_states, config, "output_hidden_states", False),
    )


def local_head_mask(head_mask: torch.Tensor | None, heads: Shard, num_layers: int) -> torch.Tensor | None:
    """A mask of `[heads]` or `[layers, heads]`, for each layer the part of this rank's heads."""
    return None if head_mask is None else heads.take(head_mask.expand(num_layers, -1), dim=1)


def padded_output(
    config: Any,
    logits: torch.Tensor,
    ctx: PaddedContext,
    labels: torch.Tensor | None,
    use_cache: bool | None,
    return_dict: bool | None,
) -> CausalLMOutputWithPast | tuple[Any, ...]:
    """What transformers returns, with keys and values as plain pairs."""
    keep = _asked(use_cache, config, "use_cache", True)
    logits = ctx.rectangle(logits)
    # transformers annotates its own types of tensor and cache here; plain ones are what the contract names.
    fields: dict[str, Any] = {
        "loss": None if labels is None else _next_token_loss(logits, labels),
        "logits": logits,
        "past_key_values": tuple(ctx.present) if keep else None,
        "hidden_states": tuple(ctx.hidden_states) or None,
        "attentions": tuple(ctx.attentions) or None,
    }
    output = CausalLMOutputWithPast(**fields)
    return output if _asked(return_dict, config, "return_dict", True) else output.to_tuple()


def _asked(argument: bool | None, config: Any, field: str, default: bool) -> bool:
    """An argument of a forward, or else the config's word."""
    return bool(getattr(config, field, default)) if argument is None else argument


def _next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
