"""StableLM: Llama with layer norms, a part of each head rotated, and attention beside the feed-forward if asked for."""

from typing import Any

import torch

from lorax_server.layers.norm import HeadNorm
from lorax_server.models.custom_modeling.flash_llama_modeling import (
    Biases,
    FlashLlamaAttention,
    FlashLlamaForCausalLM,
    FlashLlamaLayer,
    LayerNorms,
)
from lorax_server.weights import Weights


class StableLMAttention(FlashLlamaAttention):
    """The norm of each head is a tensor of its own."""

    def __init__(self, prefix: str, config: Any, weights: Weights, layer_id: int, biases: Biases) -> None:
        super().__init__(prefix, config, weights, layer_id, biases)
        self.q_norm = self.k_norm = None
        if config.qk_layernorm:
            heads, kv_heads = self.find_heads(config, weights)
            self.q_norm = self.load_head_norms(f"{prefix}.q_layernorm", config, weights, heads)
            self.k_norm = self.load_head_norms(f"{prefix}.k_layernorm", config, weights, kv_heads)

    def load_head_norms(self, name: str, config: Any, weights: Weights, heads: range) -> HeadNorm:
        rows = [weights.get_tensor(f"{name}.norms.{head}.weight", (self.head_dim,)) for head in heads]
        return HeadNorm(torch.stack(rows), config.layer_norm_eps, weights)

    def normalize_heads(self, qk: torch.Tensor) -> torch.Tensor:
        if self.q_norm is None or self.k_norm is None:
            return qk
        q, k = qk.split([self.num_heads, self.num_kv_heads], dim=1)
        return torch.cat([self.q_norm(q), self.k_norm(k)], dim=1)


class StableLMLayer(FlashLlamaLayer):
    attention_class = StableLMAttention
    partial_rotary = True
    layer_norms = LayerNorms("layer_norm_eps")

    def runs_parallel(self, config: Any) -> bool:
        return bool(config.use_parallel_residual)

    def biases(self, config: Any) -> Biases:
        return Biases(qkv=bool(config.use_qkv_bias))


class StableLMForCausalLM(FlashLlamaForCausalLM):
    layer_class = StableLMLayer
