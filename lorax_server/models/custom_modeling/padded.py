"""What the padded classes share: a rectangle of tokens in, what transformers returns out."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from transformers.modeling_outputs import CausalLMOutputWithPast

from lorax_server.adapters.batch import AdapterBatchData
from lorax_server.distributed import Shard
from lorax_server.errors import InputError
from lorax_server.layers.attention import PaddedContext
from lorax_server.layers.linear import MultiAdapterHead

Decoder = Callable[[torch.Tensor | None, PaddedContext, torch.Tensor | None], torch.Tensor]


def padded_forward(
    decoder: Decoder,
    head: MultiAdapterHead,
    config: Any,
    heads: Shard,
    *,
    input_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    head_mask: torch.Tensor | None,
    past_key_values: Any,
    labels: torch.Tensor | None,
    use_cache: bool | None,
    output_attentions: bool | None,
    output_hidden_states: bool | None,
    return_dict: bool | None,
    adapter_data: AdapterBatchData | None,
) -> tuple[Any, ...] | CausalLMOutputWithPast:
    """Run a decoder over a rectangle; `heads` are the attention heads of this rank."""
    ctx = _make_context(input_ids, inputs_embeds, attention_mask, position_ids, past_key_values, adapter_data)
    ctx.keep_attentions = _asked(output_attentions, config, "output_attentions", False)
    ctx.keep_hidden_states = _asked(output_hidden_states, config, "output_hidden_states", False)
    if head_mask is not None:  # of [heads] or [layers, heads]
        ctx.head_mask = heads.take(head_mask.expand(config.num_hidden_layers, -1), dim=1)
    hidden_states = decoder(
        None if input_ids is None else input_ids.flatten(),
        ctx,
        None if inputs_embeds is None else inputs_embeds.flatten(0, 1),
    )
    logits = ctx.rectangle(head(hidden_states, adapter_data)[0])
    # transformers annotates its own types of tensor and cache here; plain ones are what the contract names.
    fields: dict[str, Any] = {
        "loss": None if labels is None else _next_token_loss(logits, labels),
        "logits": logits,
        "past_key_values": tuple(ctx.present) if _asked(use_cache, config, "use_cache", True) else None,
        "hidden_states": tuple(ctx.hidden_states) or None,
        "attentions": tuple(ctx.attentions) or None,
    }
    output = CausalLMOutputWithPast(**fields)
    return output if _asked(return_dict, config, "return_dict", True) else output.to_tuple()


def _make_context(
    input_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    past_key_values: Any,
    adapter_data: AdapterBatchData | None,
) -> PaddedContext:
    tokens = input_ids if input_ids is not None else inputs_embeds
    if tokens is None or (input_ids is not None and inputs_embeds is not None):
        raise ValueError("give exactly one of input_ids and inputs_embeds")
    num_seqs, num_new = tokens.shape[:2]
    num_cached = num_past_tokens(past_key_values)
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
        position_ids = torch.arange(num_cached, total, device=tokens.device)
    return PaddedContext(
        num_seqs=num_seqs,
        num_new=num_new,
        position_ids=position_ids.expand(num_seqs, -1).reshape(-1),
        attention_mask=attention_mask,
        past=past_key_values,
        adapter_data=adapter_data,
        max_position=max_position,
    )


def num_past_tokens(past_key_values: Any) -> int:
    return 0 if past_key_values is None else int(past_key_values[0][0].shape[2])


def _asked(argument: bool | None, config: Any, field: str, default: bool) -> bool:
    """An argument of a forward, or else the config's word."""
    return bool(getattr(config, field, default)) if argument is None else argument


def _next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
