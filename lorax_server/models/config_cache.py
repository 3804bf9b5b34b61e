"""Read model configs with transformers and cache the result on disk, because importing transformers takes seconds."""

import json
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lorax_server.files.disk_cache import cache_folder, load, make_key, store
from lorax_server.files.names import MODEL_CONFIG_FILE

CACHE_VERSION = "1"  # increase this when the cached fields change


def read_config(folder: Path) -> SimpleNamespace:
    """Return the config fields of the model in `folder`. Propagates exceptions from transformers."""
    name = make_key(CACHE_VERSION, version("transformers"), (folder / MODEL_CONFIG_FILE).read_bytes())
    path = cache_folder("configs") / f"{name}.json"
    content = load(path)
    if content is None:
        content = json.dumps(_read_with_transformers(folder)).encode()
        store(path, content)
    return SimpleNamespace(**json.loads(content))


def _read_with_transformers(folder: Path) -> dict[str, Any]:
    from transformers import AutoConfig  # noqa: PLC0415 - takes seconds

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    aliases = {alias: getattr(config, alias, None) for alias in config.attribute_map}
    return {**config.to_dict(), **aliases, "model_type": config.model_type}
