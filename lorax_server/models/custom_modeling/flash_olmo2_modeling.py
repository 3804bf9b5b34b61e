"""OLMo 2: Llama with norms after attention and MLP, and norms over all query heads and all key heads."""

from functools import partial
from typing import Any

import torch
from torch import nn

from lorax_server.adapters.target import AdapterTarget, TargetKind
from lorax_server.distributed import make_full_shard, shard_kv_heads
from lorax_server.layers.norm import RMSNorm, concat_head_norm_targets
from lorax_server.models.custom_modeling.architecture import Architecture, read_biases
from lorax_server.models.custom_modeling.common import PostNormLayer
from lorax_server.models.custom_modeling.flash_llama_modeling import FlashLlamaAttention, FlashLlamaForCausalLM
from lorax_server.weights import Weights


class JointHeadNorm(nn.Module):
    """RMSNorm over all heads jointly. Heads are sharded over ranks, so the sums of squares are all-reduced."""

    def __init__(self, name: str, weights: Weights, num_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        group, size = weights.process_group, num_heads * head_dim
        shard = shard_kv_heads(group, num_heads, head_dim)
        self.weight = weights.get_sharded(f"{name}.weight", 0, shard, (size,)).float()
        self.target = AdapterTarget(name, TargetKind.NORM, make_full_shard(size), shard, slice(0), self.weight, None)
        self.eps = torch.tensor(eps, device=weights.device)
        self.group, self.ops = group, weights.ops
        self.count = max(size, shard.size * group.size())  # replicated key heads are counted once per rank

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        flat = heads.flatten(1)
        if self.group.size() == 1:
            return self.ops.rms_norm(flat, None, self.weight, self.eps)[0].view(heads.shape)
        wide = flat.float()
        squares = self.group.all_reduce(wide.square().sum(1, keepdim=True))
        normed = wide * (squares / self.count + self.eps).rsqrt() * self.weight
        return normed.to(heads.dtype).view(heads.shape)


class OLMo2Attention(FlashLlamaAttention):
    def load_head_norms(self, prefix: str, config: Any, weights: Weights) -> None:
        eps, counts = config.rms_norm_eps, (config.num_attention_heads, config.num_key_value_heads)
        q_norm, k_norm = (
            JointHeadNorm(f"{prefix}.{name}", weights, count, self.head_dim, eps)
            for name, count in zip(("q_norm", "k_norm"), counts, strict=True)
        )
        self.q_norm, self.k_norm = q_norm, k_norm
        self.targets = concat_head_norm_targets([q_norm.target, k_norm.target])


class FlashOLMo2ForCausalLM(FlashLlamaForCausalLM):
    @staticmethod
    def describe(config: Any) -> Architecture:
        return Architecture(
            biases=read_biases(config)._replace(mlp=False),
            attention_class=OLMo2Attention,
            layer_class=PostNormLayer,
            norm=partial(RMSNorm, eps=config.rms_norm_eps, upcast=True),
        )
