"""Phi-2: layer norms, a bias on all matrices and on the head, a part of each head rotated, attention beside the
feed-forward."""

from typing import Any

import torch

from lorax_server.layers.norm import LayerNorm, head_norm_target, place_head_norms
from lorax_server.models.custom_modeling.flash_llama_modeling import (
    Biases,
    FlashLlamaAttention,
    FlashLlamaForCausalLM,
    FlashLlamaLayer,
    LayerNorms,
    Names,
    PlainMLP,
)
from lorax_server.weights import Weights


class PhiAttention(FlashLlamaAttention):
    output_name = "dense"

    def __init__(self, prefix: str, config: Any, weights: Weights, layer_id: int, biases: Biases) -> None:
        super().__init__(prefix, config, weights, layer_id, biases)
        self.q_norm = self.k_norm = None
        if config.qk_layernorm:
            size, eps = self.head_dim, config.layer_norm_eps
            self.q_norm = LayerNorm(f"{prefix}.q_layernorm", weights, size, eps, adaptable=False)
            self.k_norm = LayerNorm(f"{prefix}.k_layernorm", weights, size, eps, adaptable=False)
            self.targets = place_head_norms(
                [
                    head_norm_target(f"{prefix}.q_layernorm", self.q_norm, self.num_heads, size),
                    head_norm_target(f"{prefix}.k_layernorm", self.k_norm, self.num_kv_heads, size),
                ]
            )

    def normalize_heads(self, qk: torch.Tensor) -> torch.Tensor:
        if self.q_norm is None or self.k_norm is None:
            return qk
        q, k = qk.split([self.num_heads, self.num_kv_heads], dim=1)
        return torch.cat([self.q_norm(q), self.k_norm(k)], dim=1)


class PhiLayer(FlashLlamaLayer):
    names = Names(norm="final_layernorm")
    attention_class = PhiAttention
    mlp_class = PlainMLP
    partial_rotary = True
    is_parallel = True
    layer_norms = LayerNorms("layer_norm_eps")

    def biases(self, config: Any) -> Biases:  # noqa: ARG002 - whatever the config says
        return Biases(qkv=True, output=True, mlp=True)


class PhiForCausalLM(FlashLlamaForCausalLM):
    layer_class = PhiLayer
    head_bias = True
