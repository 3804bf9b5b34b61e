"""The folder of a base model, as far as the command line reads it."""

import json
from pathlib import Path

from lorax_server.config import ModelConfig
from lorax_server.errors import ConfigError
from lorax_server.files.names import MODEL_CONFIG_FILE


def check_folder(folder: Path) -> Path:
    if not (folder / MODEL_CONFIG_FILE).is_file():
        raise ConfigError(f"model {str(folder)!r}: there is no config.json in it, so it is not a model's folder")
    return folder


def token_bytes(model: ModelConfig, ranks: int) -> int:
    """Return the bytes that the keys and values of a token take on each rank."""
    try:
        config = json.loads((model.path / MODEL_CONFIG_FILE).read_text())
        layers, heads, hidden = (
            config.get(new) or config[old]
            for new, old in (
                ("num_hidden_layers", "n_layer"),
                ("num_attention_heads", "n_head"),
                ("hidden_size", "n_embd"),
            )
        )
        size = config.get("head_dim") or hidden // heads
        stored = config.get("dtype") or config.get("torch_dtype") or "float16"
        dtype = model.dtype or ("float32" if model.device == "cpu" else stored)
        width = 1 if model.quantize == "fp8-kv" else 4 if dtype == "float32" else 2
        return int(2 * layers * -(-(config.get("num_key_value_heads") or heads) // ranks) * size * width)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError, RecursionError) as error:
        raise ConfigError(
            f"--max-batch-total-tokens: {model.path}/config.json does not say how large a token's keys and values are; "
            "use --cache-bytes"
        ) from error
