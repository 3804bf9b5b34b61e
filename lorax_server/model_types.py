"""Lists the supported model types, and checks `config.json`. The check needs neither torch nor the model's weights."""

import ast
import json
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from lorax_server.config import CHECKPOINT_FORMATS, ModelConfig
from lorax_server.errors import ConfigError, UnsupportedModelError
from lorax_server.files.names import CONFIG_FILE, MODEL_CONFIG_FILE
from lorax_server.quantization_config import read_quantization_config

# `model_type` in `config.json` -> file and class in `models/custom_modeling/`.
MODEL_CLASSES = {
    "arcee": "flash_arcee_modeling.FlashArceeForCausalLM",
    "bloom": "flash_bloom_modeling.FlashBloomForCausalLM",
    "cohere": "flash_cohere_modeling.FlashCohereForCausalLM",
    "cohere2": "flash_cohere2_modeling.FlashCohere2ForCausalLM",
    "deepseek_v2": "flash_deepseek_modeling.FlashDeepseekV2ForCausalLM",
    "deepseek_v3": "flash_deepseek_modeling.FlashDeepseekV3ForCausalLM",
    "exaone4": "flash_exaone4_modeling.FlashExaone4ForCausalLM",
    "falcon": "flash_falcon_modeling.FlashFalconForCausalLM",
    "gemma": "flash_gemma_modeling.FlashGemmaForCausalLM",
    "gemma2": "flash_gemma2_modeling.FlashGemma2ForCausalLM",
    "gemma3_text": "flash_gemma3_modeling.FlashGemma3ForCausalLM",
    "glm": "flash_glm_modeling.FlashGLMForCausalLM",
    "glm4": "flash_glm4_modeling.FlashGLM4ForCausalLM",
    "glm4_moe": "flash_glm4_moe_modeling.FlashGLM4MoeForCausalLM",
    "glm4_moe_lite": "flash_deepseek_modeling.FlashGLM4MoeLiteForCausalLM",
    "gpt2": "flash_gpt2_modeling.FlashGPT2ForCausalLM",
    "gpt_bigcode": "flash_gpt_bigcode_modeling.FlashGPTBigCodeForCausalLM",
    "gpt_neox": "flash_neox_modeling.FlashGPTNeoXForCausalLM",
    "gpt_oss": "flash_gpt_oss_modeling.FlashGPTOSSForCausalLM",
    "gptj": "flash_gptj_modeling.FlashGPTJForCausalLM",
    "granite": "flash_granite_modeling.FlashGraniteForCausalLM",
    "granitemoe": "flash_granite_moe_modeling.FlashGraniteMoeForCausalLM",
    "llama": "flash_llama_modeling.FlashLlamaForCausalLM",
    "mistral": "flash_mistral_modeling.FlashMistralForCausalLM",
    "mixtral": "flash_mixtral_modeling.FlashMixtralForCausalLM",
    "mpt": "flash_mpt_modeling.FlashMPTForCausalLM",
    "nemotron": "flash_nemotron_modeling.FlashNemotronForCausalLM",
    "olmo2": "flash_olmo2_modeling.FlashOLMo2ForCausalLM",
    "olmoe": "flash_olmoe_modeling.FlashOLMoEForCausalLM",
    "opt": "flash_opt_modeling.FlashOPTForCausalLM",
    "phi": "flash_phi_modeling.FlashPhiForCausalLM",
    "phi3": "flash_phi3_modeling.FlashPhi3ForCausalLM",
    "qwen2": "flash_qwen2_modeling.FlashQwen2ForCausalLM",
    "qwen2_moe": "flash_qwen2_moe_modeling.FlashQwen2MoeForCausalLM",
    "qwen3": "flash_qwen3_modeling.FlashQwen3ForCausalLM",
    "qwen3_moe": "flash_qwen3_moe_modeling.FlashQwen3MoeForCausalLM",
    "smollm3": "flash_smollm3_modeling.FlashSmolLM3ForCausalLM",
    "stablelm": "flash_stablelm_modeling.FlashStableLMForCausalLM",
    "starcoder2": "flash_starcoder2_modeling.FlashStarCoder2ForCausalLM",
}

