"""Find and load the class for the model type in a checkpoint's `config.json`."""

import gc
import json
import logging
from difflib import get_close_matches
from importlib import import_module
from string import ascii_lowercase
from typing import Any

import torch

from lorax_server.config import DTYPES, ModelConfig
from lorax_server.distributed import FakeGroup, ProcessGroup
from lorax_server.errors import ConfigError, UnsupportedModelError
from lorax_server.files.names import MODEL_CONFIG_FILE
from lorax_server.kernels import Ops, select_ops
from lorax_server.kernels.device import is_host
from lorax_server.models.custom_modeling.paged import PagedCausalLM
from lorax_server.models.config_cache import read_config
from lorax_server.weights import LoadProgress, Weights, estimate_bytes, open_weights

logger = logging.getLogger(__name__)

MODELS = {
    "arcee": "flash_arcee_modeling.FlashArceeForCausalLM",
    "bloom": "flash_bloom_modeling.FlashBloomForCausalLM",
    "cohere": "flash_cohere_modeling.FlashCohereForCausalLM",
    "cohere2": "flash_cohere2_modeling.FlashCohere2ForCausalLM",
    "exaone4": "flash_exaone4_modeling.FlashExaone4ForCausalLM",
    "falcon": "flash_falcon_modeling.FlashFalconForCausalLM",
    "gemma": "flash_gemma_modeling.FlashGemmaForCausalLM",
    "gemma2": "flash_gemma2_modeling.FlashGemma2ForCausalLM",
    "gemma3_text": "flash_gemma3_modeling.FlashGemma3ForCausalLM",
    "glm": "flash_glm_modeling.FlashGLMForCausalLM",
    "glm4": "flash_glm4_modeling.FlashGLM4ForCausalLM",
    "gpt2": "flash_gpt2_modeling.FlashGPT2ForCausalLM",
    "gpt_bigcode": "flash_gpt_bigcode_modeling.FlashGPTBigCodeForCausalLM",
    "gpt_neox": "flash_neox_modeling.FlashGPTNeoXForCausalLM",
    "gptj": "flash_gptj_modeling.FlashGPTJForCausalLM",
    "granite": "flash_granite_modeling.FlashGraniteForCausalLM",
    "llama": "flash_llama_modeling.FlashLlamaForCausalLM",
    "mistral": "flash_mistral_modeling.FlashMistralForCausalLM",
    "mpt": "flash_mpt_modeling.FlashMPTForCausalLM",
    "nemotron": "flash_nemotron_modeling.FlashNemotronForCausalLM",
    "olmo2": "flash_olmo2_modeling.FlashOLMo2ForCausalLM",
    "opt": "flash_opt_modeling.FlashOPTForCausalLM",
    "phi": "flash_phi_modeling.FlashPhiForCausalLM",
    "phi3": "flash_phi3_modeling.FlashPhi3ForCausalLM",
    "qwen2": "flash_qwen2_modeling.FlashQwen2ForCausalLM",
    "qwen3": "flash_qwen3_modeling.FlashQwen3ForCausalLM",
    "smollm3": "flash_smollm3_modeling.FlashSmolLM3ForCausalLM",
    "stablelm": "flash_stablelm_modeling.FlashStableLMForCausalLM",
    "starcoder2": "flash_starcoder2_modeling.FlashStarCoder2ForCausalLM",
}

# By model type: a config field that, if set, makes the model run in padded batches.
PADDED_ONLY_FIELDS = {"falcon": "alibi"}
DEFAULT_MAX_POSITIONS = 2**17  # the longest sequence of a model that has no limit

POSITIVE_INT_FIELDS = (
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "ffn_dim",
    "max_position_embeddings",
    "n_inner",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "sliding_window",
    "vocab_size",
)
EPSILON_FIELDS = ("layer_norm_eps", "layer_norm_epsilon", "rms_norm_eps")


def get_model(
    settings: ModelConfig, process_group: ProcessGroup | None = None, ops: Ops | None = None
) -> PagedCausalLM:
    """Load this rank's part of a model. Without a group, load all of it; without ops, use the device's best."""
    config = load_config(settings)
    device = torch.device(settings.device)
    ops, process_group = ops or select_ops(device), process_group or FakeGroup()
    dtype = _choose_dtype(settings, config, ops)
    needed = estimate_bytes(settings.path, dtype) // process_group.size()
    free = needed if is_host(device) else _get_free_bytes(device)
    if needed > free:
        raise _weights_memory_error(device, needed, free)
    try:
        with open_weights(
            settings.path,
            device=device,
            dtype=dtype,
            process_group=process_group,
            ops=ops,
            progress=LoadProgress(needed),
        ) as weights:
            return build_model(config, weights)
    except torch.OutOfMemoryError as error:
        raise _weights_memory_error(device, needed, free) from error


