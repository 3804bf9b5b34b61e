"""The examples file of the playground. `lorax serve` checks it before the web stack is imported."""

from pathlib import Path
from typing import Any, Literal

import msgspec

from lorax_server.errors import ConfigError


class Example(msgspec.Struct):
    """A prompt that the page offers, and the models that are to answer it."""

    title: str
    prompt: str
    models: list[str]
    schema: dict[str, Any] | None = None  # of the answers
    tools: list[dict[str, Any]] | None = None  # that they may call
    tool_choice: Literal["auto", "required", "none"] | None = None
    temperature: float | None = None


def read_examples(path: Path | None) -> bytes:
    """Return the file of examples as it is, once it is known to be one."""
    if path is None:
        return b"[]"
    try:
        content = path.read_bytes()
        msgspec.json.decode(content, type=list[Example])
    except OSError as error:
        raise ConfigError(f"{path}: the examples cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: this is not a JSON list of title, prompt and models: {error}") from None
    return content
