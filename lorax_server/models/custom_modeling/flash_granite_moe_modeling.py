"""Granite-MoE: Granite 3 with a mixture of experts."""

from dataclasses import replace
from typing import Any

from lorax_server.kernels import RouterSpec
from lorax_server.models.custom_modeling.architecture import Architecture, Mixture
from lorax_server.models.custom_modeling.flash_granite_modeling import FlashGraniteForCausalLM


class FlashGraniteMoeForCausalLM(FlashGraniteForCausalLM):
    @staticmethod
    def describe(config: Any) -> Architecture:
        mixture = Mixture(
            num_experts=config.num_local_experts,
            inner_size=config.intermediate_size,
            size_field="intermediate_size",
            top_k=config.num_experts_per_tok,
            router_spec=RouterSpec(normalize=True),
            module="block_sparse_moe",
            router="router",
        )
        return replace(FlashGraniteForCausalLM.describe(config), mixture=mixture)
