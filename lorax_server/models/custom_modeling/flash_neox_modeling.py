"""GPT-NeoX: partial RoPE, and attention parallel to the MLP, with separate norms."""

from functools import partial
from typing import Any

from lorax_server.layers.norm import ResidualLayerNorm
from lorax_server.models.custom_modeling.architecture import Architecture, BiasFlags, ModuleNames
from lorax_server.models.custom_modeling.common import PlainMLP
from lorax_server.models.custom_modeling.flash_llama_modeling import FlashLlamaForCausalLM


class FlashGPTNeoXForCausalLM(FlashLlamaForCausalLM):
    @staticmethod
    def describe(config: Any) -> Architecture:
        names = ModuleNames(
            model="gpt_neox",
            embedding="embed_in",
            final_norm="final_layer_norm",
            attention="attention",
            qkv=("query_key_value",),
            output="dense",
            mlp=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        )
        bias = bool(getattr(config, "attention_bias", True))
        return Architecture(
            names=names,
            biases=BiasFlags(qkv=bias, output=bias, mlp=True),
            mlp_class=PlainMLP,
            norm=partial(ResidualLayerNorm, eps=config.layer_norm_eps),
            is_parallel=config.use_parallel_residual,
            num_kv_heads=config.num_attention_heads,
            grouped_qkv=True,
            partial_rotary=True,
        )
