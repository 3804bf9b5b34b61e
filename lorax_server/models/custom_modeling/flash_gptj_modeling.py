"""GPT-J: interleaved partial RoPE, attention parallel to the MLP, and a bias on the LM head."""

from functools import partial
from typing import Any

from lorax_server.errors import ConfigError
from lorax_server.layers.activation import get_activation
from lorax_server.layers.norm import ResidualLayerNorm
from lorax_server.models.custom_modeling.architecture import Architecture, BiasFlags, ModuleNames
from lorax_server.models.custom_modeling.common import PlainMLP
from lorax_server.models.custom_modeling.flash_llama_modeling import FlashLlamaForCausalLM


class FlashGPTJForCausalLM(FlashLlamaForCausalLM):
    @staticmethod
    def describe(config: Any) -> Architecture:
        if not config.rotary_dim:
            raise ConfigError(f"config field rotary_dim = {config.rotary_dim!r} is not supported")
        names = ModuleNames(
            model="transformer",
            embedding="wte",
            layers="h",
            input_norm="ln_1",
            second_norm=None,
            final_norm="ln_f",
            attention="attn",
            output="out_proj",
            mlp=("mlp.fc_in", "mlp.fc_out"),
        )
        return Architecture(
            names=names,
            biases=BiasFlags(mlp=True),
            mlp_class=PlainMLP,
            norm=partial(ResidualLayerNorm, eps=config.layer_norm_epsilon),
            num_kv_heads=config.num_attention_heads,
            interleaved=True,
            rotary_dim=int(config.rotary_dim),
            inner_size=config.n_inner or 4 * config.hidden_size,
            activation=get_activation(config.activation_function, "activation_function"),
            head_bias=True,
        )
