"""Find and load the class for the model type in a checkpoint's `config.json`."""

import gc
import json
import logging
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, TypeVar

import torch

from lorax_server.config import DTYPES, ModelConfig
from lorax_server.distributed import FakeGroup, ProcessGroup
from lorax_server.errors import ConfigError, UnsupportedModelError
from lorax_server.files.names import GGUF_FILE_LIST, MODEL_CONFIG_FILE
from lorax_server.kernels import Ops, select_ops
from lorax_server.kernels.device import is_host
from lorax_server.model_types import (
    ENCODER_CLASSES,
    EXPERT_COUNT_FIELDS,
    MODEL_CLASSES,
    check_old_quantization_files,
    find_quantize_problem,
    find_similar_types,
    is_mxfp4,
)
from lorax_server.models.config_cache import read_config
from lorax_server.models.custom_modeling.paged import PagedCausalLM
from lorax_server.models.pooled_model import PooledModel, load_pooled_model
from lorax_server.pooling import PoolingConfig
from lorax_server.quantization_config import QuantizationConfig, read_quantization_config
from lorax_server.weights import LoadProgress, Weights, estimate_bytes, open_weights

logger = logging.getLogger(__name__)
ModelT = TypeVar("ModelT", PagedCausalLM, PooledModel)

DEFAULT_MAX_POSITIONS = 2**17  # default for models without a position limit

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
    """Load this rank's shard of a model. By default, there is one rank and the fastest ops for the device are used."""
    config = load_config(settings)
    find_model_class(config.model_type, MODEL_CLASSES)  # rejects encoders before the weights are opened
    return load_model(settings, config, lambda weights: build_model(config, weights), process_group, ops)


def get_pooled_model(
    settings: ModelConfig, pooling: PoolingConfig, find_token: Callable[[str], int | None], ops: Ops | None = None
) -> PooledModel:
    """Load a model that does not generate text."""
    config = load_config(settings)
    model_class = find_model_class(config.model_type)
    return load_model(
        settings, config, lambda weights: load_pooled_model(model_class, config, weights, pooling, find_token), ops=ops
    )


def load_model(
    settings: ModelConfig,
    config: Any,
    build: Callable[[Weights], ModelT],
    process_group: ProcessGroup | None = None,
    ops: Ops | None = None,
) -> ModelT:
    """Open the weights and build a model from them. Raise `ConfigError` if they do not fit into memory."""
    device = torch.device(settings.device)
    ops, process_group = ops or select_ops(device), process_group or FakeGroup()
    dtype = _choose_dtype(settings, config, ops)
    bits = settings.weight_bits
    quantization = find_quantization(config)
    check_quantize(settings, config, quantization)
    quantize = settings.loaded_format if quantization is None else None
    needed_bytes = estimate_bytes(settings.path, dtype, device, quantize, quantization) // process_group.size()
    free = needed_bytes if is_host(device) else _get_free_bytes(device)
    if needed_bytes > free:
        raise _weights_memory_error(device, needed_bytes, free)
    try:
        with open_weights(
            settings.path,
            quantization,
            device=device,
            dtype=dtype,
            process_group=process_group,
            ops=ops,
            progress=LoadProgress(needed_bytes),
            quantize_bits=bits,
            rounded_format=None if _confirms_checkpoint_format(settings, quantization) else settings.rounded_format,
        ) as weights:
            model = build(weights)
            weights.check_all_used()
            model.weight_format = weights.quantized_format
            return model
    except torch.OutOfMemoryError as error:
        raise _weights_memory_error(device, needed_bytes, free) from error


def build_model(config: Any, weights: Weights) -> PagedCausalLM:
    """Build the paged model that a config describes."""
    with torch.no_grad():
        model: PagedCausalLM = find_model_class(config.model_type, MODEL_CLASSES)("", config, weights)
    return model.eval()


def find_model_class(model_type: Any, class_paths: Mapping[str, str] = MODEL_CLASSES | ENCODER_CLASSES) -> type[Any]:
    """Return the model class for a model type. `class_paths` maps model types to class names."""
    if not isinstance(model_type, str) or model_type not in class_paths:
        similar = find_similar_types(str(model_type))
        raise UnsupportedModelError(
            f"config field model_type = {model_type!r} is not supported; use one of {', '.join(sorted(MODEL_CLASSES))}"
            + (f"; similar types are {', '.join(similar)}" if similar else "")
            + "; models.padded_lm.PaddedLM runs other types, without adapters"
        )
    module, name = class_paths[model_type].rsplit(".", 1)
    model_class: type[Any] = getattr(import_module(f"lorax_server.models.custom_modeling.{module}"), name)
    return model_class


def _read_model_type(settings: ModelConfig) -> str:
    """Return the model type in `config.json`. Reject unsupported types."""
    path = settings.path / MODEL_CONFIG_FILE
    try:
        model_type: str = json.loads(path.read_text())["model_type"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{path}: cannot be used as a model config (a JSON object with a `model_type`): {error}"
        ) from error
    find_model_class(model_type)
    return model_type


