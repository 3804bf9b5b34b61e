"""GPT-BigCode (StarCoder, SantaCoder): GPT-2 with multi-query attention."""

from dataclasses import replace
from typing import Any

from lorax_server.models.custom_modeling.architecture import Architecture
from lorax_server.models.custom_modeling.flash_gpt2_modeling import describe_gpt2
from lorax_server.models.custom_modeling.flash_llama_modeling import FlashLlamaForCausalLM


class FlashGPTBigCodeForCausalLM(FlashLlamaForCausalLM):
    @staticmethod
    def describe(config: Any) -> Architecture:
        gpt2 = describe_gpt2(config)
        return replace(
            gpt2,
            num_kv_heads=1 if config.multi_query else config.num_attention_heads,
            grouped_qkv=True,
            fan_in_fan_out=False,
        )
