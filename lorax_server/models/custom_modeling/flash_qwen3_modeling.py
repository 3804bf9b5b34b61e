"""Qwen3: Llama that normalises each head of query and key before rotating it."""

from typing import Any

import torch

from lorax_server.layers.norm import RMSNorm, head_norm_target, place_head_norms
from lorax_server.models.custom_modeling.flash_llama_modeling import (
    Biases,
    FlashLlamaAttention,
    FlashLlamaForCausalLM,
    FlashLlamaLayer,
)
from lorax_server.models.custom_modeling.flash_qwen2_modeling import layer_window
from lorax_server.weights import Weights


class FlashQwen3Attention(FlashLlamaAttention):
    norm_offset = 0.0  # added to what a checkpoint has as the weight of a norm of heads

    def __init__(self, prefix: str, config: Any, weights: Weights, layer_id: int, biases: Biases) -> None:
        super().__init__(prefix, config, weights, layer_id, biases)
        self.q_norm = self.make_head_norm(f"{prefix}.q_norm", config, weights)
        self.k_norm = self.make_head_norm(f"{prefix}.k_norm", config, weights)
        norms = (("q_norm", self.q_norm, self.num_heads), ("k_norm", self.k_norm, self.num_kv_heads))
        self.targets = place_head_norms(
            [
                head_norm_target(f"{prefix}.{name}", norm, heads, self.head_dim, self.norm_offset)
                for name, norm, heads in norms
            ]
        )

    def make_head_norm(self, name: str, config: Any, weights: Weights) -> RMSNorm:
        return RMSNorm(name, weights, self.head_dim, config.rms_norm_eps, adaptable=False)

    def window(self, config: Any, layer_id: int) -> int | None:
        return layer_window(config, layer_id)

    def normalize_heads(self, qk: torch.Tensor) -> torch.Tensor:
        q, k = qk.split([self.num_heads, self.num_kv_heads], dim=1)
        return torch.cat([self.q_norm(q)[0], self.k_norm(k)[0]], dim=1)


class FlashQwen3Layer(FlashLlamaLayer):
    attention_class = FlashQwen3Attention

    def biases(self, config: Any) -> Biases:
        return super().biases(config)._replace(mlp=False)


class FlashQwen3ForCausalLM(FlashLlamaForCausalLM):
    layer_class = FlashQwen3Layer
