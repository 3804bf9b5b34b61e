"""NomicBERT: BERT with RoPE instead of position embeddings, and a gated MLP."""

from dataclasses import replace
from typing import Any

from lorax_server.models.custom_modeling.architecture import Architecture, BiasFlags, ModuleNames
from lorax_server.models.custom_modeling.bert_modeling import BertEncoder
from lorax_server.models.custom_modeling.encoder import CLASSIFIER, ClassifierHeads, EncoderModel, HeadLayer


class NomicBertModel(EncoderModel):
    has_positions = False


class NomicBertEncoder(BertEncoder):
    @staticmethod
    def describe(config: Any) -> Architecture:
        names = ModuleNames(
            model="nomic_bert",
            embedding="embeddings.word_embeddings",
            added_norms=("post_attention_layernorm", "post_mlp_layernorm"),
            final_norm=None,
        )
        arch = replace(BertEncoder.describe(config), names=names, biases=BiasFlags(), model_class=NomicBertModel)
        return replace(arch, mlp_class=None, uses_rope=True)

    @staticmethod
    def describe_heads(config: Any) -> ClassifierHeads:  # noqa: ARG004
        return ClassifierHeads((HeadLayer("nomic_bert.pooler.dense", "tanh"), CLASSIFIER), (CLASSIFIER,))
