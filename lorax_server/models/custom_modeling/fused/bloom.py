"""BLOOM: ALiBi, a norm after the embedding, a bias on all matrices."""

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
from lorax_server.models.custom_modeling.fused.attention import AlibiAttention, GroupedAttention
from lorax_server.weights import Weights


class BloomAttention(AlibiAttention, GroupedAttention):
    """Both of them."""


class BloomMLP(PlainMLP):
    first, second = "dense_h_to_4h", "dense_4h_to_h"

    def inner_size(self, config: Any) -> int:
        return 4 * int(config.hidden_size)

    def load_activation(self, config: Any) -> Activation:  # noqa: ARG002 - whatever the config says
        return get_activation("gelu_pytorch_tanh", "activation")


class BloomLayer(FlashLlamaLayer):
    names = Names("transformer", "word_embeddings", "h", "self_attention", "mlp", "input_layernorm", "ln_f")
    attention_class = BloomAttention
    mlp_class = BloomMLP
    rotates = False
    layer_norms = LayerNorms("layer_norm_epsilon")

    def biases(self, config: Any) -> Biases:  # noqa: ARG002 - whatever the config says
        return Biases(qkv=True, output=True, mlp=True)


class BloomModel(FlashLlamaModel):
    """The decoder with a norm between the embedding and the layers."""

    def __init__(self, prefix: str, config: Any, weights: Weights, *layers: Any) -> None:
        super().__init__(prefix, config, weights, *layers)
        self.embedding_norm = BloomLayer.make_norm(f"{prefix}.word_embeddings_layernorm", config, weights)

    def embed(self, input_ids: torch.Tensor, ctx: PagedContext) -> torch.Tensor:
        normed: torch.Tensor = self.embedding_norm(super().embed(input_ids, ctx), None, ctx.adapter_data)[0]
        return normed


class BloomForCausalLM(FlashLlamaForCausalLM):
    layer_class = BloomLayer
    model_class = BloomModel

    def check(self, config: Any) -> None:
        for field in ("apply_residual_connection_post_layernorm", "slow_but_exact"):
            if getattr(config, field, False):
                raise ConfigError(f"config field {field} = true is not supported")
