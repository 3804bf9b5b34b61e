"""Read default sampling settings from `generation_config.json`."""

from pathlib import Path
from typing import Any, NamedTuple

from lorax_server.errors import ConfigError
from lorax_server.files.names import GENERATION_CONFIG_FILE, MODEL_CONFIG_FILE
from lorax_server.files.tokenizer_folder import read_json

# Supported settings and their types.
SETTING_TYPES: dict[str, tuple[type, ...]] = {
    **{"do_sample": (bool,), "top_k": (int,), "max_new_tokens": (int,)},
    **dict.fromkeys(("temperature", "top_p", "min_p", "typical_p", "repetition_penalty"), (int, float)),
}
# The `eos_token_id` of model types whose config may omit it.
DEFAULT_EOS_TOKEN_IDS = {"gpt2": 50256, "gpt_neox": 2, "llama": 2, "mistral": 2, "opt": 2}


class GenerationDefaults(NamedTuple):
    """Settings in `generation_config.json`. Settings that are missing from the file are None."""

    eos_token_ids: frozenset[int] = frozenset()  # including config.json
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


def load_generation_defaults(folder: Path) -> GenerationDefaults:
    """Load the defaults from a model folder. Raise ConfigError if the file is invalid, instead of ignoring it."""
    path = folder / GENERATION_CONFIG_FILE
    generation = read_json(path) or {}
    settings = {name: generation[name] for name in SETTING_TYPES if generation.get(name) is not None}
    for name, value in settings.items():
        if type(value) not in SETTING_TYPES[name]:
            raise ConfigError(f"{path}: {name} is {str(value)[:64]!r}")
    model = read_json(folder / MODEL_CONFIG_FILE) or {}
    model_eos = model.get("eos_token_id", DEFAULT_EOS_TOKEN_IDS.get(str(model.get("model_type"))))
    eos = (*_read_ids(path, generation.get("eos_token_id")), *_read_ids(folder / MODEL_CONFIG_FILE, model_eos))
    return GenerationDefaults(frozenset(eos), **settings)


def _read_ids(path: Path, value: Any) -> list[int]:
    """Return the token IDs in a config value (an ID, a list or null). Negative IDs are ignored."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if type(token_id) is not int:
            raise ConfigError(f"{path}: eos_token_id is {str(token_id)[:64]!r}, which is not a token id")
    return [token_id for token_id in ids if token_id >= 0]
