"""Checks the folder of Medusa heads without reading tensors."""

import json
from pathlib import Path
from typing import Any

from lorax_server.errors import ConfigError
from lorax_server.files.names import DRAFT_HEADS_FILE, MODEL_CONFIG_FILE

MAX_HEADS, MAX_BLOCKS = 16, 16


def read_draft_head_sizes(folder: Path) -> tuple[int, int]:
    """Return the number of Medusa heads, and the number of residual blocks of each head.

    Raise `ConfigError` if the config or the weights file is missing, or if the config is invalid.
    """
    path = folder / MODEL_CONFIG_FILE
    try:
        config: Any = json.loads(path.read_text())
        sizes = config.get("medusa_num_heads"), config.get("medusa_num_layers", 1)
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be used as a config of Medusa heads: {error}") from error
    names = ("medusa_num_heads", MAX_HEADS), ("medusa_num_layers", MAX_BLOCKS)
    for size, (name, most) in zip(sizes, names, strict=True):
        if type(size) is not int or not 1 <= size <= most:
            raise ConfigError(f"{path}: {name} must be an integer from 1 to {most} (got {size!r})")
    if not (folder / DRAFT_HEADS_FILE).is_file():
        raise ConfigError(f"{folder}: has no {DRAFT_HEADS_FILE}; convert other formats with `safetensors`")
    return sizes