def load_config(settings: ModelConfig) -> Any:
    """Return the model config, with defaults for missing fields. Reject invalid values."""
    path, model_type = settings.path / MODEL_CONFIG_FILE, _read_model_type(settings)
    try:
        config = read_config(settings.path)
    except Exception as error:  # transformers raises many exception types for invalid values
        raise ConfigError(f"{path}: cannot be used as a model config: {error}") from error
    if config.model_type != model_type:
        raise ConfigError(f"{path}: transformers reads it as {config.model_type!r}, which is not supported")
    _check_config(config)
    check_old_quantization_files(settings.path, find_quantization(config))
    config.quantize = settings.quantize
    return config


def _check_config(config: Any) -> None:
    """Reject invalid values that transformers accepts."""
    for field in POSITIVE_INT_FIELDS:
        value = getattr(config, field, None)
        if field == "sliding_window" and value == 0 and not getattr(config, "use_sliding_window", True):
            continue  # Qwen2-MoE in transformers
        if value is not None and not (isinstance(value, int) and value > 0):
            raise ConfigError(f"config field {field} must be a positive integer (got {value!r})")
    for field in EPSILON_FIELDS:
        value = getattr(config, field, 0.0)
        if not (isinstance(value, int | float) and 0 <= value < 1):
            raise ConfigError(f"config field {field} must be at least 0 and less than 1 (got {value!r})")
    find_quantization(config)


def check_quantize(settings: ModelConfig, config: Any, quantization: QuantizationConfig | None) -> None:
    """Reject a `quantize` setting that does not fit the checkpoint, and log what LoRAX's settings mean."""
    stored = None if quantization is None else quantization.method
    has_experts = any(getattr(config, field, None) for field in EXPERT_COUNT_FIELDS)
    if problem := find_quantize_problem(settings, stored, has_experts=has_experts):
        raise ConfigError(problem)
    if _confirms_checkpoint_format(settings, quantization):
        return
    if settings.weight_bits is not None:
        logger.info("quantize = %s: the weights are quantized to int%d", settings.quantize, settings.weight_bits)
    if settings.rounded_format is not None:
        logger.info(
            "quantize = %s: linear layers are rounded to %s%s",
            settings.quantize,
            settings.rounded_format,
            ", but stored in the model dtype, because there are no kernels for this format on CPUs"
            if is_host(torch.device(settings.device))
            else "",
        )


def _confirms_checkpoint_format(settings: ModelConfig, quantization: QuantizationConfig | None) -> bool:
    """Return True if the `quantize` setting only confirms the format of a quantized checkpoint."""
    return quantization is not None and settings.quantize == quantization.method


def find_quantization(config: Any) -> QuantizationConfig | None:
    """Return how a checkpoint is quantized, or None. gpt-oss models read their MXFP4 tensors without it."""
    stored = getattr(config, "quantization_config", None) or getattr(config, "compression_config", None)
    return None if is_mxfp4(config.model_type, stored) else read_quantization_config(stored)


def _choose_dtype(settings: ModelConfig, config: Any, ops: Ops) -> torch.dtype:
    """Return the model's dtype, and log the reason for this choice."""
    stored = str(getattr(config, "dtype", None) or torch.float16).removeprefix("torch.")
    quantization = find_quantization(config)
    has_integers = quantization is not None and quantization.has_integers
    is_quantized = has_integers or settings.weight_bits is not None or (settings.path / GGUF_FILE_LIST).is_file()
    if settings.dtype is not None:
        name, reason = settings.dtype, "requested"
    elif settings.device != "cpu":
        name, reason = stored, "checkpoint dtype"
    elif is_quantized:
        name, reason = "float32", "default for GGUF files and integer weights"
    elif stored == "bfloat16" and ops.has_fast_bfloat16:
        name, reason = stored, "checkpoint dtype, fast on this CPU (AMX); use --dtype float32 for exact results"
    else:
        name = "float32"
        reason = f"checkpoint dtype is {stored}" + ("" if stored != "bfloat16" else ", which is not faster on this CPU")
    if name not in DTYPES:
        raise ConfigError(f"config field dtype = {name!r} is not supported; use {', '.join(DTYPES)}")
    logger.info("model dtype: %s (%s)", name, reason)
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _get_free_bytes(device: torch.device) -> int:
    """Return the free GPU memory in bytes, after releasing memory that torch cached for earlier engines."""
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return free


def _weights_memory_error(device: torch.device, needed_bytes: int, free_bytes: int) -> ConfigError:
    return ConfigError(
        f"the model weights need about {needed_bytes} bytes, but only {free_bytes} of "
        f"{torch.cuda.get_device_properties(device).total_memory} bytes on {device} are free; use a larger GPU, a "
        "smaller dtype, or several GPUs with tensor_parallel"
    )
