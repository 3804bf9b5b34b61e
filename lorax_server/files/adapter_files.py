"""The files of an adapter: the one list that every source finds, limits, fetches and hashes, and tokenizers read."""

import re
from collections.abc import Collection, Iterable

from lorax_server.files.names import (
    CONFIG_FILE,
    MODEL_CONFIG_FILE,
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
    "special_tokens_map.json",
    "added_tokens.json",
    *OTHER_VOCABULARIES,
    TEMPLATE_FILE,
)
# A source looks at nothing else, but for the templates below: a folder may hold anything.
KNOWN_FILES = (*REQUIRED_FILES, *PICKLE_FILES, *TOKENIZER_FILES, MODEL_CONFIG_FILE)

TEMPLATES_FOLDER = "additional_chat_templates"
TEMPLATE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\.jinja")
MAX_TEMPLATES = 32

MAX_CONFIG_BYTES = 2**20
MAX_TEMPLATE_BYTES = 2**20
MAX_TOKENIZER_BYTES = 2**26


def is_known(file: str) -> bool:
    """A file that means something, by its path within the adapter's folder."""
    return file in KNOWN_FILES or is_template(file)


def is_template(file: str) -> bool:
    """A template of the folder of templates. Names that could be anything but a plain name are not taken for one."""
    folder, slash, name = file.partition("/")
    return folder + slash == f"{TEMPLATES_FOLDER}/" and TEMPLATE_NAME.fullmatch(name) is not None


def known_files(files: Collection[str]) -> list[str]:
    """Those of `files` that mean something, in one order."""
    return [*(file for file in KNOWN_FILES if file in files), *sorted(filter(is_template, files))]


def tokenizer_files(files: Collection[str]) -> list[str]:
    """Those of `files` that a tokenizer is made of, in one order for all sources."""
    return [*(file for file in TOKENIZER_FILES if file in files), *sorted(filter(is_template, files))]


def count_templates(files: Iterable[str]) -> int:
    return sum(map(is_template, files))


def find_limit(file: str) -> int | None:
    """The most bytes that a file may have; None where only all of them together are limited."""
    if file == CONFIG_FILE:
        return MAX_CONFIG_BYTES
    if file == TEMPLATE_FILE or is_template(file):
        return MAX_TEMPLATE_BYTES
    return MAX_TOKENIZER_BYTES if file in TOKENIZER_FILES else None
