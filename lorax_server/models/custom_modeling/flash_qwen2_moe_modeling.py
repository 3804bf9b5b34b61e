"""Qwen2-MoE: Qwen2 with a mixture of experts and a shared expert."""

from typing import Any

from lorax_server.kernels import RouterSpec
from lorax_server.models.custom_modeling.architecture import Architecture, BiasFlags, Mixture
from lorax_server.models.custom_modeling.common import find_sparse_layers, layer_windows
from lorax_server.models.custom_modeling.flash_llama_modeling import FlashLlamaForCausalLM


class FlashQwen2MoeForCausalLM(FlashLlamaForCausalLM):
    @staticmethod
    def describe(config: Any) -> Architecture:
        return Architecture(
            biases=BiasFlags(qkv=bool(config.qkv_bias)),
            windows=layer_windows(config),
            mixture=Mixture(
                num_experts=config.num_experts,
                inner_size=config.moe_intermediate_size,
                top_k=config.num_experts_per_tok,
                router_spec=RouterSpec(normalize=config.norm_topk_prob),
                is_sparse=find_sparse_layers(config),
                shared="shared_expert",
                shared_size=config.shared_expert_intermediate_size,
                shared_gate="shared_expert_gate",
            ),
        )
