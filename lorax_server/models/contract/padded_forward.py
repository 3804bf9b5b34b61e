"""LoRAX's padded forward pass, with transformers' inputs and outputs (see docs/seed-contract.md).

It runs the layers of the paged models. `PaddedContext` replaces the paged context: it attends over contiguous
`past_key_values` instead of paged KV blocks.
"""

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from lorax_server.adapters.batch import AdapterBatchData
from lorax_server.distributed import shard_evenly
from lorax_server.errors import InputError
from lorax_server.kernels import AttentionSpec, CosSin, reference
from lorax_server.layers.attention import KVCache
from lorax_server.models.custom_modeling.architecture import Architecture
from lorax_server.models.custom_modeling.flash_llama_modeling import FlashLlamaLayer, FlashLlamaModel
from lorax_server.models.custom_modeling.paged import load_head
from lorax_server.weights import Weights

PaddedOutput = tuple[Any, ...] | CausalLMOutputWithPast


class PaddedInputs(NamedTuple):
    """Inputs of a padded forward pass, with the same names as in LoRAX."""

    input_ids: torch.Tensor | None  # [num_seqs, num_new]; None if `inputs_embeds` is given
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
    """Options that select the outputs of a padded forward pass. None selects the config's setting."""

    labels: torch.Tensor | None
    use_cache: bool | None
    output_attentions: bool | None
    output_hidden_states: bool | None
    return_dict: bool | None


