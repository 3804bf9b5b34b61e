"""OLMo 2 and EXAONE 4: Llama with norms after attention and feed-forward, and on queries and keys."""

from typing import Any

import torch
from torch import nn

from lorax_server.adapters.target import AdapterTarget, Kind
from lorax_server.distributed import shard_kv_heads, shard_units, whole
from lorax_server.kernels import CosSin
from lorax_server.layers.attention import PagedContext
from lorax_server.layers.norm import RMSNorm, place_head_norms
from lorax_server.models.custom_modeling.flash_llama_modeling import (
    Biases,
    FlashLlamaAttention,
    FlashLlamaForCausalLM,
    FlashLlamaLayer,
)
from lorax_server.models.custom_modeling.flash_qwen2_modeling import layer_window
from lorax_server.models.custom_modeling.flash_qwen3_modeling import FlashQwen3Attention
from lorax_server.weights import Weights


class JointHeadNorm(nn.Module):
    """A root mean square norm over all heads of a token, which ranks have in parts."""

    def __init__(self, name: str, weights: Weights, num_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        group, size = weights.process_group, num_heads * head_dim
        is_shared = num_heads < group.size()  # heads of keys that several ranks have: each is counted that often
        shard = (shard_kv_heads if is_shared else _shard_heads)(group, num_heads, head_dim)
        self.weight = weights.get_sharded(f"{name}.weight", 0, shard, (size,)).float()
        self.target = AdapterTarget(name, Kind.NORM, whole(size), shard, slice(0), self.weight, None)
        self.eps = torch.tensor(eps, device=weights.device)
        self.group, self.ops = group, weights.ops
        self.counted = max(size, shard.size * group.size())

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        flat = heads.flatten(1)
        if self.group.size() == 1:
            return self.ops.rms_norm(flat, None, self.weight, self.eps)[0].view(heads.shape)
        wide = flat.float()
        squares = self.group.all_reduce(wide.square().sum(1, keepdim=True))
        normed = wide * (squares / self.counted + self.eps).rsqrt() * self.weight
        return normed.to(heads.dtype).view(heads.shape)


def _shard_heads(group: Any, num_heads: int, head_dim: int) -> Any:
    return shard_units(group, [(num_heads, head_dim)], "num_attention_heads")


class OLMo2Attention(FlashLlamaAttention):
    def __init__(self, prefix: str, config: Any, weights: Weights, layer_id: int, biases: Biases) -> None:
        super().__init__(prefix, config, weights, layer_id, biases)
        eps, kv_heads = config.rms_norm_eps, config.num_key_value_heads
        self.q_norm = JointHeadNorm(f"{prefix}.q_norm", weights, config.num_attention_heads, self.head_dim, eps)
        self.k_norm = JointHeadNorm(f"{prefix}.k_norm", weights, kv_heads, self.head_dim, eps)
        self.targets = place_head_norms([self.q_norm.target, self.k_norm.target])

    def normalize_heads(self, qk: torch.Tensor) -> torch.Tensor:
        q, k = qk.split([self.num_heads, self.num_kv_heads], dim=1)
        return torch.cat([self.q_norm(q), self.k_norm(k)], dim=1)


class PostNormLayer(FlashLlamaLayer):
    """A layer that normalises what attention and feed-forward add, not what they read."""

    def load_norms(self, prefix: str, config: Any, weights: Weights) -> None:
        self.post_attention_layernorm = self.make_norm(f"{prefix}.post_attention_layernorm", config, weights)
        self.post_feedforward_layernorm = self.make_norm(f"{prefix}.post_feedforward_layernorm", config, weights)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rope: CosSin | None, ctx: PagedContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = x if residual is None else x + residual
        added = self.self_attn(residual, rope, ctx)
        residual = residual + self.post_attention_layernorm(added, None, ctx.adapter_data)[0]
        return self.post_feedforward_layernorm(self.mlp(residual, ctx), None, ctx.adapter_data)[0], residual


class OLMo2Layer(PostNormLayer):
    attention_class = OLMo2Attention

    @classmethod
    def make_norm(cls, name: str, config: Any, weights: Weights) -> nn.Module:
        return RMSNorm(name, weights, config.hidden_size, config.rms_norm_eps, wide=True)

    def biases(self, config: Any) -> Biases:
        return super().biases(config)._replace(mlp=False)


class OLMo2ForCausalLM(FlashLlamaForCausalLM):
    layer_class = OLMo2Layer


class Exaone4Layer(PostNormLayer):
    attention_class = FlashQwen3Attention

    @staticmethod
    def rope_kind(config: Any, layer_id: int) -> str | None:
        is_rotated = config.sliding_window is None or layer_window(config, layer_id) is not None
        return "all" if is_rotated else None

    def biases(self, config: Any) -> Biases:  # noqa: ARG002 - whatever the config says
        return Biases()


class Exaone4ForCausalLM(FlashLlamaForCausalLM):
    layer_class = Exaone4Layer
