"""The common part of the padded classes: a rectangle of tokens in, an output of transformers out."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from lorax_server.adapters.batch import AdapterBatchData
from lorax_server.errors import InputError
from lorax_server.layers.attention import PaddedContext
from lorax_server.layers.linear import MultiAdapterHead
from lorax_server.models.custom_modeling.paged import local_heads
from lorax_server.weights import Weights

Decoder = Callable[[torch.Tensor | None, PaddedContext, torch.Tensor | None], torch.Tensor]
PaddedOutput = tuple[Any, ...] | CausalLMOutputWithPast


class PaddedInputs(NamedTuple):
    """The inputs of a padded forward, by their names in the contracts."""

    input_ids: torch.Tensor | None  # [num_seqs, num_new], unless there are embeddings
    inputs_embeds: torch.Tensor | None  # [num_seqs, num_new, size]
    attention_mask: torch.Tensor | None  # [num_seqs, cached and new tokens]
    position_ids: torch.Tensor | None
    head_mask: torch.Tensor | None  # [heads] or [layers, heads]
    past_key_values: Any
    adapter_data: AdapterBatchData | None

    @property
    def num_cached(self) -> int:
        return 0 if self.past_key_values is None else int(self.past_key_values[0][0].shape[2])


class OutputOptions(NamedTuple):
    """The outputs that a caller of a padded forward asks for; None for what the config says."""

    labels: torch.Tensor | None
    use_cache: bool | None
    output_attentions: bool | None
    output_hidden_states: bool | None
    return_dict: bool | None


class PaddedCausalLM(nn.Module):
    def __init__(self, config: Any, weights: Weights) -> None:
        super().__init__()
        self.config = config
        self.heads = local_heads(weights, config.num_attention_heads)

    def run(
        self, decoder: Decoder, head: MultiAdapterHead, inputs: PaddedInputs, options: OutputOptions
    ) -> PaddedOutput:
        ctx = _make_context(inputs)
        ctx.keep_attentions = self._choose(options.output_attentions, "output_attentions", False)
        ctx.keep_hidden_states = self._choose(options.output_hidden_states, "output_hidden_states", False)
        if inputs.head_mask is not None:
            ctx.head_mask = self.heads.take(inputs.head_mask.expand(self.config.num_hidden_layers, -1), dim=1)
        ids, embeds = inputs.input_ids, inputs.inputs_embeds
        hidden_states = decoder(
            None if ids is None else ids.flatten(), ctx, None if embeds is None else embeds.flatten(0, 1)
        )
        logits = ctx.rectangle(head(hidden_states, inputs.adapter_data)[0])
        # transformers annotates its own types of tensor and cache here; plain ones are what the contract names.
        fields: dict[str, Any] = {
            "loss": None if options.labels is None else _next_token_loss(logits, options.labels),
            "logits": logits,
            "past_key_values": tuple(ctx.present) if self._choose(options.use_cache, "use_cache", True) else None,
            "hidden_states": tuple(ctx.hidden_states) or None,
            "attentions": tuple(ctx.attentions) or None,
        }
        output = CausalLMOutputWithPast(**fields)
        return output if self._choose(options.return_dict, "return_dict", True) else output.to_tuple()

    def _choose(self, option: bool | None, field: str, default: bool) -> bool:
        """Return an option of the caller, or else the config's."""
        return bool(getattr(self.config, field, default)) if option is None else option


def _make_context(inputs: PaddedInputs) -> PaddedContext:
    tokens = inputs.inputs_embeds if inputs.input_ids is None else inputs.input_ids
    if tokens is None or (inputs.input_ids is not None and inputs.inputs_embeds is not None):
        raise ValueError("give exactly one of input_ids and inputs_embeds")
    num_seqs, num_new = tokens.shape[:2]
    num_cached = inputs.num_cached
    total = num_cached + num_new
    attention_mask, position_ids, max_position = inputs.attention_mask, inputs.position_ids, total
    if attention_mask is None:
        attention_mask = torch.ones(num_seqs, total, dtype=torch.long, device=tokens.device)
    if attention_mask.shape != (num_seqs, total):
        raise InputError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, not {(num_seqs, total)}: "
            f"{num_cached} cached and {num_new} new tokens"
        )
    if position_ids is None:
        position_ids = torch.arange(num_cached, total, device=tokens.device)
    else:
        max_position = int(position_ids.max()) + 1
    return PaddedContext(
        num_seqs=num_seqs,
        num_new=num_new,
        position_ids=position_ids.expand(num_seqs, -1).reshape(-1),
        attention_mask=attention_mask,
        past=inputs.past_key_values,
        adapter_data=inputs.adapter_data,
        max_position=max_position,
    )


def _next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