def build_model(config: Any, weights: Weights) -> PagedCausalLM:
    """Build the paged model of a config."""
    with torch.no_grad():
        model: PagedCausalLM = find_model_class(config.model_type)("", config, weights)
    return model.eval()


def find_model_class(model_type: Any) -> type[Any]:
    if not isinstance(model_type, str) or model_type not in MODELS:
        relatives = find_similar_types(str(model_type))
        raise UnsupportedModelError(
            f"config field model_type = {model_type!r} is not supported; known are {', '.join(sorted(MODELS))}"
            + (f"; close relatives are {', '.join(relatives)}" if relatives else "")
            + "; models.padded_lm.PaddedLM serves others, without adapters"
        )
    module, name = MODELS[model_type].rsplit(".", 1)
    model_class: type[Any] = getattr(import_module(f"lorax_server.models.custom_modeling.{module}"), name)
    return model_class


def find_similar_types(model_type: str) -> list[str]:
    """Return supported model types with names similar to this unsupported one."""
    name = model_type.lower()
    stem = name[: len(name) - len(name.lstrip(ascii_lowercase))]
    same = [known for known in sorted(MODELS) if stem and known.startswith(stem)]
    return list(dict.fromkeys([*same, *get_close_matches(name, sorted(MODELS))]))


def _read_model_type(settings: ModelConfig) -> str:
    """Return a model's type. Reject unsupported types."""
    path = settings.path / MODEL_CONFIG_FILE
    try:
        model_type: str = json.loads(path.read_text())["model_type"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{path}: cannot be used as a model's config, a JSON object with a `model_type`: {error}"
        ) from error
    find_model_class(model_type)
    return model_type


def load_config(settings: ModelConfig) -> Any:
    """Return a model's config with its defaults. Reject invalid values."""
    path, model_type = settings.path / MODEL_CONFIG_FILE, _read_model_type(settings)
    try:
        config = read_config(settings.path)
    except Exception as error:  # transformers raises anything for a value that it cannot take
        raise ConfigError(f"{path}: cannot be used as a model's config: {error}") from error
    if config.model_type != model_type:
        raise ConfigError(f"{path}: transformers reads it as {config.model_type!r}, which is not supported")
    _check_config(config)
    config.quantize = settings.quantize
    return config


def _check_config(config: Any) -> None:
    """Reject invalid values that transformers accepts."""
    for field in POSITIVE_INT_FIELDS:
        value = getattr(config, field, None)
        if value is not None and not (isinstance(value, int) and value > 0):
            raise ConfigError(f"config field {field} = {value!r} is not a positive number")
    for field in EPSILON_FIELDS:
        value = getattr(config, field, 0.0)
        if not (isinstance(value, int | float) and 0 <= value < 1):
            raise ConfigError(f"config field {field} = {value!r} is not a small positive number")
    if getattr(config, "quantization_config", None):
        raise ConfigError("config field quantization_config is not supported: the checkpoint must not be quantized")


def _choose_dtype(settings: ModelConfig, config: Any, ops: Ops) -> torch.dtype:
    """Choose the dtype, and say why."""
    stored = str(getattr(config, "dtype", None) or torch.float16).removeprefix("torch.")
    if settings.dtype is not None:
        name, reason = settings.dtype, "as asked for"
    elif settings.device != "cpu":
        name, reason = stored, "as it is stored"
    elif stored == "bfloat16" and ops.has_fast_bfloat16:
        name, reason = stored, "as it is stored: this CPU computes it at full speed (AMX); --dtype float32 is exact"
    else:
        name = "float32"
        reason = f"it is stored in {stored}" + ("" if stored != "bfloat16" else ", which is no faster on this CPU")
    if name not in DTYPES:
        raise ConfigError(f"config field dtype = {name!r} is not supported; set one of {', '.join(DTYPES)}")
    logger.info("the model runs in %s: %s", name, reason)
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _get_free_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU, after cached memory of earlier engines in this process is released."""
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return free


def _weights_memory_error(device: torch.device, needed: int, free: int) -> ConfigError:
    return ConfigError(
        f"the model's weights take about {needed} bytes, and {free} are free of the "
        f"{torch.cuda.get_device_properties(device).total_memory} bytes of {device}; use a larger GPU, a smaller "
        "dtype, or several GPUs by tensor_parallel"
    )