# Encoders, which return hidden states for pooling instead of text.
ENCODER_CLASSES = {
    "bert": "bert_modeling.BertEncoder",
    "distilbert": "bert_modeling.DistilBertEncoder",
    "modernbert": "modernbert_modeling.ModernBertEncoder",
    "mpnet": "bert_modeling.MPNetEncoder",
    "nomic_bert": "nomic_bert_modeling.NomicBertEncoder",
    "roberta": "bert_modeling.RobertaEncoder",
    "xlm-roberta": "bert_modeling.RobertaEncoder",
}

# Maps a model type to a config field. Models that set this field run in padded batches.
PADDED_ONLY_FIELDS = {"falcon": "alibi"}
OTHER_HEAD_SUFFIXES = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "RewardModel")
MULTIMODAL_FIELDS = ("vision_config", "audio_config")
OLD_QUANTIZATION_FILES = ("quantize_config.json", "quant_config.json")  # of AutoGPTQ and AutoAWQ
EXPERT_COUNT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")


def find_similar_types(model_type: str) -> list[str]:
    """Return supported model types with names similar to `model_type`, which is unsupported."""
    name = model_type.lower()
    stem = name[: len(name) - len(name.lstrip(ascii_lowercase))]
    same = [known for known in sorted(MODEL_CLASSES) if stem and known.startswith(stem)]
    return list(dict.fromkeys([*same, *get_close_matches(name, sorted(MODEL_CLASSES))]))


def check_model_config(
    folder: Path,
    model_id: str,
    *,
    settings: ModelConfig | None = None,
    needs_adapters: bool = False,
    generates: Callable[[Mapping[str, Any]], bool] = lambda _: True,
) -> None:
    """Raise `ConfigError` if `config.json` shows that the model cannot be served, or cannot be served with adapters.

    If `settings` are given, `quantize` must fit the model. `generates` returns False for the config of a model that is
    served for pooling instead of text generation.
    """
    path = folder / MODEL_CONFIG_FILE
    if not path.is_file():
        reason = "not a model folder, because it has no config.json"
        if (folder / CONFIG_FILE).is_file():
            reason = "this is an adapter; name its base model, and request the adapter by its name"
        raise ConfigError(f"model {model_id!r}: {reason}")
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model {model_id!r}: config.json cannot be read: {error}") from error
    problem = "config.json is not an object"
    if isinstance(config, dict):
        problem = _find_problem(config, needs_adapters, generates) or ""
    if problem:
        raise UnsupportedModelError(f"model {model_id!r}: {problem} (docs/models.md)")
    check_old_quantization_files(folder, config.get("quantization_config") or config.get("compression_config"))
    mismatch = None if settings is None else _find_quantize_problem(settings, config, generates(config))
    if mismatch is not None:
        raise ConfigError(f"model {model_id!r}: {mismatch} (docs/quantization.md)")


def check_old_quantization_files(folder: Path, stored: Any) -> None:
    """Reject a quantized checkpoint from AutoGPTQ or AutoAWQ whose config.json has no `quantization_config`."""
    for name in OLD_QUANTIZATION_FILES:
        if not stored and (folder / name).is_file():
            raise ConfigError(
                f"{folder / name}: describes a quantized checkpoint, but config.json has no quantization_config; copy "
                "the content to this field, and add quant_method = gptq or awq"
            )


def is_paged(config: Mapping[str, Any]) -> bool:
    """Return True if the model that this `config.json` describes has a paged implementation."""
    model_type = config.get("model_type")
    return model_type in MODEL_CLASSES and not config.get(PADDED_ONLY_FIELDS.get(model_type, ""))


def is_mxfp4(model_type: Any, stored: Any) -> bool:
    """Return True if a model's `quantization_config` is MXFP4, which is read exactly into the model's dtype."""
    return model_type == "gpt_oss" and isinstance(stored, Mapping) and stored.get("quant_method") == "mxfp4"


def find_quantize_problem(settings: ModelConfig, stored: str | None, *, has_experts: bool) -> str | None:
    """Return the reason why the `quantize` setting does not fit a checkpoint, or None.

    `stored` is the checkpoint's quantization method. Without quantization, it is None.
    """
    value, rounded = f"quantize = {settings.quantize}", settings.rounded_format
    if settings.quantize == stored and settings.weight_bits is None:
        return None
    if settings.quantize in CHECKPOINT_FORMATS and (stored or rounded is None):
        return f"{value} needs a checkpoint in this format, but the weights are " + (
            f"stored as {stored}; omit `quantize`" if stored else "not quantized; use int8, int4 or fp8"
        )
    if stored and (settings.weight_bits is not None or rounded is not None):
        return f"{value} quantizes 16-bit weights, but the weights are already stored as {stored}; omit `quantize`"
    if not has_experts or rounded in (None, "fp8"):
        return None
    return f"{value} is not supported for mixtures of experts, " + (
        "because experts have no kernels for rounded activations; use fp8"
        if rounded == "fp8-dynamic"
        else "because bitsandbytes rounds experts only in some versions of transformers; serve the quantized checkpoint"
    )


