"""Mixtral: Mistral with a mixture of experts."""

from dataclasses import replace
from typing import Any

from lorax_server.kernels import RouterSpec
from lorax_server.models.custom_modeling.architecture import Architecture, Mixture
from lorax_server.models.custom_modeling.flash_mistral_modeling import FlashMistralForCausalLM


class FlashMixtralForCausalLM(FlashMistralForCausalLM):
    @staticmethod
    def describe(config: Any) -> Architecture:
        mixture = Mixture(
            num_experts=config.num_local_experts,
            inner_size=config.intermediate_size,
            size_field="intermediate_size",
            top_k=config.num_experts_per_tok,
            router_spec=RouterSpec(normalize=True),
            matrices=("w1", "w3", "w2"),
        )
        return replace(FlashMistralForCausalLM.describe(config), mixture=mixture)
