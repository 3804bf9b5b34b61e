"""Reads the playground's examples file. `lorax serve` validates it before importing the web stack."""

from pathlib import Path
from typing import Any, Literal

import msgspec

from lorax_server.errors import ConfigError


class Example(msgspec.Struct):
    """A prompt on the playground page, and the models that complete it."""

    title: str
    prompt: str
    models: list[str]
    schema: dict[str, Any] | None = None  # JSON Schema for the completions
    tools: list[dict[str, Any]] | None = None  # tools that the models may call
    tool_choice: Literal["auto", "required", "none"] | None = None
    temperature: float | None = None


def read_examples(path: Path | None) -> bytes:
    """Validate the examples file and return its bytes."""
    if path is None:
        return b"[]"
    try:
        content = path.read_bytes()
        msgspec.json.decode(content, type=list[Example])
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the examples file: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: must be a JSON list of objects with title, prompt and models: {error}") from None
    return content
