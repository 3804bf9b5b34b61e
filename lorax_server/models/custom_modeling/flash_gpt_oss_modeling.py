"""gpt-oss: a mixture of experts with biases and a clamped activation, and attention with sinks."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lorax_server.distributed import Shard
from lorax_server.kernels import Activation, ExpertMatrices, RouterSpec
from lorax_server.layers.norm import RMSNorm
from lorax_server.models.custom_modeling.architecture import Architecture, BiasFlags, Mixture
from lorax_server.models.custom_modeling.common import layer_windows
from lorax_server.models.custom_modeling.flash_llama_modeling import FlashLlamaAttention, FlashLlamaForCausalLM
from lorax_server.weights import Weights
from lorax_server.weights.mxfp4 import BLOCK_SIZE, dequantize_mxfp4


class SinkAttention(FlashLlamaAttention):
    """Attention whose softmax includes a learned score for each head."""

    def __init__(self, prefix: str, config: Any, weights: Weights, layer_id: int, arch: Architecture) -> None:
        super().__init__(prefix, config, weights, layer_id, arch)
        shard = Shard(config.num_attention_heads, ((self.heads.start, self.heads.stop),))
        sinks = weights.get_sharded(f"{prefix}.sinks", 0, shard, (shard.full,))
        self.spec = replace(self.spec, sinks=sinks.float().contiguous())


class FlashGPTOSSForCausalLM(FlashLlamaForCausalLM):
    @staticmethod
    def describe(config: Any) -> Architecture:
        has_bias, alpha, limit = bool(config.attention_bias), float(config.swiglu_alpha), float(config.swiglu_limit)
        swish, shift = partial(_clamped_swish, alpha=alpha, limit=limit), partial(_clamped_shift, limit=limit)
        activation = Activation("clamped_swiglu", swish, shift, (alpha, limit))
        return Architecture(
            biases=BiasFlags(qkv=has_bias, output=has_bias),
            attention_class=SinkAttention,
            norm=partial(RMSNorm, eps=config.rms_norm_eps, upcast=True),
            windows=layer_windows(config),
            activation=activation,
            mixture=Mixture(
                num_experts=config.num_local_experts,
                top_k=config.num_experts_per_tok,
                inner_size=config.intermediate_size,
                size_field="intermediate_size",
                router_spec=RouterSpec(normalize=True),
                router="router",
                has_router_bias=True,
                load=_load_experts,
            ),
        )


def _clamped_swish(gate: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(gate * alpha)


def _clamped_shift(up: torch.Tensor, limit: float) -> torch.Tensor:
    return up.clamp(-limit, limit) + 1


def _load_experts(
    weights: Weights, prefix: str, num_experts: int, hidden: Shard, inner: Shard
) -> Iterator[ExpertMatrices]:
    """Load experts whose gate and up outputs alternate, from tensors `[experts, inputs, outputs]` or from MXFP4."""
    is_first_rank = weights.process_group.rank() == 0
    for expert in range(num_experts):
        gate_up = _load_matrix(weights, f"{prefix}.gate_up_proj", expert, 2 * inner.full, hidden.full)
        down = _load_matrix(weights, f"{prefix}.down_proj", expert, hidden.full, inner.full)
        bias = weights.get_expert(f"{prefix}.gate_up_proj_bias", expert, (2 * inner.full,))
        down_bias = weights.get_expert(f"{prefix}.down_proj_bias", expert, (hidden.full,))
        yield ExpertMatrices(
            weights.convert_matrix(_separate_gate_and_up(gate_up, inner)),
            weights.convert_matrix(inner.select(down, dim=1).contiguous()),
            weights.convert(_separate_gate_and_up(bias, inner)),
            weights.convert(down_bias if is_first_rank else torch.zeros_like(down_bias)),
        )


def _separate_gate_and_up(x: torch.Tensor, inner: Shard) -> torch.Tensor:
    """Return this rank's outputs of the gate matrix, followed by its outputs of the up matrix."""
    return torch.cat([inner.select(x[0::2], dim=0), inner.select(x[1::2], dim=0)])


def _load_matrix(weights: Weights, name: str, expert: int, outputs: int, inputs: int) -> torch.Tensor:
    """Return one expert's matrix `[outputs, inputs]`."""
    if weights.has(f"{name}_blocks"):
        blocks = weights.get_expert(f"{name}_blocks", expert, (outputs, inputs // BLOCK_SIZE, BLOCK_SIZE // 2))
        return dequantize_mxfp4(blocks, weights.get_expert(f"{name}_scales", expert, (outputs, inputs // BLOCK_SIZE)))
    return weights.get_expert(name, expert, (inputs, outputs)).t()
