"""The files of an adapter: the one list by which sources find, limit, fetch and hash them, and tokenizers read them."""

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
OTHER_VOCABULARIES = ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "spiece.model", "tekken.json")
TOKENIZER_FILES = (
    VOCABULARY_FILE,
    TOKENIZER_CONFIG_FILE,
    SPECIAL_TOKENS_FILE,
    ADDED_TOKENS_FILE,
    *OTHER_VOCABULARIES,
    TEMPLATE_FILE,
)
# Sources ignore all other files except the templates below: a folder may hold anything.
KNOWN_FILES = (*REQUIRED_FILES, *PICKLE_FILES, *TOKENIZER_FILES, MODEL_CONFIG_FILE)

TEMPLATES_FOLDER = "additional_chat_templates"
TEMPLATE = re.compile(rf"{TEMPLATES_FOLDER}/[A-Za-z0-9_][A-Za-z0-9_.-]{{0,99}}\.jinja")  # only plain names
MAX_TEMPLATES = 32

MAX_CONFIG_BYTES = 2**20
MAX_TEMPLATE_BYTES = 2**20
MAX_TOKENIZER_BYTES = 2**26


def is_known(file: str) -> bool:
    """Tell whether a path within an adapter's folder is one of its files."""
    return file in KNOWN_FILES or is_template(file)


def is_template(file: str) -> bool:
    """Tell whether a path is a template in the folder of templates."""
    return TEMPLATE.fullmatch(file) is not None


def known_files(files: Collection[str]) -> list[str]:
    """Return the files of an adapter among `files`, in one order."""
    return [*(file for file in KNOWN_FILES if file in files), *sorted(filter(is_template, files))]


def tokenizer_files(files: Collection[str]) -> list[str]:
    """Return the files of a tokenizer among `files`, in one order for all sources."""
    return [*(file for file in TOKENIZER_FILES if file in files), *sorted(filter(is_template, files))]


def find_limit(file: str) -> int | None:
    """Return the most bytes that a file may have; None where only the sum of all files is limited."""
    if file == CONFIG_FILE:
        return MAX_CONFIG_BYTES
    if file == TEMPLATE_FILE or is_template(file):
        return MAX_TEMPLATE_BYTES
    return MAX_TOKENIZER_BYTES if file in TOKENIZER_FILES else None
