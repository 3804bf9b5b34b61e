"""Adapter files as bytes, and helpers to fetch them."""

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

from lorax_server.adapters.sources.source import AdapterSources, FetchedAdapter, Source

CONFIG = {"peft_type": "LORA", "r": 8, "base_model_name_or_path": "owner/base"}
WEIGHTS = "adapter_model.safetensors"
# Not valid safetensors: sources do not parse weights.
ADAPTER = {
    "adapter_config.json": json.dumps(CONFIG).encode(),
    WEIGHTS: random.Random(0).randbytes(400_000),
    "tokenizer.json": b'{"version": "1.0"}',
    "chat_template.jinja": b"{{ messages }}",
}
UNRELATED_FILES = {"README.md": b"read me", "adapter_model.bin": b"a pickle", "optimizer.pt": b"x" * 1000}


def accept(config: Mapping[str, Any], base_model_type: Callable[[str], str | None]) -> None:
    pass


def make_sources(source: Source, **options: Any) -> AdapterSources:
    return AdapterSources({source.kind: source}, **{"max_bytes": 2**30} | options)


def fetch(source: Source, name: str, token: str | None = None) -> FetchedAdapter:
    """Fetch with new `AdapterSources`, without cached authorizations."""
    return make_sources(source).fetch(source.kind, name, token, accept)


def check_contents(fetched: FetchedAdapter, files: Mapping[str, bytes] = ADAPTER) -> None:
    assert fetched.config == CONFIG
    assert fetched.tokenizer_files == ("tokenizer.json", "chat_template.jinja")
    for file, content in files.items():
        assert (fetched.folder / file).read_bytes() == content
