"""Read the tokens in `tokenizer_config.json` in the same way as transformers."""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer

STANDARD_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
ADDED_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def add_config_tokens(backend: Tokenizer, config: Mapping[str, Any]) -> dict[str, str]:
    """Add the config's tokens to a tokenizer, and return the named tokens.

    New tokens are assigned the next IDs. Existing tokens receive the config's flags.
    """
    added = read_added_tokens(config) or dict(sorted(backend.get_added_tokens_decoder().items()))
    named_tokens, tokens = _read_named_tokens(config), list(added.values())
    names = {_token_text(token) for token in named_tokens.values()}
    present = {token.content for token in (*backend.get_added_tokens_decoder().values(), *tokens)}
    for token in (*named_tokens.values(), *_read_extra_tokens(config)):
        if _token_text(token) not in present:
            present.add(_token_text(token))
            tokens.append(AddedToken(token, special=True) if isinstance(token, str) else token)
    for token in tokens:
        token.special = token.special or token.content in names
    backend.add_tokens(tokens)
    return {name: _token_text(token) for name, token in named_tokens.items()}


def read_named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the named tokens: first standard tokens such as `bos_token`, then model-specific tokens such as
    `image_token`.
    """
    return {name: _token_text(token) for name, token in _read_named_tokens(config).items()}


def read_added_tokens(config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Return the added tokens in ID order."""
    decoder = config.get("added_tokens_decoder", {})
    if not isinstance(decoder, dict):
        raise TypeError("added_tokens_decoder is not an object")
    return {int(key): _to_added_token("added_tokens_decoder", decoder[key]) for key in sorted(decoder, key=int)}


def _read_named_tokens(config: Mapping[str, Any]) -> dict[str, str | AddedToken]:
    named_tokens = {name: config[name] for name in STANDARD_TOKEN_NAMES if config.get(name) is not None}
    custom_tokens = {
        key: value for key, value in config.items() if key.endswith("_token") and key not in STANDARD_TOKEN_NAMES
    }
    for kind in (dict, str):  # new tokens get their ids in this order
        named_tokens |= {key: value for key, value in custom_tokens.items() if isinstance(value, kind)}
    extra = config.get("extra_special_tokens")
    named_tokens |= extra if isinstance(extra, dict) else {}
    return {name: _to_token(name, value) for name, value in named_tokens.items()}


def _read_extra_tokens(config: Mapping[str, Any]) -> list[str | AddedToken]:
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        return []
    if not isinstance(extra, list):
        raise TypeError("extra_special_tokens is neither a list nor an object")
    return [_to_token("extra_special_tokens", token) for token in extra]


def _to_token(name: str, value: object) -> str | AddedToken:
    return value if isinstance(value, str) else _to_added_token(name, value)


def _to_added_token(name: str, value: object) -> AddedToken:
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise TypeError(f"{name} contains {str(value)[:64]!r}, which is not a token")
    flags = {flag: value[flag] for flag in ADDED_TOKEN_FLAGS if flag in value}
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise TypeError(f"{name} contains a token whose flags are not true or false")
    return AddedToken(value["content"], **flags)


def _token_text(token: str | AddedToken) -> str:
    return token if isinstance(token, str) else str(token.content)
