"""Gemma 3 (text): Gemma 2 with query and key norms instead of soft caps, and RoPE settings per layer type."""

from dataclasses import replace
from typing import Any

from lorax_server.models.custom_modeling.architecture import Architecture
from lorax_server.models.custom_modeling.common import HeadRMSNorm, SharedHeadNormAttention
from lorax_server.models.custom_modeling.flash_gemma2_modeling import FlashGemma2ForCausalLM
from lorax_server.weights import Weights


class Gemma3Attention(SharedHeadNormAttention):
    norm_offset = 1.0

    def load_head_norm(self, name: str, config: Any, weights: Weights) -> HeadRMSNorm:
        eps = config.rms_norm_eps
        return HeadRMSNorm(name, weights, self.head_dim, eps, is_adaptable=False, offset=self.norm_offset, upcast=True)


class FlashGemma3ForCausalLM(FlashGemma2ForCausalLM):
    @staticmethod
    def describe(config: Any) -> Architecture:
        return replace(
            FlashGemma2ForCausalLM.describe(config),
            attention_class=Gemma3Attention,
            soft_cap=None,
            rope_kinds=config.layer_types,
        )
