"""Finds the files in a model folder, and detects missing and truncated files without reading tensors."""

import json
from pathlib import Path

from lorax_server.errors import ConfigError, WeightsError
from lorax_server.files.adapter_files import OTHER_VOCABULARY_FILES
from lorax_server.files.names import GGUF_FILE_LIST, VOCABULARY_FILE

# In the order that transformers uses, because saving a single file over a sharded checkpoint keeps the old index.
CHECKPOINT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
MAX_HEADER_BYTES = 100_000_000  # same limit as safetensors
VOCABULARY_SUFFIXES = (".model", ".tiktoken")  # of other file names that tokenizer classes use
LFS_POINTER_PREFIX = b"version https://git-lfs"  # content of a file that `git clone` without Git LFS leaves


def find_checkpoint(folder: Path) -> Path:
    for file in (GGUF_FILE_LIST, *CHECKPOINT_FILES):
        if (folder / file).is_file():
            return folder / file
    raise WeightsError(f"{folder}: no weights; looked for {', '.join(CHECKPOINT_FILES)}")


def read_index(path: Path) -> dict[str, Path]:
    """Return a map from tensor name to shard file, read from a weight index."""
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        files = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{path}: not a weight index (a JSON object with a `weight_map`): {error}") from error
    for file in sorted(set(files.values())):
        if Path(file).name != file:
            raise WeightsError(f"{path}: shard {file!r} is not a plain file name")
        if not (path.parent / file).is_file():
            raise WeightsError(f"{path}: shard {file!r} is missing from the folder")
    return {name: path.parent / file for name, file in files.items()}


def check_model_files(folder: Path) -> None:
    """Raise an error if weights are missing or truncated, or if there is no tokenizer."""
    checkpoint = find_checkpoint(folder)
    is_index = checkpoint.name.endswith(".index.json")
    for path in sorted(set(read_index(checkpoint).values())) if is_index else [checkpoint]:
        if path.suffix == ".safetensors" and (problem := find_truncation(path)):
            raise WeightsError(f"{path}: {problem}")
    names = (VOCABULARY_FILE, *OTHER_VOCABULARY_FILES)
    if not any(path.name in names or path.suffix in VOCABULARY_SUFFIXES for path in folder.iterdir()):
        raise ConfigError(
            f"{folder}: no tokenizer; looked for {', '.join(names)}; copy the base model's tokenizer files"
        )


def find_truncation(path: Path) -> str | None:
    """Return an error message if a safetensors file is shorter than its header says, or None.

    Other problems are not detected.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            start = file.read(len(LFS_POINTER_PREFIX))
            if problem := find_header_truncation(start, size, MAX_HEADER_BYTES):
                return problem
            length = int.from_bytes(start[:8], "little")
            file.seek(8)
            text = file.read(min(length, size))
        entries = [entry for name, entry in json.loads(text).items() if name != "__metadata__"]
        needed_bytes = 8 + length + max((int(entry["data_offsets"][1]) for entry in entries), default=0)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return None
    return describe_truncation(size, needed_bytes) if size < needed_bytes else None


def find_header_truncation(start: bytes, size: int, max_header_bytes: int) -> str | None:
    """Return an error message if a file of `size` bytes ends within its safetensors header, or None.

    `start` contains the first bytes of the file.
    """
    length = int.from_bytes(start[:8], "little")
    if start.startswith(LFS_POINTER_PREFIX):
        return "the file is a Git LFS pointer without the weights; run `git lfs pull` in its folder"
    if size < 8:
        return f"the file has {size} bytes, so its header is incomplete; was the copy interrupted?"
    return describe_truncation(size, 8 + length) if size - 8 < length <= max_header_bytes else None


def describe_truncation(size: int, needed_bytes: int) -> str:
    return f"the file has {size} bytes, but its header needs {needed_bytes}; was the copy interrupted?"
