"""Checks that the routes of LoRAX and OpenAI share."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lorax_server.config import ServerConfig
from lorax_server.errors import InputError, NotSupportedError

MAX_STOP_LENGTH = 1024  # characters: preparing the search for a stop string holds up other requests
MAX_LOGPROBS = 1_000_000  # in memory at once for one request
MAX_BIASES = 1024
TIMEOUT_HEADER = "x-request-timeout"
NUMBERS = ("temperature", "top_k", "top_p", "min_p", "typical_p")
PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


def check(holds: bool, message: str) -> None:
    if not holds:
        raise InputError(message)


def not_yet(is_asked: object, feature: str) -> None:
    """Refuse a field instead of ignoring it, where the answer would be another one."""
    if is_asked:
        raise NotSupportedError(f"{feature} is not supported yet; without it the answer would not be what you ask for")


def check_text(text: str) -> None:
    """Refuse halves of characters, which JSON can write and no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        check(False, f"`inputs` has half of a character ({half}, a surrogate without the other) at {error.start}")


def check_stops(stops: Sequence[str], config: ServerConfig) -> None:
    most = config.max_stop_sequences
    check(len(stops) <= most, f"`stop` supports up to {most} stop sequences. Given: {len(stops)}")
    longest = max(map(len, stops), default=0)
    check(longest <= MAX_STOP_LENGTH, f"`stop` sequences have at most {MAX_STOP_LENGTH} characters. Given: {longest}")


def to_bias(logit_bias: Mapping[str, Any] | None) -> dict[int, float]:
    """Convert `logit_bias`, whose keys are strings in JSON."""
    biases = logit_bias or {}
    check(len(biases) <= MAX_BIASES, f"`logit_bias` has at most {MAX_BIASES} tokens. Given: {len(biases)}")
    for token_id, bias in biases.items():
        check(token_id.isascii() and token_id.isdigit() and len(token_id) < 10, "`logit_bias` is keyed by token ids")
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
        check(is_number and -100 <= bias <= 100, f"`logit_bias` of token {token_id} must be >= -100 and <= 100")
    return {int(token_id): bias for token_id, bias in biases.items()}


def pick_sampling(*sources: object) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that sources set; of several sources the first one counts."""
    picked: dict[str, Any] = {}
    for source in reversed(sources):
        values = {name: getattr(source, name, None) for name in (*NUMBERS, *PENALTIES)}
        picked |= {name: value for name, value in values.items() if value is not None}
    return picked


def check_logprobs(count: int) -> None:
    """Refuse a request whose answers may list too many log probabilities, of prompts and of tokens together."""
    check(
        count <= MAX_LOGPROBS,
        f"up to {count} log probabilities are asked for, at most {MAX_LOGPROBS} are given: lower `max_new_tokens`, "
        "`best_of` or `return_k_alternatives`, shorten the prompt or leave out `decoder_input_details`, or stream",
    )


def shorten_timeout(limit_s: float | None, asked: str | None) -> float | None:
    """Return the shorter of the server's limit and the seconds that a header asks for."""
    if asked is None:
        return limit_s
    try:
        asked_s = float(asked)
    except ValueError:
        asked_s = math.nan
    if not 0 < asked_s < math.inf:
        raise InputError(f"{TIMEOUT_HEADER} is a number of seconds above 0, not {asked[:32]!r}")
    return asked_s if limit_s is None else min(asked_s, limit_s)
