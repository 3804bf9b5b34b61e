"""ModernBERT: norms before attention and MLP, RoPE, a gated MLP, and sliding windows on most layers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from lorax_server.errors import ConfigError
from lorax_server.layers.activation import get_activation
from lorax_server.layers.attention import PagedContext
from lorax_server.layers.norm import LayerNorm, ResidualLayerNorm
from lorax_server.models.custom_modeling.architecture import Architecture, BiasFlags, ModuleNames
from lorax_server.models.custom_modeling.encoder import CLASSIFIER, ClassifierHeads, EncoderAttention, HeadLayer
from lorax_server.models.custom_modeling.flash_llama_modeling import FlashLlamaLayer, FlashLlamaModel
from lorax_server.weights import Weights

MODULE_NAMES = ModuleNames(
    embedding="embeddings.tok_embeddings",
    input_norm="attn_norm",
    second_norm="mlp_norm",
    final_norm="final_norm",
    attention="attn",
    qkv=("Wqkv",),
    output="Wo",
    mlp=("mlp.Wi", "mlp.Wo"),
)


class ModernBertLayer(FlashLlamaLayer):
    def __init__(self, layer_id: int, *args: Any, **more: Any) -> None:
        self._is_first = layer_id == 0
        super().__init__(layer_id, *args, **more)

    def load_norms(self, names: ModuleNames, load: Callable[[str], nn.Module]) -> None:
        super().load_norms(names if not self._is_first else names._replace(input_norm="mlp_norm"), load)
        if self._is_first:  # its input is already normalized
            self.input_layernorm = IdentityNorm()


class IdentityNorm(nn.Module):
    def forward(self, x: torch.Tensor, residual: torch.Tensor | None, _: Any) -> tuple[torch.Tensor, torch.Tensor]:
        assert residual is None
        return x, x


class ModernBertModel(FlashLlamaModel):
    def __init__(self, prefix: str, config: Any, weights: Weights, *args: Any) -> None:
        super().__init__(prefix, config, weights, *args)
        name = f"{prefix}.embeddings.norm"
        self.embedding_norm = LayerNorm(name, weights, config.hidden_size, config.norm_eps, bias=config.norm_bias)

    def transform_embeddings(self, x: torch.Tensor, ctx: PagedContext) -> torch.Tensor:
        normed: torch.Tensor = self.embedding_norm(x, ctx.adapter_data)
        return normed


class ModernBertEncoder:
    @staticmethod
    def describe(config: Any) -> Architecture:
        half = config.local_attention // 2 + 1  # tokens on each side, including the query
        windows = [half if kind == "sliding_attention" else None for kind in config.layer_types]
        return Architecture(
            names=MODULE_NAMES,
            biases=BiasFlags(bool(config.attention_bias), bool(config.attention_bias), bool(config.mlp_bias)),
            attention_class=EncoderAttention,
            layer_class=ModernBertLayer,
            model_class=ModernBertModel,
            norm=partial(ResidualLayerNorm, eps=config.norm_eps, bias=config.norm_bias),
            num_kv_heads=config.num_attention_heads,
            windows=windows,
            rope_kinds=config.layer_types,
            activation=get_activation(config.hidden_activation, "hidden_activation"),
        )

    @staticmethod
    def describe_heads(config: Any) -> ClassifierHeads:
        if config.classifier_pooling not in ("cls", "mean"):
            raise ConfigError(f"config field classifier_pooling = {config.classifier_pooling!r} is not supported")
        activation, bias = config.classifier_activation, bool(config.classifier_bias)
        layers = HeadLayer("head.dense", activation, "head.norm", bias=bias), CLASSIFIER
        return ClassifierHeads(layers, layers, config.classifier_pooling)

    @staticmethod
    def max_tokens(config: Any) -> int:
        return int(config.max_position_embeddings)
