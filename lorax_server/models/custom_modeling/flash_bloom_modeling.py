"""BLOOM: ALiBi, a norm after the embedding, and biases in all layers."""

from functools import partial
from typing import Any

import torch

from lorax_server.errors import ConfigError
from lorax_server.layers.activation import get_activation
from lorax_server.layers.attention import PagedContext
from lorax_server.layers.norm import ResidualLayerNorm
from lorax_server.models.custom_modeling.architecture import Architecture, BiasFlags, ModuleNames
from lorax_server.models.custom_modeling.common import PlainMLP, alibi_slopes
from lorax_server.models.custom_modeling.flash_llama_modeling import (
    FlashLlamaForCausalLM,
    FlashLlamaModel,
    LayerFactory,
)
from lorax_server.weights import Weights


class BloomModel(FlashLlamaModel):
    def __init__(
        self, prefix: str, config: Any, weights: Weights, create_layer_fn: LayerFactory, arch: Architecture
    ) -> None:
        super().__init__(prefix, config, weights, create_layer_fn, arch)
        self.embedding_norm = arch.load_norm(prefix, "word_embeddings_layernorm", config, weights)

    def transform_embeddings(self, x: torch.Tensor, ctx: PagedContext) -> torch.Tensor:
        normed: torch.Tensor = self.embedding_norm(x, None, ctx.adapter_data)[0]
        return normed


class FlashBloomForCausalLM(FlashLlamaForCausalLM):
    @staticmethod
    def describe(config: Any) -> Architecture:
        for field in ("apply_residual_connection_post_layernorm", "slow_but_exact"):
            if getattr(config, field, False):
                raise ConfigError(f"config field {field} = true is not supported")
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
        return Architecture(
            names=names,
            biases=BiasFlags(qkv=True, output=True, mlp=True),
            mlp_class=PlainMLP,
            model_class=BloomModel,
            norm=partial(ResidualLayerNorm, eps=config.layer_norm_epsilon),
            num_kv_heads=config.num_attention_heads,
            grouped_qkv=True,
            slopes=alibi_slopes(config.num_attention_heads),
            uses_rope=False,
            inner_size=4 * config.hidden_size,
            activation=get_activation("gelu_pytorch_tanh", "activation"),
        )
