"""DeepSeek-V2, DeepSeek-V3 and GLM-4.7-Flash: multi-head latent attention, and experts with shared experts.

The KV cache stores one vector per token and layer, which all heads share: the rotated part of the key, followed by the
latent from which the rest of the keys, and the values, would be computed (`layers/latent.py`).
"""

import logging
import math
from typing import Any

import torch
from torch import nn

from lorax_server.distributed import Shard, make_full_shard, shard_units
from lorax_server.errors import ConfigError
from lorax_server.kernels import CosSin, RouterSpec
from lorax_server.kernels.device import is_host
from lorax_server.kernels.select import ReferenceAttentionOps
from lorax_server.layers.attention import PagedContext
from lorax_server.layers.latent import LatentProjection
from lorax_server.layers.linear import TensorParallelAdapterRowLinear, TensorParallelMultiAdapterLinear
from lorax_server.layers.norm import RMSNorm
from lorax_server.layers.rotary import rope_parameters
from lorax_server.layers.targets import collect_adapter_targets
from lorax_server.models.custom_modeling.architecture import Architecture, BiasFlags, Mixture
from lorax_server.models.custom_modeling.flash_llama_modeling import (
    FlashLlamaForCausalLM,
    LayerFactory,
)
from lorax_server.models.custom_modeling.paged import kv_is_quantized, load_attention_spec
from lorax_server.weights import Weights

logger = logging.getLogger(__name__)


class LatentAttention(nn.Module):
    """Multi-head latent attention (MLA). It runs as multi-query attention over the latents."""

    def __init__(self, prefix: str, config: Any, weights: Weights, layer_id: int, arch: Architecture) -> None:
        super().__init__()
        self.layer_id = layer_id
        group, hidden = weights.process_group, config.hidden_size
        latent, rotated, rest = config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim
        self.latent_size, self.rotated_size, self.head_dim = latent, rotated, rotated + rest
        has_bias = arch.biases.qkv

        def shard_heads(size: int) -> Shard:
            return shard_units(group, [(config.num_attention_heads, size)], "num_attention_heads")

        queries = shard_heads(self.head_dim)
        self.num_heads = queries.size // self.head_dim
        queries = _move_rotated_part(queries, self.head_dim, rotated, is_interleaved=arch.interleaved)
        keys = make_full_shard(latent + rotated)
        keys = _move_rotated_part(keys, latent + rotated, rotated, is_interleaved=arch.interleaved)
        self.q_a_proj: TensorParallelMultiAdapterLinear | None = None
        rank = config.q_lora_rank
        if rank is not None:
            self.q_a_proj = TensorParallelMultiAdapterLinear(
                weights, [f"{prefix}.q_a_proj"], hidden, [make_full_shard(rank)], bias=has_bias
            )
            self.q_a_layernorm = RMSNorm(f"{prefix}.q_a_layernorm", weights, rank)
        name = "q_proj" if rank is None else "q_b_proj"
        self.q_proj = TensorParallelMultiAdapterLinear(
            weights, [f"{prefix}.{name}"], hidden if rank is None else rank, [queries], bias=False
        )
        self.kv_a_proj = TensorParallelMultiAdapterLinear(
            weights, [f"{prefix}.kv_a_proj_with_mqa"], hidden, [keys], bias=has_bias
        )
        self.kv_a_layernorm = RMSNorm(f"{prefix}.kv_a_layernorm", weights, latent)
        outputs = shard_heads(rest + config.v_head_dim)
        self.kv_b_proj = LatentProjection(weights, f"{prefix}.kv_b_proj", latent, outputs, rest, self.num_heads)
        self.o_proj = TensorParallelAdapterRowLinear(
            weights, f"{prefix}.o_proj", shard_heads(config.v_head_dim), hidden, bias=arch.biases.output
        )
        assert arch.scale is not None
        self.spec = load_attention_spec(weights, config, prefix, arch.scale)

    def find_query_targets(self) -> set[str]:
        """Return the names of targets that change queries or attention outputs, but not the cached latents."""
        modules = [self.q_proj, self.kv_b_proj]
        if self.q_a_proj is not None:
            modules += [self.q_a_proj, self.q_a_layernorm]
        return {name for module in modules for name in collect_adapter_targets(module)}

    def forward(self, x: torch.Tensor, rope: CosSin | None, ctx: PagedContext) -> torch.Tensor:
        data, rotated = ctx.adapter_data, self.rotated_size
        latents = self.kv_a_proj(x, data)
        normed = self.kv_a_layernorm(latents[:, rotated:], None, data)[0]
        keys = torch.cat([latents[:, :rotated], normed], dim=1).unsqueeze(1)
        if self.q_a_proj is not None:
            x = self.q_a_layernorm(self.q_a_proj(x, data), None, data)[0]
        queries = self.q_proj(x, data).view(len(x), self.num_heads, self.head_dim)
        projected = self.kv_b_proj.project_queries(queries[..., rotated:], data)
        parts = [part for head, rest in enumerate(projected) for part in (queries[:, head, :rotated], rest)]
        queries = torch.cat(parts, dim=1).view(len(x), self.num_heads, -1)
        attended = ctx.attend(self.layer_id, queries, keys, keys, self.spec, rope)
        attended = attended.view(len(x), self.num_heads, -1)[..., rotated:]
        out: torch.Tensor = self.o_proj(self.kv_b_proj.project_outputs(attended, data), data)
        return out


