"""Request checks shared by the LoRAX and OpenAI routes."""

import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

from lorax_server.config import ServerConfig
from lorax_server.errors import InputError, NotSupportedError

MAX_STOP_CHARACTERS = 1024  # building the matcher for a longer stop string would block the event loop
MAX_LOGPROBS_PER_REQUEST = 1_000_000  # held in memory until the response is written
MAX_LOGIT_BIASES = 1024
TIMEOUT_HEADER = "x-request-timeout"
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "typical_p")
PENALTY_FIELDS = ("repetition_penalty", "frequency_penalty", "presence_penalty")


def check(is_valid: bool, message: str) -> None:
    if not is_valid:
        raise InputError(message)


def check_query(sent: Mapping[str, str], known: Container[str] = ()) -> None:
    """Reject unknown query parameters, because a misspelled parameter would have no effect."""
    for name in sent:
        check(name in known, f"`{name[:64]}` is not a query parameter of this route")


def reject_unsupported_value(is_set: object, feature: str) -> None:
    """Raise an error if an unsupported value that would change the completion is set."""
    if is_set:
        raise NotSupportedError(f"{feature} is not supported yet; ignoring it would change the output")


def check_no_surrogates(text: str, field: str = "inputs") -> None:
    """Reject lone surrogates. JSON can encode them, but UTF-8 and tokenizers cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        surrogate = f"\\u{ord(text[error.start]):04x}"
        check(False, f"`{field}` contains a lone surrogate ({surrogate}) at character {error.start}")


def check_stop_strings(stops: Sequence[str], config: ServerConfig) -> None:
    limit = config.max_stop_sequences
    check(len(stops) <= limit, f"`stop` supports up to {limit} stop sequences. Given: {len(stops)}")
    longest = max(map(len, stops), default=0)
    check(
        longest <= MAX_STOP_CHARACTERS,
        f"`stop` sequences must have at most {MAX_STOP_CHARACTERS} characters. Given: {longest}",
    )
    for stop in stops:
        check_no_surrogates(stop, "stop")


def parse_logit_bias(logit_bias: Mapping[str, Any] | None) -> dict[int, float]:
    """Validate `logit_bias`, and convert its keys to integers, because JSON keys are always strings."""
    biases = logit_bias or {}
    check(
        len(biases) <= MAX_LOGIT_BIASES, f"`logit_bias` supports up to {MAX_LOGIT_BIASES} tokens. Given: {len(biases)}"
    )
    for token_id, bias in biases.items():
        check(token_id.isascii() and token_id.isdigit() and len(token_id) < 10, "`logit_bias` keys must be token ids")
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
        check(is_number and -100 <= bias <= 100, f"`logit_bias` of token {token_id} must be >= -100 and <= 100")
    return {int(token_id): bias for token_id, bias in biases.items()}


def collect_sampling_fields(*sources: object) -> dict[str, Any]:
    """Return the `SamplingParams` fields that are set on one of the objects. Earlier objects take precedence."""
    picked: dict[str, Any] = {}
    for source in reversed(sources):
        values = {name: getattr(source, name, None) for name in (*SAMPLING_FIELDS, *PENALTY_FIELDS)}
        picked |= {name: value for name, value in values.items() if value is not None}
    return picked


def check_logprobs(count: int) -> None:
    """Raise an error if a request could return too many log probabilities. `count` is the number over all prompts and
    completions.
    """
    check(
        count <= MAX_LOGPROBS_PER_REQUEST,
        f"the request could return {count} log probabilities; the limit is {MAX_LOGPROBS_PER_REQUEST}. Lower "
        "`max_new_tokens`, `best_of` or `return_k_alternatives`, shorten the prompt, leave out "
        "`decoder_input_details`, or stream",
    )


def resolve_timeout(limit_s: float | None, header: str | None) -> float | None:
    """Return the shorter of the server's timeout and the timeout in the request header, in seconds."""
    if header is None:
        return limit_s
    try:
        requested_s = float(header)
    except ValueError:
        requested_s = math.nan
    if not 0 < requested_s < math.inf:
        raise InputError(f"{TIMEOUT_HEADER} must be a number of seconds above 0 (got {header[:32]!r})")
    return requested_s if limit_s is None else min(requested_s, limit_s)