def _find_quantize_problem(settings: ModelConfig, config: Mapping[str, Any], generates: bool) -> str | None:
    if settings.quantize is not None and generates and not is_paged(config):
        return f"quantize = {settings.quantize} is not supported for the model type {config['model_type']!r}"
    if settings.quantize == "fp8-kv" and not generates:
        return "quantize = fp8-kv is only for text generation: other tasks have no KV cache"
    stored = config.get("quantization_config") or config.get("compression_config")
    quantization = None if is_mxfp4(config["model_type"], stored) else read_quantization_config(stored)
    has_experts = any(config.get(field) for field in EXPERT_COUNT_FIELDS)
    return find_quantize_problem(settings, quantization.method if quantization else None, has_experts=has_experts)


def _find_problem(
    config: Mapping[str, Any], needs_adapters: bool, generates: Callable[[Mapping[str, Any]], bool]
) -> str | None:
    """Return the reason why the model cannot be served, or None."""
    model_type, classes = config.get("model_type"), config.get("architectures")
    stored = config.get("quantization_config") or config.get("compression_config")
    classes = classes or []
    if not isinstance(model_type, str) or not isinstance(classes, list) or not all(isinstance(c, str) for c in classes):
        return "config.json must contain a `model_type` and a list of `architectures`"
    if problem := _find_quantization_problem(config, model_type, stored):
        return problem
    if not generates(config):
        return None
    if not _generates_text(config, model_type, classes):
        return _describe_unsupported(config, model_type, classes)
    if needs_adapters and not is_paged(config):
        similar = _describe_similar_types(model_type)
        return f"the model type {model_type!r} is served without adapters, but adapters are configured{similar}"
    return None


def _find_quantization_problem(config: Mapping[str, Any], model_type: str, stored: Any) -> str | None:
    if is_mxfp4(model_type, stored):
        return None
    try:
        quantization = read_quantization_config(stored)
    except ConfigError as error:
        return f"{error}; use the model with 16-bit weights, or a GGUF file"
    if quantization is None or is_paged(config) or stored.get("load_in_8bit"):
        return None
    return (
        f"quantized weights ({quantization.method}) are not supported for the model type {model_type!r}; "
        "use the model with 16-bit weights"
    )


def _generates_text(config: Mapping[str, Any], model_type: str, classes: list[str]) -> bool:
    """Return True if the model is a causal language model. It may have been saved from the class without LM head."""
    causal = None if is_paged(config) else _read_mapping("modeling_auto.py", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")
    if causal is None:
        return not any(name.endswith(OTHER_HEAD_SUFFIXES) for name in classes)
    return model_type in causal and (not classes or not causal.isdisjoint(classes))


def _describe_unsupported(config: Mapping[str, Any], model_type: str, classes: list[str]) -> str:
    name = classes[0] if classes else model_type
    if any(field in config for field in MULTIMODAL_FIELDS):
        return f"{name} reads images or audio, which is not supported; only text models are served"
    if config.get("is_encoder_decoder"):
        return f"{name} is an encoder-decoder model, which is not supported; only causal language models are served"
    if model_type in (_read_mapping("auto_mappings.py", "CONFIG_MAPPING_NAMES") or ()):
        return f"{name} does not generate text; only causal language models are served"
    return (
        f"the model type {model_type!r} is unknown to the installed version of transformers"
        + _describe_similar_types(model_type)
    )


def _describe_similar_types(model_type: str) -> str:
    similar = find_similar_types(model_type)
    return f"; similar types with full support: {', '.join(similar)}" if similar else ""


def _read_mapping(file: str, name: str) -> frozenset[str] | None:
    """Return the strings in a transformers table, read from its source file because importing it takes seconds."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return None
    try:
        tree = ast.parse(Path(spec.origin).with_name("models").joinpath("auto", file).read_text())
    except (OSError, SyntaxError):
        return None
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            constants = (part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant))
            return frozenset(value for value in constants if isinstance(value, str))
    return None
