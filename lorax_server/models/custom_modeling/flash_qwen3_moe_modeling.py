"""Qwen3-MoE: Qwen3 with a mixture of experts."""

from typing import Any

from lorax_server.kernels import RouterSpec
from lorax_server.models.custom_modeling.architecture import Architecture, Mixture, read_biases
from lorax_server.models.custom_modeling.common import SharedHeadNormAttention, find_sparse_layers
from lorax_server.models.custom_modeling.flash_llama_modeling import FlashLlamaForCausalLM


class FlashQwen3MoeForCausalLM(FlashLlamaForCausalLM):
    @staticmethod
    def describe(config: Any) -> Architecture:
        window = config.sliding_window if config.use_sliding_window else None
        return Architecture(
            biases=read_biases(config)._replace(mlp=False),
            attention_class=SharedHeadNormAttention,
            windows=[window] * config.num_hidden_layers,
            mixture=Mixture(
                num_experts=config.num_experts,
                inner_size=config.moe_intermediate_size,
                top_k=config.num_experts_per_tok,
                router_spec=RouterSpec(normalize=config.norm_topk_prob),
                is_sparse=find_sparse_layers(config),
            ),
        )
