"""Files of models and adapters, each read up to a limit and checked: an adapter's are nobody's to vouch for."""

import json
from pathlib import Path
from typing import Any

from lorax_server.adapters.source import MAX_FILE_BYTES
from lorax_server.adapters.strict_json import parse_json
from lorax_server.errors import ConfigError

MODEL_CONFIG = "config.json"
DEFAULT_LIMIT = 2**26


def check_size(path: Path, limit: int | None = None) -> None:
    limit = limit or MAX_FILE_BYTES.get(path.name, DEFAULT_LIMIT)
    if not path.is_file():
        raise ConfigError(f"{path}: is not a file")
    size = path.stat().st_size
    if size > limit:
        raise ConfigError(f"{path}: has {size} bytes, at most {limit} are allowed")


def read_bytes(path: Path, limit: int | None = None) -> bytes:
    try:
        check_size(path, limit)
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def read_json(path: Path) -> dict[str, Any] | None:
    """None if there is no such file. A model's config may hold numbers that JSON does not know."""
    if not path.exists():
        return None
    content = read_bytes(path)
    try:
        parsed = json.loads(content) if path.name == MODEL_CONFIG else parse_json(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is refused: {error}") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f"{path}: is not a JSON object")
    return parsed
