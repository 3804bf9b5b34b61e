"""OLMoE: Llama with a mixture of experts, and norms over all query heads and all key heads."""

from typing import Any

from lorax_server.errors import ConfigError
from lorax_server.kernels import RouterSpec
from lorax_server.models.custom_modeling.architecture import Architecture, Mixture, read_biases
from lorax_server.models.custom_modeling.flash_llama_modeling import FlashLlamaForCausalLM
from lorax_server.models.custom_modeling.flash_olmo2_modeling import OLMo2Attention


class FlashOLMoEForCausalLM(FlashLlamaForCausalLM):
    @staticmethod
    def describe(config: Any) -> Architecture:
        if config.clip_qkv is not None:
            raise ConfigError(f"config field clip_qkv = {config.clip_qkv} is not supported; only null is")
        return Architecture(
            biases=read_biases(config)._replace(mlp=False),
            attention_class=OLMo2Attention,
            mixture=Mixture(
                num_experts=config.num_experts,
                inner_size=config.intermediate_size,
                size_field="intermediate_size",
                top_k=config.num_experts_per_tok,
                router_spec=RouterSpec(normalize=config.norm_topk_prob),
            ),
        )
