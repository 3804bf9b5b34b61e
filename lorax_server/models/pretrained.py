"""Load Hugging Face causal language models and tokenizers for padded batches. Reject unsupported models."""

import json
import logging
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from transformers.utils.hub import cached_file
from transformers.utils.peft_utils import find_adapter_config_file

from lorax_server.errors import ConfigError, UnsupportedModelError, WeightsError
from lorax_server.files.names import GENERATION_CONFIG_FILE
from lorax_server.models.registry import DEFAULT_MAX_POSITIONS

logger = logging.getLogger(__name__)

KV_LAYER_TYPES = (
    "full_attention",
    "sliding_attention",
    "chunked_attention",
)  # layer types with a KV cache

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def load_config(model_id: str, revision: str | None, trust_remote_code: bool) -> Any:
    try:
        config = AutoConfig.from_pretrained(model_id, revision=revision, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises many exception types for invalid names and files
        raise ConfigError(f"{model_id}: the model config cannot be read: {error}") from error
    if find_adapter_config_file(model_id, revision=revision):
        raise ConfigError(f"{model_id}: contains an adapter; load the base model and request the adapter by its ID")
    attention = getattr(config, "_attn_implementation", None) or ""
    if "/" in attention:  # transformers would download and run this code
        raise ConfigError(f"{model_id}: the config requests attention code from another repository: {attention}")
    other = sorted(set(getattr(config.get_text_config(decoder=True), "layer_types", None) or ()) - set(KV_LAYER_TYPES))
    if other:
        raise _unsupported_state_error(model_id, config.model_type, f"its layers are {', '.join(other)}")
    return config


def is_stored_in_8_bits(model_id: str, config: Any) -> bool:
    """Return True if bitsandbytes has quantized the checkpoint to 8 bits. Reject other quantization methods."""
    stored = getattr(config, "quantization_config", None)
    if not stored:
        return False
    stored = stored if isinstance(stored, dict) else stored.to_dict()
    if stored.get("load_in_8bit"):
        return True
    raise ConfigError(f"{model_id}: quantization method {stored.get('quant_method')!r} is not supported here")


def load_generation_eos(model_id: str, revision: str | None) -> frozenset[int]:
    """Return the EOS token IDs in `generation_config.json`, or an empty set if the file does not exist."""
    path = cached_file(model_id, GENERATION_CONFIG_FILE, revision=revision, _raise_exceptions_for_missing_entries=False)
    if path is None:
        return frozenset()
    try:
        return eos_token_ids(SimpleNamespace(**json.loads(Path(path).read_text())))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{model_id}: {GENERATION_CONFIG_FILE} cannot be read: {error}") from error


def load_tokenizer(model_id: str, revision: str | None, trust_remote_code: bool) -> Any:
    try:
        return AutoTokenizer.from_pretrained(
            model_id,
            revision=revision,
            padding_side="left",
            truncation_side="left",
            trust_remote_code=trust_remote_code,
        )
    except Exception as error:
        raise ConfigError(f"{model_id}: the tokenizer cannot be read: {error}") from error


def load_model(
    model_id: str,
    config: Any,
    revision: str | None,
    quantize: str | None,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool,
) -> Any:
    placement_args = _placement_args(quantize, device)
    if is_stored_in_8_bits(model_id, config):
        placement_args.pop("quantization_config", None)  # the checkpoint contains one
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model_id,
            config=config,
            revision=revision,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **placement_args,
        )
    except Exception as error:
        raise WeightsError(f"{model_id}: cannot be loaded as a causal language model: {error}") from error
    model, report = loaded
    if report["missing_keys"]:
        raise WeightsError(f"{model_id}: the checkpoint lacks {_abbreviate(report['missing_keys'])}")
    if report["unexpected_keys"]:
        logger.warning("%s: unused tensors in the checkpoint: %s", model_id, _abbreviate(report["unexpected_keys"]))
    if quantize and not any(type(module).__name__ == "Linear8bitLt" for module in model.modules()):
        raise ConfigError(f"{model_id}: {type(model).__name__} has no layers that bitsandbytes can quantize")
    if getattr(model, "_is_stateful", False):
        raise _unsupported_state_error(model_id, config.model_type, f"{type(model).__name__} is recurrent")
    return model if "device_map" in placement_args else model.to(device)


def resolve_pad_token(tokenizer: Any, config: Any, vocab_size: int) -> int:
    """Return a padding token ID. Padding is masked, so any token in the model's vocabulary is allowed."""
    eos = sorted(eos_token_ids(config, tokenizer))
    for token_id in (tokenizer.pad_token_id, getattr(config, "pad_token_id", None), *eos):
        if token_id is not None and 0 <= token_id < vocab_size:
            return int(token_id)
    raise ConfigError(
        f"neither the tokenizer nor the config has a pad or EOS token below the vocabulary size {vocab_size}: "
        "set pad_token_id or eos_token_id in config.json"
    )


def eos_token_ids(*sources: Any) -> frozenset[int]:
    """Return all EOS token IDs of these tokenizers and configs. Negative IDs in configs mean that no token is set."""
    eos: set[Any] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        eos.update(ids if isinstance(ids, list | tuple | set) else [] if ids is None else [ids])
    for token_id in eos:
        if not isinstance(token_id, int):
            raise TypeError(f"eos_token_id must be an integer or a list of integers (got {token_id!r})")
    return frozenset(token_id for token_id in eos if token_id >= 0)


def max_positions(config: Any) -> int:
    """Return the maximum sequence length, or a large default for configs without a limit (BLOOM).

    With length-dependent RoPE, transformers changes the frequencies for the whole batch if a sequence exceeds the
    original length. Requests must not affect each other, so the original length is the limit.
    """
    text = config.get_text_config(decoder=True)
    limits_by_field = [getattr(text, name, None) for name in ("max_position_embeddings", "n_positions", "max_seq_len")]
    limits = [limit for limit in limits_by_field if isinstance(limit, int) and limit > 0][:1]
    for rope in _rope_parameters(text):
        if rope.get("rope_type") in LENGTH_DEPENDENT_ROPE:
            field = "original_max_position_embeddings"
            unscaled = rope.get(field) or getattr(text, field, None)
            limits += [unscaled] if unscaled else []
    return min(limits, default=DEFAULT_MAX_POSITIONS)


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Return the config's RoPE parameters: one dictionary per model or per layer type, or an empty list."""
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict):
        return []
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return nested or [rope]


def _placement_args(quantize: str | None, device: torch.device) -> dict[str, Any]:
    """Return the `from_pretrained` arguments for quantization and device placement."""
    several_gpus = device.type == "cuda" and torch.cuda.device_count() > 1
    if quantize is None:
        return {"device_map": "auto"} if several_gpus else {}
    if quantize != "bitsandbytes":
        raise ConfigError(f"quantize = {quantize!r} is not supported here; use 'bitsandbytes' (8 bit)")
    missing = [package for package in ("accelerate", "bitsandbytes") if find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"quantize = 'bitsandbytes' needs {' and '.join(missing)}: pip install lorax_server[quantize]"
        )
    return {
        "quantization_config": BitsAndBytesConfig(load_in_8bit=True),
        "device_map": "auto" if several_gpus else {"": device},
    }


def _unsupported_state_error(model_id: str, model_type: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{model_id}: model type {model_type!r} has recurrent or other state besides the KV cache ({reason}), "
        "which padded batches do not support"
    )


def _abbreviate(names: Any, max_names: int = 5) -> str:
    names = sorted(names)
    return ", ".join(names[:max_names]) + (f" and {len(names) - max_names} more" if len(names) > max_names else "")
