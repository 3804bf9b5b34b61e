"""GLM: interleaved partial RoPE, and a fused gate-up projection."""

from typing import Any

from lorax_server.models.custom_modeling.architecture import Architecture, BiasFlags, ModuleNames
from lorax_server.models.custom_modeling.flash_llama_modeling import FlashLlamaForCausalLM


class FlashGLMForCausalLM(FlashLlamaForCausalLM):
    @staticmethod
    def describe(config: Any) -> Architecture:
        return Architecture(
            names=ModuleNames(mlp=("mlp.gate_up_proj", "mlp.down_proj")),
            biases=BiasFlags(qkv=bool(config.attention_bias)),
            interleaved=True,
            partial_rotary=True,
        )
