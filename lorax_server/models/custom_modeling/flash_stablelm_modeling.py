"""StableLM: layer norms, partial RoPE, optional head norms, and optionally attention parallel to the MLP."""

from functools import partial
from typing import Any

import torch

from lorax_server.layers.norm import HeadNorm, ResidualLayerNorm
from lorax_server.models.custom_modeling.architecture import Architecture, BiasFlags, ModuleNames
from lorax_server.models.custom_modeling.flash_llama_modeling import FlashLlamaAttention, FlashLlamaForCausalLM
from lorax_server.weights import Weights


class StableLMAttention(FlashLlamaAttention):
    """Attention with query and key norms that are stored as one module per head."""

    def load_head_norms(self, prefix: str, config: Any, weights: Weights) -> None:
        if config.qk_layernorm:
            self.q_norm = self._load_head_norm(f"{prefix}.q_layernorm", config, weights, self.heads)
            self.k_norm = self._load_head_norm(f"{prefix}.k_layernorm", config, weights, self.kv_heads)

    def _load_head_norm(self, name: str, config: Any, weights: Weights, heads: range) -> HeadNorm:
        rows = [weights.get_tensor(f"{name}.norms.{head}.weight", (self.head_dim,)) for head in heads]
        return HeadNorm(torch.stack(rows), config.layer_norm_eps, weights)


class FlashStableLMForCausalLM(FlashLlamaForCausalLM):
    @staticmethod
    def describe(config: Any) -> Architecture:
        return Architecture(
            names=ModuleNames(second_norm=None) if config.use_parallel_residual else ModuleNames(),
            biases=BiasFlags(qkv=bool(config.use_qkv_bias)),
            attention_class=StableLMAttention,
            norm=partial(ResidualLayerNorm, eps=config.layer_norm_eps),
            partial_rotary=True,
        )
