"""Falcon 7B, 11B and 40B: attention parallel to the MLP, with one shared norm or two norms."""

from functools import partial
from typing import Any

from lorax_server.errors import ConfigError
from lorax_server.layers.activation import get_activation
from lorax_server.layers.norm import ResidualLayerNorm
from lorax_server.models.custom_modeling.architecture import Architecture, BiasFlags, ModuleNames
from lorax_server.models.custom_modeling.common import PlainMLP
from lorax_server.models.custom_modeling.flash_llama_modeling import FlashLlamaForCausalLM


class FlashFalconForCausalLM(FlashLlamaForCausalLM):
    @staticmethod
    def describe(config: Any) -> Architecture:
        if config.alibi:
            raise ConfigError("config field alibi = true is not supported: Falcon's ALiBi is rounded to bfloat16")
        is_new = config.new_decoder_architecture
        if is_new and not config.parallel_attn:
            raise ConfigError("config field parallel_attn = false is not supported with new_decoder_architecture")
        names = ModuleNames(
            model="transformer",
            embedding="word_embeddings",
            layers="h",
            final_norm="ln_f",
            attention="self_attention",
            qkv=("query_key_value",),
            output="dense",
            mlp=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        )
        has_two_norms = is_new and config.num_ln_in_parallel_attn != 1
        if has_two_norms:
            names = names._replace(input_norm="ln_attn", second_norm="ln_mlp")
        elif config.parallel_attn:
            names = names._replace(second_norm=None)
        is_multi_query = config.multi_query and not is_new
        bias = bool(config.bias)
        return Architecture(
            names=names,
            biases=BiasFlags(qkv=bias, output=bias, mlp=bias),
            mlp_class=PlainMLP,
            norm=partial(ResidualLayerNorm, eps=config.layer_norm_epsilon),
            is_parallel=has_two_norms,
            num_kv_heads=1 if is_multi_query else config.num_kv_heads or config.num_attention_heads,
            grouped_qkv=True,
            inner_size=config.ffn_hidden_size or 4 * config.hidden_size,
            activation=get_activation(config.activation, "activation"),
        )
