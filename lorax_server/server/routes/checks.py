"""What both surfaces refuse in the same words."""

from collections.abc import Mapping, Sequence
from typing import Any

from lorax_server.config import ServerConfig
from lorax_server.errors import InputError, NotSupportedError

MAX_STOP_LENGTH = 1024  # characters: each is looked for in every text, and prepared for while others wait
MAX_LOGPROBS = 1_000_000  # that are in memory at once for one request
MAX_BIASES = 1024
SAMPLING = [
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
]


def check(holds: bool, message: str) -> None:
    if not holds:
        raise InputError(message)


def not_yet(is_asked: object, what: str) -> None:
    """Nothing is ignored that would make the answer another one."""
    if is_asked:
        raise NotSupportedError(f"{what} is not supported yet; without it the answer would not be what you ask for")


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


def to_bias(given: Mapping[str, Any] | None) -> dict[int, float]:
    """OpenAI's `logit_bias`, whose keys are strings."""
    given = given or {}
    check(len(given) <= MAX_BIASES, f"`logit_bias` has at most {MAX_BIASES} tokens. Given: {len(given)}")
    for token_id, bias in given.items():
        check(token_id.isascii() and token_id.isdigit() and len(token_id) < 10, "`logit_bias` is keyed by token ids")
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
        check(is_number and -100 <= bias <= 100, f"`logit_bias` of token {token_id} must be >= -100 and <= 100")
    return {int(token_id): bias for token_id, bias in given.items()}


def pick_sampling(*sources: object) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that sources set; of several sources the first one counts."""
    fields: dict[str, Any] = {}
    for source in reversed(sources):
        values = {name: getattr(source, name, None) for name in SAMPLING}
        fields |= {name: value for name, value in values.items() if value is not None}
    return fields


def check_logprobs(count: int) -> None:
    """Refuse a request whose answers may list too many log probabilities, of prompts and of tokens together."""
    check(
        count <= MAX_LOGPROBS,
        f"up to {count} log probabilities are asked for, at most {MAX_LOGPROBS} are given: lower `max_new_tokens`, "
        "`best_of` or `return_k_alternatives`, shorten the prompt or leave out `decoder_input_details`, or stream",
    )
