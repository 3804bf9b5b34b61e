"""Cohere: interleaved RoPE, attention parallel to the MLP, optional head norms, scaled logits."""

from dataclasses import replace
from functools import partial
from typing import Any

from lorax_server.adapters.target import AdapterTarget, TargetKind
from lorax_server.distributed import Shard, make_full_shard
from lorax_server.layers.logits import LogitTransform
from lorax_server.layers.norm import HeadNorm, ResidualLayerNorm, concat_head_norm_targets
from lorax_server.models.custom_modeling.architecture import Architecture, ModuleNames, read_biases
from lorax_server.models.custom_modeling.flash_llama_modeling import FlashLlamaAttention, FlashLlamaForCausalLM
from lorax_server.weights import Weights


class CohereAttention(FlashLlamaAttention):
    """Attention with query and key norms that have a separate weight per head."""

    def load_head_norms(self, prefix: str, config: Any, weights: Weights) -> None:
        if config.use_qk_norm:
            self.q_norm = self._load_head_norm(f"{prefix}.q_norm", config, weights, self.heads)
            self.k_norm = self._load_head_norm(f"{prefix}.k_norm", config, weights, self.kv_heads)

    def _load_head_norm(self, name: str, config: Any, weights: Weights, heads: range) -> HeadNorm:
        """Load a head norm and add its adapter target. Weights are reordered to the head layout of RoPE kernels."""
        size = self.head_dim
        count = config.num_attention_heads if heads is self.heads else config.num_key_value_heads
        shard = replace(make_full_shard(size), interleaved=(size, size))
        weight = weights.get_sharded(f"{name}.weight", 1, shard, (count, size))[heads.start : heads.stop]
        outputs = Shard(count * size, ((heads.start * size, heads.stop * size),), (size, size))
        target = AdapterTarget(
            name, TargetKind.NORM, make_full_shard(count * size), outputs, slice(0), weight.flatten(), None
        )
        self.targets = concat_head_norm_targets([*self.targets, replace(target, checkpoint_shape=(count, size))])
        return HeadNorm(weight, config.layer_norm_eps, weights)


class FlashCohereForCausalLM(FlashLlamaForCausalLM):
    @staticmethod
    def describe(config: Any) -> Architecture:
        return Architecture(
            names=ModuleNames(second_norm=None),
            biases=read_biases(config)._replace(mlp=False),
            attention_class=CohereAttention,
            norm=partial(ResidualLayerNorm, eps=config.layer_norm_eps, bias=False),
            interleaved=True,
            logit_transform=LogitTransform(float(config.logit_scale)),
        )
