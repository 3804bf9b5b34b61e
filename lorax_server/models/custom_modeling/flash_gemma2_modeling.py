"""Gemma 2: Gemma with soft caps, a sliding window on some layers, and norms before and after attention and MLP."""

from dataclasses import replace
from typing import Any

from lorax_server.layers.activation import get_activation
from lorax_server.layers.logits import LogitTransform
from lorax_server.models.custom_modeling.architecture import Architecture, ModuleNames
from lorax_server.models.custom_modeling.common import SandwichNormLayer, layer_windows
from lorax_server.models.custom_modeling.flash_gemma_modeling import FlashGemmaForCausalLM


class FlashGemma2ForCausalLM(FlashGemmaForCausalLM):
    @staticmethod
    def describe(config: Any) -> Architecture:
        names = ModuleNames(
            second_norm="pre_feedforward_layernorm",
            added_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        )
        return replace(
            FlashGemmaForCausalLM.describe(config),
            names=names,
            layer_class=SandwichNormLayer,
            scale=config.query_pre_attn_scalar**-0.5,
            soft_cap=config.attn_logit_softcapping,
            windows=layer_windows(config),
            activation=get_activation(config.hidden_activation, "hidden_activation"),
            logit_transform=LogitTransform(soft_cap=config.final_logit_softcapping),
        )
