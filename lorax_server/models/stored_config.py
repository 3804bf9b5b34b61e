"""A model's config with its defaults, as transformers reads it.

Importing transformers takes seconds at every start, so the result is cached on disk.
"""

import json
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lorax_server.files.kept import keep, kept_folder, make_name, read_kept
from lorax_server.files.names import MODEL_CONFIG_FILE

FORMAT = "1"  # another one whenever other fields are kept


def read_config(folder: Path) -> SimpleNamespace:
    """Return the fields of the config in a model's folder. Whatever transformers raises is raised."""
    name = make_name(FORMAT, version("transformers"), (folder / MODEL_CONFIG_FILE).read_bytes())
    path = kept_folder("configs") / f"{name}.json"
    content = read_kept(path)
    if content is None:
        content = json.dumps(_ask_transformers(folder)).encode()
        keep(path, content)
    return SimpleNamespace(**json.loads(content))


def _ask_transformers(folder: Path) -> dict[str, Any]:
    from transformers import AutoConfig  # noqa: PLC0415 - takes seconds

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    aliases = {alias: getattr(config, alias, None) for alias in config.attribute_map}
    return {**config.to_dict(), **aliases, "model_type": config.model_type}
