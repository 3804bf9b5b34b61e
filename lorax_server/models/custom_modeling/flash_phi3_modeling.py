"""Phi-3 and Phi-4: Llama with fused QKV and gate-up projections."""

from typing import Any

from lorax_server.models.custom_modeling.architecture import Architecture, ModuleNames
from lorax_server.models.custom_modeling.flash_llama_modeling import FlashLlamaForCausalLM


class FlashPhi3ForCausalLM(FlashLlamaForCausalLM):
    @staticmethod
    def describe(config: Any) -> Architecture:
        return Architecture(
            names=ModuleNames(qkv=("qkv_proj",), mlp=("mlp.gate_up_proj", "mlp.down_proj")),
            windows=[config.sliding_window] * config.num_hidden_layers,
            partial_rotary=True,
        )
