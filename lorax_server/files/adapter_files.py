"""The adapter files that sources download and tokenizers read, with their size limits."""

import re
from collections.abc import Collection

from lorax_server.files.names import (
    ADDED_TOKENS_FILE,
    CONFIG_FILE,
    MODEL_CONFIG_FILE,
    SPECIAL_TOKENS_FILE,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    VOCABULARY_FILE,
    WEIGHTS_FILE,
)

REQUIRED_FILES = (CONFIG_FILE, WEIGHTS_FILE)
PICKLE_FILES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
OTHER_VOCABULARY_FILES = ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "spiece.model", "tekken.json")
TOKENIZER_FILES = (
    VOCABULARY_FILE,
    TOKENIZER_CONFIG_FILE,
    SPECIAL_TOKENS_FILE,
    ADDED_TOKENS_FILE,
    *OTHER_VOCABULARY_FILES,
    TEMPLATE_FILE,
)
# Sources ignore all other files, except chat templates.
READABLE_FILES = (*REQUIRED_FILES, *PICKLE_FILES, *TOKENIZER_FILES, MODEL_CONFIG_FILE)

TEMPLATES_FOLDER = "additional_chat_templates"
TEMPLATE_PATTERN = re.compile(rf"{TEMPLATES_FOLDER}/[A-Za-z0-9_][A-Za-z0-9_.-]{{0,99}}\.jinja")  # restricted file names
MAX_TEMPLATES = 32

MAX_CONFIG_BYTES = 2**20
MAX_TEMPLATE_BYTES = 2**20
MAX_TOKENIZER_BYTES = 2**26


def is_template_file(file: str) -> bool:
    """Return True if a path, relative to the adapter folder, is an additional chat template."""
    return TEMPLATE_PATTERN.fullmatch(file) is not None


def select_known_files(files: Collection[str]) -> list[str]:
    """Return the entries of `files` that the server may use, in a fixed order."""
    return [*(file for file in READABLE_FILES if file in files), *sorted(filter(is_template_file, files))]


def select_tokenizer_files(files: Collection[str]) -> list[str]:
    """Return the tokenizer files in `files`, in a fixed order."""
    return [*(file for file in TOKENIZER_FILES if file in files), *sorted(filter(is_template_file, files))]


def max_file_bytes(file: str) -> int | None:
    """Return the size limit for a file in bytes, or None if only the adapter's total size is limited."""
    if file == CONFIG_FILE:
        return MAX_CONFIG_BYTES
    if file == TEMPLATE_FILE or is_template_file(file):
        return MAX_TEMPLATE_BYTES
    return MAX_TOKENIZER_BYTES if file in TOKENIZER_FILES else None
