"""GPT-J: neighbours in a head turn together, attention beside the feed-forward, a bias on the head."""

from typing import Any

from lorax_server.errors import ConfigError
from lorax_server.kernels import Activation
from lorax_server.layers.activation import get_activation
from lorax_server.models.custom_modeling.flash_llama_modeling import (
    Biases,
    FlashLlamaAttention,
    FlashLlamaForCausalLM,
    FlashLlamaLayer,
    LayerNorms,
    Names,
    PlainMLP,
)


class GPTJAttention(FlashLlamaAttention):
    output_name = "out_proj"
    interleaved = True

    @staticmethod
    def count_kv_heads(config: Any) -> int:
        return int(config.num_attention_heads)

    @staticmethod
    def turned_dims(config: Any) -> int:
        if not config.rotary_dim:
            raise ConfigError(f"config field rotary_dim = {config.rotary_dim!r} is not supported")
        return int(config.rotary_dim)


class GPTJMLP(PlainMLP):
    first, second = "fc_in", "fc_out"

    def inner_size(self, config: Any) -> int:
        return int(config.n_inner or 4 * config.hidden_size)

    def load_activation(self, config: Any) -> Activation:
        return get_activation(config.activation_function, "activation_function")


class GPTJLayer(FlashLlamaLayer):
    names = Names("transformer", "wte", "h", "attn", "mlp", "ln_1", "ln_f")
    attention_class = GPTJAttention
    mlp_class = GPTJMLP
    is_parallel = True
    layer_norms = LayerNorms("layer_norm_epsilon")

    def biases(self, config: Any) -> Biases:  # noqa: ARG002 - whatever the config says
        return Biases(mlp=True)


class GPTJForCausalLM(FlashLlamaForCausalLM):
    layer_class = GPTJLayer
    head_bias = True
