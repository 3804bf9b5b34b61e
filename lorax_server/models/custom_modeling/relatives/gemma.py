"""Gemma, Gemma 2 and Gemma 3 (text): norms stored less one, larger embeddings, soft caps, norms on both sides."""

from typing import Any

import torch
from torch import nn

from lorax_server.errors import ConfigError
from lorax_server.kernels import Activation, CosSin
from lorax_server.layers.activation import get_activation
from lorax_server.layers.adapt import LogitRule
from lorax_server.layers.attention import PagedContext
from lorax_server.layers.norm import RMSNorm
from lorax_server.models.custom_modeling.flash_llama_modeling import (
    Biases,
    FlashLlamaAttention,
    FlashLlamaForCausalLM,
    FlashLlamaLayer,
    LlamaMLP,
    Names,
)
from lorax_server.models.custom_modeling.flash_qwen2_modeling import layer_window
from lorax_server.models.custom_modeling.flash_qwen3_modeling import FlashQwen3Attention
from lorax_server.weights import Weights


class GemmaLayer(FlashLlamaLayer):
    @classmethod
    def make_norm(cls, name: str, config: Any, weights: Weights) -> nn.Module:
        return RMSNorm(name, weights, config.hidden_size, config.rms_norm_eps, offset=1.0, wide=True)

    def biases(self, config: Any) -> Biases:
        return super().biases(config)._replace(mlp=False)


class GemmaForCausalLM(FlashLlamaForCausalLM):
    layer_class = GemmaLayer

    def check(self, config: Any) -> None:
        if getattr(config, "use_bidirectional_attention", None):
            raise ConfigError("config field use_bidirectional_attention = true is not supported: it is no decoder")

    def embedding_multiplier(self, config: Any) -> float | None:
        return float(torch.tensor(config.hidden_size**0.5, dtype=self.dtype))


class Gemma2Attention(FlashLlamaAttention):
    def scale(self, config: Any) -> float:
        return float(config.query_pre_attn_scalar**-0.5)

    def soft_cap(self, config: Any) -> float | None:
        cap: float | None = config.attn_logit_softcapping
        return cap

    def window(self, config: Any, layer_id: int) -> int | None:
        return layer_window(config, layer_id)


class Gemma2MLP(LlamaMLP):
    def load_activation(self, config: Any) -> Activation:
        return get_activation(config.hidden_activation, "hidden_activation")


class BothNormsLayer(FlashLlamaLayer):
    """A layer that normalises what attention and feed-forward read, and what they add."""

    added_norms: tuple[str, str]  # of what attention adds, and of what the feed-forward adds

    def load_norms(self, prefix: str, config: Any, weights: Weights) -> None:
        super().load_norms(prefix, config, weights)
        self.attention_norm, self.mlp_norm = (
            self.make_norm(f"{prefix}.{name}", config, weights) for name in self.added_norms
        )

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rope: CosSin | None, ctx: PagedContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.input_layernorm(x, residual, ctx.adapter_data)
        x = self.attention_norm(self.self_attn(x, rope, ctx), None, ctx.adapter_data)[0]
        x, residual = self.post_attention_layernorm(x, residual, ctx.adapter_data)
        return self.mlp_norm(self.mlp(x, ctx), None, ctx.adapter_data)[0], residual


class Gemma2Layer(BothNormsLayer, GemmaLayer):
    names = Names(second_norm="pre_feedforward_layernorm")
    added_norms = "post_attention_layernorm", "post_feedforward_layernorm"
    attention_class = Gemma2Attention
    mlp_class = Gemma2MLP


class Gemma2ForCausalLM(GemmaForCausalLM):
    layer_class = Gemma2Layer

    def logit_rule(self, config: Any) -> LogitRule | None:
        return LogitRule(soft_cap=config.final_logit_softcapping)


class Gemma3Attention(FlashQwen3Attention, Gemma2Attention):
    """Gemma 2's, with Qwen3's norms of heads, and without its soft cap."""

    norm_offset = 1.0

    def make_head_norm(self, name: str, config: Any, weights: Weights) -> RMSNorm:
        eps = config.rms_norm_eps
        return RMSNorm(name, weights, self.head_dim, eps, adaptable=False, offset=self.norm_offset, wide=True)

    def soft_cap(self, config: Any) -> float | None:  # noqa: ARG002 - whatever the config says
        return None


class Gemma3Layer(Gemma2Layer):
    attention_class = Gemma3Attention

    @staticmethod
    def rope_kind(config: Any, layer_id: int) -> str | None:
        return str(config.layer_types[layer_id])


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    layer_class = Gemma3Layer
