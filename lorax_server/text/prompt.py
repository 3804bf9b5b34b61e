"""Prompts for `LLM`: text, or token IDs of any integer type."""

from collections.abc import Sequence
from operator import index
from typing import Any, TypeVar

from lorax_server.errors import InputError
from lorax_server.text.tokenizer import TextTokenizer

Prompt = str | Sequence[int]
MAX_TOKEN_ID = 2**31 - 1
_T = TypeVar("_T")


def list_prompts(prompts: Any) -> list[Prompt]:
    """Return the prompts as a list. A list of token IDs is one prompt."""
    is_one = isinstance(prompts, str) or (len(prompts) > 0 and _is_id(prompts[0]))
    return [prompts] if is_one else list(prompts)


def encode_prompt(tokenizer: TextTokenizer, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    try:
        ids = [index(token_id) for token_id in prompt]
    except TypeError as error:
        raise InputError(f"a prompt must be text or a list of token ids: {error}") from error
    if ids and not 0 <= min(ids) <= max(ids) <= MAX_TOKEN_ID:  # tokenizers cannot look up other ids
        raise InputError("a prompt has token ids beyond the vocabulary")
    return ids


def _is_id(value: Any) -> bool:
    """Return True for Python and numpy integers, and for scalar integer tensors."""
    return hasattr(value, "__index__") and getattr(value, "ndim", 0) == 0


def broadcast(values: Any, kind: type[_T], label: str, count: int) -> list[_T | None]:
    """Return a list with one value per prompt, given a single value or a list."""
    listed = [values] * count if values is None or isinstance(values, kind) else list(values)
    if len(listed) != count:
        raise InputError(f"{count} prompts, but {len(listed)} {label}")
    return listed