@dataclass
class PaddedContext:
    """A left-padded batch with the keys and values of earlier tokens as tensors."""

    num_seqs: int
    num_new_tokens: int
    position_ids: torch.Tensor  # [num_seqs * num_new]
    attention_mask: torch.Tensor  # [num_seqs, cached and new tokens]
    past: KVCache | None  # [num_seqs, heads, cached tokens, head_dim]
    adapter_data: AdapterBatchData | None
    max_position: int
    head_mask: torch.Tensor | None = None  # [layers, heads]
    keep_attentions: bool = False
    present: KVCache = field(default_factory=list)
    attentions: list[torch.Tensor] = field(default_factory=list)

    def rope_lengths(self) -> torch.Tensor:
        return self.attention_mask.sum(1).repeat_interleave(self.num_new_tokens)

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
        q, k, v = (self.to_padded(x).transpose(1, 2) for x in (q, k, v))
        if self.past is not None:
            k = torch.cat([self.past[layer_id][0], k], dim=2)
            v = torch.cat([self.past[layer_id][1], v], dim=2)
        self.present.append((k, v))
        scores = reference.attention_scores(q.float(), k.float(), spec)
        # Not -inf: queries of padding tokens have no visible keys and would become NaN.
        scores = scores.masked_fill(~self._visible_keys, torch.finfo(torch.float32).min)
        weights = scores.softmax(-1).to(v.dtype)
        if self.head_mask is not None:
            weights = weights * self.head_mask[layer_id][:, None, None].to(weights.dtype)
        if self.keep_attentions:
            self.attentions.append(weights)
        return (weights @ v).transpose(1, 2).reshape(self.num_seqs * self.num_new_tokens, -1)

    def to_padded(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a tensor with one row per token, reshaped to `[num_seqs, num_new_tokens, ...]`."""
        rows: torch.Tensor = flat.unflatten(0, (self.num_seqs, self.num_new_tokens))
        return rows

    @cached_property
    def _visible_keys(self) -> torch.Tensor:
        """Return a mask of the keys that each new token attends to, `[num_seqs, 1, new, cached and new]`."""
        num_keys = self.attention_mask.shape[1]
        keys = torch.arange(num_keys, device=self.attention_mask.device)
        queries = keys[num_keys - self.num_new_tokens :]
        causal = keys[None] <= queries[:, None]
        visible: torch.Tensor = causal & self.attention_mask.bool()[:, None, None]
        return visible


class PaddedCausalLM(nn.Module):
    decoder: FlashLlamaModel

    def __init__(self, config: Any, weights: Weights, arch: Architecture) -> None:
        super().__init__()
        self.config = config
        self.heads = shard_evenly(weights.process_group, config.num_attention_heads, "num_attention_heads")
        layer_class, model_class = arch.layer_class or FlashLlamaLayer, arch.model_class or FlashLlamaModel
        self.decoder = model_class(arch.names.model, config, weights, partial(layer_class, arch=arch), arch)
        self.lm_head = load_head(weights, config, "", self.decoder.embed_tokens)

    def run(self, inputs: PaddedInputs, options: OutputOptions) -> PaddedOutput:
        ctx = _make_context(inputs)
        ctx.keep_attentions = self._resolve_option(options.output_attentions, "output_attentions", False)
        if inputs.head_mask is not None:
            ctx.head_mask = self.heads.select(inputs.head_mask.expand(self.config.num_hidden_layers, -1), dim=1)
        hidden_states: list[torch.Tensor] = []
        keep_states = self._resolve_option(options.output_hidden_states, "output_hidden_states", False)
        final = self._run_decoder(inputs, ctx, hidden_states if keep_states else None)
        logits = ctx.to_padded(self.lm_head(final, inputs.adapter_data)[0])
        # The contract's types differ from transformers' annotations.
        fields: dict[str, Any] = {
            "loss": None if options.labels is None else _next_token_loss(logits, options.labels),
            "logits": logits,
            "past_key_values": tuple(ctx.present)
            if self._resolve_option(options.use_cache, "use_cache", True)
            else None,
            "hidden_states": tuple(map(ctx.to_padded, hidden_states)) or None,
            "attentions": tuple(ctx.attentions) or None,
        }
        output = CausalLMOutputWithPast(**fields)
        return output if self._resolve_option(options.return_dict, "return_dict", True) else output.to_tuple()

    def _run_decoder(self, inputs: PaddedInputs, ctx: Any, states: list[torch.Tensor] | None) -> torch.Tensor:
        """Return the final hidden states. Append each layer's input and the final states to `states`."""

        def record(_: nn.Module, args: tuple[Any, ...]) -> None:
            if states is not None:
                x, residual = args[:2]
                states.append(x if residual is None else x + residual)

        decoder, ids, embeds = self.decoder, inputs.input_ids, inputs.inputs_embeds
        if ids is not None:
            x = decoder.embed(ids.flatten(), ctx)
        else:
            assert embeds is not None
            x = decoder.transform_embeddings(embeds.flatten(0, 1), ctx)
        hooks = [layer.register_forward_pre_hook(record) for layer in decoder.layers]
        try:
            x = decoder.run_layers(x, ctx)
        finally:
            for hook in hooks:
                hook.remove()
        if states is not None:
            states.append(x)
        return x

    def _resolve_option(self, option: bool | None, name: str, default: bool) -> bool:
        """Return `option`, or the config field `name` if `option` is None."""
        return bool(getattr(self.config, name, default)) if option is None else option


def _make_context(inputs: PaddedInputs) -> PaddedContext:
    tokens = inputs.inputs_embeds if inputs.input_ids is None else inputs.input_ids
    if tokens is None or (inputs.input_ids is not None and inputs.inputs_embeds is not None):
        raise ValueError("specify exactly one of input_ids and inputs_embeds")
    num_seqs, num_new = tokens.shape[:2]
    num_cached = inputs.num_cached
    total = num_cached + num_new
    attention_mask, position_ids, max_position = inputs.attention_mask, inputs.position_ids, total
    if attention_mask is None:
        attention_mask = torch.ones(num_seqs, total, dtype=torch.long, device=tokens.device)
    if attention_mask.shape != (num_seqs, total):
        raise InputError(
            f"attention_mask must have shape {(num_seqs, total)} for {num_cached} cached and {num_new} new tokens "
            f"(got {tuple(attention_mask.shape)})"
        )
    if position_ids is None:
        position_ids = torch.arange(num_cached, total, device=tokens.device)
    else:
        max_position = int(position_ids.max()) + 1
    return PaddedContext(
        num_seqs=num_seqs,
        num_new_tokens=num_new,
        position_ids=position_ids.expand(num_seqs, -1).reshape(-1),
        attention_mask=attention_mask,
        past=inputs.past_key_values,
        adapter_data=inputs.adapter_data,
        max_position=max_position,
    )


def _next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
