"""BERT and related encoders: RoBERTa, XLM-RoBERTa, DistilBERT and MPNet."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lorax_server.layers.activation import get_activation
from lorax_server.layers.norm import ResidualLayerNorm
from lorax_server.models.custom_modeling.architecture import Architecture, BiasFlags, ModuleNames
from lorax_server.models.custom_modeling.common import PlainMLP
from lorax_server.models.custom_modeling.encoder import (
    CLASSIFIER,
    ClassifierHeads,
    EncoderAttention,
    EncoderLayer,
    EncoderModel,
    HeadLayer,
    PaddingAwareModel,
)
from lorax_server.models.custom_modeling.flash_llama_modeling import FlashLlamaLayer
from lorax_server.weights import Weights

MODULE_NAMES = ModuleNames(
    model="bert",
    embedding="embeddings.word_embeddings",
    layers="encoder.layer",
    added_norms=("attention.output.LayerNorm", "output.LayerNorm"),
    final_norm=None,
    attention="attention",
    qkv=("self.query", "self.key", "self.value"),
    output="output.dense",
    mlp=("intermediate.dense", "output.dense"),
)
MPNET_BUCKETS, MPNET_MAX_DISTANCE = 32, 128  # constants of the architecture


class BertEncoder:
    """The BERT encoder."""

    @staticmethod
    def describe(config: Any) -> Architecture:
        return Architecture(
            names=MODULE_NAMES,
            biases=BiasFlags(qkv=True, output=True, mlp=True),
            attention_class=EncoderAttention,
            mlp_class=PlainMLP,
            layer_class=EncoderLayer,
            model_class=EncoderModel,
            norm=partial(ResidualLayerNorm, eps=getattr(config, "layer_norm_eps", 1e-12)),
            num_kv_heads=config.num_attention_heads,
            uses_rope=False,
        )

    @staticmethod
    def describe_heads(config: Any) -> ClassifierHeads:  # noqa: ARG004 - other encoders read it
        return ClassifierHeads((HeadLayer("bert.pooler.dense", "tanh"), CLASSIFIER), (CLASSIFIER,))

    @staticmethod
    def max_tokens(config: Any) -> int:
        return int(config.max_position_embeddings)


class RobertaEncoder(BertEncoder):
    """RoBERTa and XLM-RoBERTa: BERT with other position numbers and another classification head."""

    @staticmethod
    def describe(config: Any) -> Architecture:
        arch = BertEncoder.describe(config)
        return replace(arch, names=MODULE_NAMES._replace(model="roberta"), model_class=PaddingAwareModel)

    @staticmethod
    def describe_heads(config: Any) -> ClassifierHeads:  # noqa: ARG004
        layers = HeadLayer("classifier.dense", "tanh"), HeadLayer("classifier.out_proj", is_final=True)
        return ClassifierHeads(layers, (CLASSIFIER,))

    @staticmethod
    def max_tokens(config: Any) -> int:
        return int(config.max_position_embeddings) - int(config.pad_token_id) - 1


class DistilBertModel(EncoderModel):
    has_token_types = False


class DistilBertEncoder(BertEncoder):
    """DistilBERT: BERT without token types, and with other module names."""

    @staticmethod
    def describe(config: Any) -> Architecture:
        names = MODULE_NAMES._replace(
            model="distilbert",
            layers="transformer.layer",
            added_norms=("sa_layer_norm", "output_layer_norm"),
            qkv=("q_lin", "k_lin", "v_lin"),
            output="out_lin",
            mlp=("ffn.lin1", "ffn.lin2"),
        )
        activation = get_activation(config.activation, "activation")
        arch = replace(BertEncoder.describe(config), names=names, inner_size=config.hidden_dim, activation=activation)
        return replace(arch, model_class=DistilBertModel)

    @staticmethod
    def describe_heads(config: Any) -> ClassifierHeads:  # noqa: ARG004
        return ClassifierHeads((HeadLayer("pre_classifier", "relu"), CLASSIFIER), (CLASSIFIER,))


class MPNetModel(PaddingAwareModel):
    has_token_types = False

    def __init__(self, prefix: str, config: Any, weights: Weights, *args: Any) -> None:
        super().__init__(prefix, config, weights, *args)
        shape = (config.relative_attention_num_buckets, config.num_attention_heads)
        table = weights.get_tensor(f"{prefix}.encoder.relative_attention_bias.weight", shape)
        reach = config.max_position_embeddings
        buckets = _find_buckets(torch.arange(-reach, reach + 1)).to(weights.device)
        bias = table[buckets].t().float().contiguous()
        for layer in self.layers:
            assert isinstance(layer, FlashLlamaLayer)
            layer.self_attn.spec = replace(layer.self_attn.spec, position_bias=bias)

    @staticmethod
    def find_padding_id(config: Any) -> int:  # noqa: ARG004
        return 1  # a constant in MPNet


class MPNetEncoder(RobertaEncoder):
    """MPNet: RoBERTa with a learned bias for the distance between query and key."""

    @staticmethod
    def describe(config: Any) -> Architecture:
        names = MODULE_NAMES._replace(
            model="mpnet",
            added_norms=("attention.LayerNorm", "output.LayerNorm"),
            qkv=("attn.q", "attn.k", "attn.v"),
            output="attn.o",
        )
        return replace(BertEncoder.describe(config), names=names, model_class=MPNetModel)

    @staticmethod
    def max_tokens(config: Any) -> int:
        return int(config.max_position_embeddings) - 2


def _find_buckets(distances: torch.Tensor) -> torch.Tensor:
    """Return the bucket of each distance (key position minus query position), as T5 and MPNet define buckets."""
    half = MPNET_BUCKETS // 2
    exact, sizes = half // 2, distances.abs()
    logs = torch.log(sizes.clamp(min=1).float() / exact) / math.log(MPNET_MAX_DISTANCE / exact) * (half - exact)
    far = (exact + logs.long()).clamp(max=half - 1)
    return (distances > 0).long() * half + torch.where(sizes < exact, sizes, far)
