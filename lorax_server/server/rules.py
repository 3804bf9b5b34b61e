"""What both surfaces refuse in the same words."""

from collections.abc import Sequence

from lorax_server.config import ServerConfig
from lorax_server.errors import InputError, NotSupportedError

MAX_STOP_LENGTH = 1024  # characters: each is looked for in every text, and prepared for while others wait
MAX_LOGPROBS = 1_000_000  # in one answer that is not streamed, where all of them are in memory at once


def check(holds: bool, message: str) -> None:
    if not holds:
        raise InputError(message)


def not_yet(is_asked: object, what: str) -> None:
    """Nothing is ignored that would make the answer another one."""
    if is_asked:
        raise NotSupportedError(f"{what} is not supported yet; without it the answer would not be what you ask for")


def check_stops(stops: Sequence[str], config: ServerConfig) -> None:
    most = config.max_stop_sequences
    check(len(stops) <= most, f"`stop` supports up to {most} stop sequences. Given: {len(stops)}")
    longest = max(map(len, stops), default=0)
    check(longest <= MAX_STOP_LENGTH, f"`stop` sequences have at most {MAX_STOP_LENGTH} characters. Given: {longest}")


def check_logprobs(num_answers: int, num_tokens: int, num_alternatives: int) -> None:
    asked = num_answers * num_tokens * (num_alternatives + 1)
    check(
        asked <= MAX_LOGPROBS,
        f"{asked} log probabilities are asked for, at most {MAX_LOGPROBS} are given: ask for fewer tokens, "
        "answers or alternatives, or stream them",
    )
