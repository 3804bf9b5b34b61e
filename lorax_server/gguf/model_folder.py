"""Model folders for GGUF files.

The rest of the server reads models from folders with `config.json` and tokenizer files. For a GGUF file, such a folder
is written to the disk cache once. It contains the paths of the GGUF files instead of weights.
"""

import json
import shutil
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lorax_server.errors import ConfigError, WeightsError
from lorax_server.files.disk_cache import CACHE_VARIABLE, cache_folder, make_key
from lorax_server.files.names import (
    GENERATION_CONFIG_FILE,
    GGUF_FILE_LIST,
    MODEL_CONFIG_FILE,
    TOKENIZER_CONFIG_FILE,
    VOCABULARY_FILE,
)
from lorax_server.gguf.architectures import make_config, map_tensors
from lorax_server.gguf.container import SPLIT_NAME_PATTERN, GGUFFile, find_parts, read_gguf
from lorax_server.gguf.tokenizer import make_tokenizer

CACHE_VERSION = "1"  # increase this when the content of the folders changes
GGUF_SUFFIX = ".gguf"


def find_model_folder(path: Path) -> Path:
    """Return the model folder for a GGUF file, or for a folder with one GGUF file. Return other folders unchanged."""
    if path.is_dir():
        files = list_models(path)
        if not files or ((path / MODEL_CONFIG_FILE).is_file() and any(path.glob("*.safetensors"))):
            return path
        if len(files) > 1:
            names = ", ".join(file.name for file in files)
            raise ConfigError(f"model {str(path)!r}: the folder has {len(files)} GGUF files; name one of {names}")
        path = files[0]
    return _find_cached(path)


def list_models(folder: Path) -> list[Path]:
    """Return the GGUF files in a folder. For split models, return only the first file."""
    numbers = {file: SPLIT_NAME_PATTERN.fullmatch(file.name) for file in sorted(folder.glob(f"*{GGUF_SUFFIX}"))}
    return [file for file, match in numbers.items() if match is None or int(match[2]) == 1]


def read_file_list(folder: Path) -> list[Path]:
    """Return the GGUF files with the weights, given a folder that `find_model_folder` created."""
    path = folder / GGUF_FILE_LIST
    try:
        return [Path(file) for file in json.loads(path.read_text())["files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{path}: cannot be read: {error}; remove the folder") from error


def _find_cached(path: Path) -> Path:
    """Return the model folder for a GGUF file in the disk cache. Its name depends on the paths and file times."""
    parts = find_parts(path.absolute())
    try:
        stats = [part.stat() for part in parts]
    except OSError as error:
        raise ConfigError(f"model {str(path)!r}: cannot be read: {error.strerror}") from error
    versions = (f"{part}:{stat.st_size}:{stat.st_mtime_ns}" for part, stat in zip(parts, stats, strict=True))
    folder = cache_folder("gguf") / make_key(CACHE_VERSION, *versions)
    if not folder.is_dir():
        _write(folder, _make_files(read_gguf(parts[0]), parts))
    return folder


def _make_files(file: GGUFFile, parts: Sequence[Path]) -> dict[str, str]:
    """Return the files in a model folder, as a map from file name to content."""
    config, tokenizer = make_config(file), make_tokenizer(file)
    map_tensors(file, config)  # rejects unknown tensors
    content: dict[str, Any] = {
        MODEL_CONFIG_FILE: config,
        GENERATION_CONFIG_FILE: {"eos_token_id": tokenizer.end_token_ids},
        TOKENIZER_CONFIG_FILE: tokenizer.config,
        GGUF_FILE_LIST: {"files": [str(part) for part in parts]},
    }
    return {VOCABULARY_FILE: tokenizer.backend.to_str(), **{name: json.dumps(each) for name, each in content.items()}}


def _write(folder: Path, files: Mapping[str, str]) -> None:
    """Create a folder atomically. Another process may create it at the same time."""
    part = folder.with_name(f".{uuid.uuid4().hex}")
    try:
        part.mkdir(parents=True)
        try:
            for name, text in files.items():
                (part / name).write_text(text)
            with suppress(FileExistsError):
                part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be written: {error.strerror}; set {CACHE_VARIABLE} to a writable folder"
        ) from error
