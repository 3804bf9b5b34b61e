"""GPT-BigCode (StarCoder): GPT-2 whose heads share one key and value."""

from typing import Any

import torch

from lorax_server.errors import ConfigError
from lorax_server.kernels import Activation
from lorax_server.layers.activation import get_activation
from lorax_server.layers.attention import PagedContext
from lorax_server.models.custom_modeling.flash_llama_modeling import (
    Biases,
    FlashLlamaForCausalLM,
    FlashLlamaLayer,
    FlashLlamaModel,
    LayerNorms,
    Names,
    PlainMLP,
)
from lorax_server.models.custom_modeling.fused.attention import GroupedAttention
from lorax_server.models.custom_modeling.paged import check_positions
from lorax_server.weights import Weights


class BigCodeAttention(GroupedAttention):
    qkv_name = "c_attn"
    output_name = "c_proj"

    @staticmethod
    def count_kv_heads(config: Any) -> int:
        return 1 if config.multi_query else int(config.num_attention_heads)

    def scale(self, config: Any) -> float:
        return super().scale(config) if config.scale_attn_weights else 1.0


class BigCodeMLP(PlainMLP):
    first, second = "c_fc", "c_proj"

    def inner_size(self, config: Any) -> int:
        return int(config.n_inner or 4 * config.hidden_size)

    def load_activation(self, config: Any) -> Activation:
        return get_activation(config.activation_function, "activation_function")


class BigCodeLayer(FlashLlamaLayer):
    names = Names("transformer", "wte", "h", "attn", "mlp", "ln_1", "ln_f", "ln_2")
    attention_class = BigCodeAttention
    mlp_class = BigCodeMLP
    rotates = False
    layer_norms = LayerNorms("layer_norm_epsilon")

    def biases(self, config: Any) -> Biases:  # noqa: ARG002 - whatever the config says
        return Biases(qkv=True, output=True, mlp=True)


class BigCodeModel(FlashLlamaModel):
    """The decoder with learned positions."""

    def __init__(self, prefix: str, config: Any, weights: Weights, *layers: Any) -> None:
        super().__init__(prefix, config, weights, *layers)
        self.wpe = weights.get_tensor(f"{prefix}.wpe.weight", (config.n_positions, config.hidden_size))

    def embed(self, input_ids: torch.Tensor, ctx: PagedContext) -> torch.Tensor:
        check_positions(ctx, len(self.wpe))
        return super().embed(input_ids, ctx) + self.wpe[ctx.position_ids]


class BigCodeForCausalLM(FlashLlamaForCausalLM):
    layer_class = BigCodeLayer
    model_class = BigCodeModel

    def check(self, config: Any) -> None:
        if config.add_cross_attention:
            raise ConfigError("config field add_cross_attention = true is not supported: there is no encoder")