class _FlashLatentForCausalLM(FlashLlamaForCausalLM):
    def __init__(self, prefix: str, config: Any, weights: Weights, create_layer_fn: LayerFactory | None = None) -> None:
        super().__init__(prefix, config, weights, create_layer_fn)
        projections = [module for module in self.modules() if isinstance(module, LatentProjection)]
        self.unrecorded_targets = tuple(target for projection in projections for target in projection.targets)
        if not is_host(self.device):
            logger.warning("%s: attention uses the slow torch ops on GPUs, without CUDA graphs", config.model_type)
            self.ops = ReferenceAttentionOps(self.ops)


class FlashDeepseekV2ForCausalLM(_FlashLatentForCausalLM):
    @staticmethod
    def describe(config: Any) -> Architecture:
        _require(config, "topk_method", "greedy", "group_limited_greedy")
        _require(config, "scoring_func", "softmax")
        _require(config, "norm_topk_prob", False)
        has_groups = config.topk_method == "group_limited_greedy"
        router_spec = RouterSpec(
            normalize=False,
            groups=config.n_group if has_groups else 1,
            top_groups=config.topk_group if has_groups else 1,
            scale=config.routed_scaling_factor,
        )
        is_sparse = _find_sparse_layers(config)
        return _describe(config, router_spec, is_sparse, has_mlp_bias=bool(config.mlp_bias), is_interleaved=True)


class FlashDeepseekV3ForCausalLM(_FlashLatentForCausalLM):
    @staticmethod
    def describe(config: Any) -> Architecture:
        return _describe_v3(config, _find_sparse_layers(config))


class FlashGLM4MoeLiteForCausalLM(_FlashLatentForCausalLM):
    """GLM-4.7-Flash: DeepSeek-V3 with a list of layer types."""

    @staticmethod
    def describe(config: Any) -> Architecture:
        return _describe_v3(config, [kind == "sparse" for kind in config.mlp_layer_types])


def _describe_v3(config: Any, is_sparse: list[bool]) -> Architecture:
    _require(config, "topk_method", "noaux_tc")
    _require(config, "scoring_func", "sigmoid")
    router_spec = RouterSpec(
        scoring="sigmoid",
        groups=config.n_group,
        top_groups=config.topk_group,
        normalize=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
    )
    return _describe(
        config,
        router_spec,
        is_sparse,
        router_bias="e_score_correction_bias",
        is_interleaved=bool(config.rope_interleave),
    )


def _find_sparse_layers(config: Any) -> list[bool]:
    _require(config, "moe_layer_freq", 1)
    return [layer >= config.first_k_dense_replace for layer in range(config.num_hidden_layers)]


def _describe(
    config: Any,
    router_spec: RouterSpec,
    is_sparse: list[bool],
    *,
    is_interleaved: bool,
    router_bias: str | None = None,
    has_mlp_bias: bool = False,
) -> Architecture:
    _require(config, "num_key_value_heads", config.num_attention_heads)
    if kv_is_quantized(config):
        raise ConfigError(f"quantize = fp8-kv is not supported for {config.model_type}: latents are not quantized")
    has_bias = bool(config.attention_bias)
    return Architecture(
        biases=BiasFlags(qkv=has_bias, output=has_bias, mlp=has_mlp_bias),
        attention_class=LatentAttention,
        num_kv_heads=1,
        kv_head_dim=config.kv_lora_rank + config.qk_rope_head_dim,
        shares_kv=True,
        interleaved=is_interleaved,
        rotary_dim=config.qk_rope_head_dim,
        scale=_compute_scale(config),
        mixture=Mixture(
            num_experts=config.n_routed_experts,
            top_k=config.num_experts_per_tok,
            inner_size=config.moe_intermediate_size,
            router_spec=router_spec,
            router_bias=router_bias,
            is_sparse=is_sparse,
            shared="shared_experts",
            shared_size=config.moe_intermediate_size * (config.n_shared_experts or 0),
        ),
    )


def _require(config: Any, field: str, *supported: Any) -> None:
    """Raise ConfigError if a config field is set to an unsupported value."""
    value = getattr(config, field, None)
    if value is not None and value not in supported:
        raise ConfigError(f"config field {field} = {value!r} is not supported; use {' or '.join(map(repr, supported))}")


def _compute_scale(config: Any) -> float:
    """Return the attention scale. With YaRN, it depends on `mscale_all_dim`."""
    scale: float = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    parameters = rope_parameters(config)
    weight = parameters.get("mscale_all_dim")
    if not weight or (parameters.get("rope_type") or parameters.get("type") or "default") == "default":
        return scale
    factor = parameters.get("factor") or 1.0
    return scale * (1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0) ** 2


def _move_rotated_part(shard: Shard, size: int, rotated: int, *, is_interleaved: bool) -> Shard:
    """Return the shard with the rotated last elements of each vector moved to the front, as the kernels expect."""
    ranges = []
    for start, stop in shard.ranges:
        for first in range(start, stop, size):
            ranges += [(first + size - rotated, first + size), (first, first + size - rotated)]
    return Shard(shard.full, tuple(ranges), (size, rotated) if is_interleaved else None)
