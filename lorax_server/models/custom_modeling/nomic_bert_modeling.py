"""NomicBERT: BERT with RoPE instead of position embeddings, and a gated MLP without biases."""

from dataclasses import replace
from typing import Any

from lorax_server.errors import ConfigError
from lorax_server.models.custom_modeling.architecture import Architecture, BiasFlags, ModuleNames
from lorax_server.models.custom_modeling.bert_modeling import BertEncoder
from lorax_server.models.custom_modeling.encoder import CLASSIFIER, ClassifierHeads, EncoderModel, HeadLayer

NAMES = ModuleNames(
    model="nomic_bert",
    embedding="embeddings.word_embeddings",
    added_norms=("post_attention_layernorm", "post_mlp_layernorm"),
    final_norm=None,
)
# Config fields of the model's original code and of transformers, which ignores the original fields.
ORIGINAL_FIELDS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "layer_norm_epsilon": "layer_norm_eps",
}
ORIGINAL_VALUES: dict[str, Any] = {
    "activation_function": "swiglu",
    "causal": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "num_experts": 0,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "use_rms_norm": False,
}


class NomicBertModel(EncoderModel):
    has_positions = False


class NomicBertEncoder(BertEncoder):
    @staticmethod
    def describe(config: Any) -> Architecture:
        _check_original_fields(config)
        arch = replace(BertEncoder.describe(config), names=NAMES, biases=BiasFlags(), uses_rope=True)
        return replace(arch, mlp_class=None, model_class=NomicBertModel)

    @staticmethod
    def describe_heads(config: Any) -> ClassifierHeads:  # noqa: ARG004
        return ClassifierHeads((HeadLayer("nomic_bert.pooler.dense", "tanh"), CLASSIFIER), (CLASSIFIER,))


def _check_original_fields(config: Any) -> None:
    """Reject configs of the original implementation that transformers interprets differently."""
    expected = ORIGINAL_VALUES | {old: getattr(config, new) for old, new in ORIGINAL_FIELDS.items()}
    expected["rotary_emb_base"] = config.rope_parameters["rope_theta"]
    for field, value in expected.items():
        found = getattr(config, field, value)
        if (found or None) != (value or None):  # configs contain null for false or 0
            raise ConfigError(f"config field {field} = {found!r} is not supported; it must be {value!r}")
