"""Cohere and Cohere 2: neighbours in a head turn together, attention beside the feed-forward, scaled logits."""

from dataclasses import replace
from typing import Any

import torch

from lorax_server.adapters.target import AdapterTarget, Kind
from lorax_server.distributed import Shard, whole
from lorax_server.layers.adapt import LogitRule
from lorax_server.layers.norm import HeadNorm, place_head_norms
from lorax_server.models.custom_modeling.flash_llama_modeling import (
    Biases,
    FlashLlamaAttention,
    FlashLlamaForCausalLM,
    FlashLlamaLayer,
    LayerNorms,
)
from lorax_server.models.custom_modeling.flash_qwen2_modeling import layer_window
from lorax_server.weights import Weights


class CohereAttention(FlashLlamaAttention):
    interleaved = True

    def __init__(self, prefix: str, config: Any, weights: Weights, layer_id: int, biases: Biases) -> None:
        super().__init__(prefix, config, weights, layer_id, biases)
        self.q_norm = self.k_norm = None
        if getattr(config, "use_qk_norm", False):
            self.q_norm, self.k_norm = (
                self.load_head_norm(f"{prefix}.{name}_norm", config, weights, heads, count)
                for name, heads, count in zip(
                    "qk",
                    self.find_heads(config, weights),
                    (config.num_attention_heads, config.num_key_value_heads),
                    strict=True,
                )
            )

    def load_head_norm(self, name: str, config: Any, weights: Weights, heads: range, count: int) -> HeadNorm:
        """Load the norm of some heads, in the order in which a head is rotated."""
        shard = replace(whole(self.head_dim), pairs=(self.head_dim, self.head_dim))
        weight = weights.get_sharded(f"{name}.weight", 1, shard, (count, self.head_dim))[heads.start : heads.stop]
        size, stops = count * self.head_dim, (heads.start * self.head_dim, heads.stop * self.head_dim)
        outputs = Shard(size, (stops,), (self.head_dim, self.head_dim))
        target = AdapterTarget(name, Kind.NORM, whole(size), outputs, slice(0), weight.flatten(), None)
        self.targets = place_head_norms([*self.targets, replace(target, stored_shape=(count, self.head_dim))])
        return HeadNorm(weight, config.layer_norm_eps, weights)

    def normalize_heads(self, qk: torch.Tensor) -> torch.Tensor:
        if self.q_norm is None or self.k_norm is None:
            return qk
        q, k = qk.split([self.num_heads, self.num_kv_heads], dim=1)
        return torch.cat([self.q_norm(q), self.k_norm(k)], dim=1)


class CohereLayer(FlashLlamaLayer):
    attention_class: type[FlashLlamaAttention] = CohereAttention
    is_parallel = True
    layer_norms = LayerNorms("layer_norm_eps", bias=False)

    def biases(self, config: Any) -> Biases:
        return super().biases(config)._replace(mlp=False)


class CohereForCausalLM(FlashLlamaForCausalLM):
    layer_class: type[FlashLlamaLayer] = CohereLayer

    def logit_rule(self, config: Any) -> LogitRule | None:
        return LogitRule(float(config.logit_scale))


class Cohere2Attention(FlashLlamaAttention):
    interleaved = True

    def window(self, config: Any, layer_id: int) -> int | None:
        return layer_window(config, layer_id)


class Cohere2Layer(CohereLayer):
    attention_class = Cohere2Attention

    @staticmethod
    def rope_kind(config: Any, layer_id: int) -> str | None:
        return None if layer_window(config, layer_id) is None else "all"


class Cohere2ForCausalLM(CohereForCausalLM):
    layer_class = Cohere2Layer
