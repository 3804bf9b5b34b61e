"""GLM-4-MoE (GLM-4.5 and later): partial RoPE, shared experts, and a sigmoid router with groups of experts."""

from typing import Any

from lorax_server.kernels import RouterSpec
from lorax_server.models.custom_modeling.architecture import Architecture, BiasFlags, Mixture
from lorax_server.models.custom_modeling.common import SharedHeadNormAttention
from lorax_server.models.custom_modeling.flash_llama_modeling import FlashLlamaForCausalLM


class FlashGLM4MoeForCausalLM(FlashLlamaForCausalLM):
    @staticmethod
    def describe(config: Any) -> Architecture:
        router_spec = RouterSpec(
            scoring="sigmoid",
            groups=config.n_group,
            top_groups=config.topk_group,
            normalize=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
        )
        return Architecture(
            biases=BiasFlags(qkv=bool(config.attention_bias)),
            attention_class=SharedHeadNormAttention if config.use_qk_norm else None,
            partial_rotary=True,
            mixture=Mixture(
                num_experts=config.n_routed_experts,
                top_k=config.num_experts_per_tok,
                inner_size=config.moe_intermediate_size,
                router_spec=router_spec,
                router_bias="e_score_correction_bias",
                is_sparse=[layer >= config.first_k_dense_replace for layer in range(config.num_hidden_layers)],
                shared="shared_experts",
                shared_size=config.moe_intermediate_size * config.n_shared_experts,
            ),
        )
