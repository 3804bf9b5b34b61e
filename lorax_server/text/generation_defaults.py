"""How a model likes to generate, as its `generation_config.json` says."""

from pathlib import Path
from typing import Any, NamedTuple

from lorax_server.errors import ConfigError
from lorax_server.files.names import GENERATION_CONFIG_FILE, MODEL_CONFIG_FILE
from lorax_server.files.tokenizer_folder import read_json

WHOLE, REAL = ("top_k", "max_new_tokens"), ("temperature", "top_p", "min_p", "typical_p", "repetition_penalty")
# What a model's config means where it does not name `eos_token_id` at all.
UNNAMED_EOS = {"gpt2": 50256, "gpt_neox": 2, "llama": 2, "mistral": 2, "opt": 2}


class GenerationDefaults(NamedTuple):
    """What `generation_config.json` says; None where it does not."""

    eos_token_ids: frozenset[int] = frozenset()  # also those of config.json
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


def load_generation_defaults(folder: Path) -> GenerationDefaults:
    """Of a model's folder. A file that is damaged is an error: nobody would notice."""
    path = folder / GENERATION_CONFIG_FILE
    given = read_json(path) or {}
    settings = {name: given[name] for name in ("do_sample", *WHOLE, *REAL) if given.get(name) is not None}
    for name, value in settings.items():
        kinds = (bool,) if name == "do_sample" else (int,) if name in WHOLE else (int, float)
        if type(value) not in kinds:
            raise ConfigError(f"{path}: {name} is {str(value)[:64]!r}")
    model = read_json(folder / MODEL_CONFIG_FILE) or {}
    unnamed = UNNAMED_EOS.get(str(model.get("model_type")))
    of_model = model.get("eos_token_id", unnamed) if model else None
    eos = (*_ids(path, given.get("eos_token_id")), *_ids(folder / MODEL_CONFIG_FILE, of_model))
    return GenerationDefaults(frozenset(eos), **settings)


def _ids(path: Path, named: Any) -> list[int]:
    """One or several; -1 means none."""
    several = named if isinstance(named, list) else [] if named is None else [named]
    for token_id in several:
        if type(token_id) is not int:
            raise ConfigError(f"{path}: eos_token_id is {str(token_id)[:64]!r}, not a token's id")
    return [token_id for token_id in several if token_id >= 0]
