"""GPT-2: learned positions, fused QKV projection, and weights stored as [in, out]."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lorax_server.adapters.batch import AdapterBatchData
from lorax_server.errors import ConfigError
from lorax_server.layers.activation import get_activation
from lorax_server.layers.attention import KVCache, Seqlen
from lorax_server.layers.norm import ResidualLayerNorm
from lorax_server.models.custom_modeling.architecture import Architecture, BiasFlags, ModuleNames
from lorax_server.models.custom_modeling.common import LearnedPositionsModel, PlainMLP
from lorax_server.models.custom_modeling.flash_llama_modeling import (
    FlashLlamaAttention,
    FlashLlamaForCausalLM,
    FlashLlamaLayer,
)
from lorax_server.models.custom_modeling.paged import PagedOutput
from lorax_server.weights import Weights


class FlashGPT2PreTrainedModel(FlashLlamaForCausalLM):
    """GPT-2 base class with its LoRAX class name (see docs/seed-contract.md)."""


class FlashGPT2Attention(FlashLlamaAttention):
    """GPT-2 attention. All attention ops compute scores in float32, as `reorder_and_upcast_attn` requires."""

    def __init__(self, prefix: str, config: Any, weights: Weights, layer_id: int, arch: Architecture) -> None:
        super().__init__(prefix, config, weights, layer_id, arch)
        if config.scale_attn_by_inverse_layer_idx:
            self.spec = replace(self.spec, scale=self.spec.scale / (layer_id + 1))


class GPT2MLP(PlainMLP):
    """GPT-2 MLP with its LoRAX class name (see docs/seed-contract.md)."""


class GPT2Block(FlashLlamaLayer):
    """GPT-2 decoder layer with its LoRAX class name (see docs/seed-contract.md)."""


class FlashGPT2Model(LearnedPositionsModel):
    """GPT-2 decoder with its LoRAX class name (see docs/seed-contract.md)."""


class FlashGPT2ForCausalLM(FlashGPT2PreTrainedModel):
    def __init__(self, prefix: str, config: Any, weights: Weights) -> None:
        super().__init__(prefix, config, weights)

    @staticmethod
    def describe(config: Any) -> Architecture:
        return replace(
            describe_gpt2(config),
            attention_class=FlashGPT2Attention,
            mlp_class=GPT2MLP,
            layer_class=GPT2Block,
            model_class=FlashGPT2Model,
        )

    def forward(  # type: ignore[override]  # GPT-2's seed contract has no cross_attention_states
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
        skip_lm_head: bool = False,
    ) -> PagedOutput:
        return super().forward(
            input_ids,
            position_ids,
            cu_seqlen_prefill,
            kv_cache,
            block_tables,
            slots,
            seqlen,
            max_s,
            adapter_data,
            prefill_cache_indices,
            lm_head_indices,
            skip_lm_head=skip_lm_head,
        )


def describe_gpt2(config: Any) -> Architecture:
    """Return the architecture description that GPT-2 and GPT-BigCode share."""
    if config.add_cross_attention:
        raise ConfigError("config field add_cross_attention = true is not supported: only decoders are")
    names = ModuleNames(
        model="transformer",
        embedding="wte",
        layers="h",
        input_norm="ln_1",
        second_norm="ln_2",
        final_norm="ln_f",
        attention="attn",
        qkv=("c_attn",),
        output="c_proj",
        mlp=("mlp.c_fc", "mlp.c_proj"),
    )
    return Architecture(
        names=names,
        biases=BiasFlags(qkv=True, output=True, mlp=True),
        mlp_class=PlainMLP,
        model_class=LearnedPositionsModel,
        norm=partial(ResidualLayerNorm, eps=config.layer_norm_epsilon),
        fan_in_fan_out=True,
        num_kv_heads=config.num_attention_heads,
        scale=None if config.scale_attn_weights else 1.0,
        uses_rope=False,
        inner_size=config.n_inner or 4 * config.hidden_size,
        activation=get_activation(config.activation_function, "activation_function"),
    )
