"""Guesses for the next token, and statistics on how often each kind of guess was correct."""

from typing import NamedTuple

MAX_MATCH = 16  # longer matches are not more reliable
PRIOR_RIGHT, PRIOR_COUNT = 0.6, 4.0  # assumed before guesses of a kind were checked
MAX_COUNT = 128.0  # checks after which older checks lose weight


class Guess(NamedTuple):
    """A guess for the next token. Guesses of the same kind are correct about equally often."""

    token_id: int
    kind: int


class Accuracy:
    """Estimates how often each kind of guess is correct, based on all guesses so far."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[float, float]] = {}  # (right, all) by kind
        self._estimates: dict[int, float] = {}  # by kind

    def estimate(self, kind: int) -> float:
        return self._estimates.get(kind, PRIOR_RIGHT)

    def record(self, kind: int, is_right: bool) -> None:
        right, count = self._counts.get(kind, (0.0, 0.0))
        if count >= MAX_COUNT:
            right, count = right / 2, count / 2
        right, count = right + is_right, count + 1
        self._counts[kind] = right, count
        self._estimates[kind] = (right + PRIOR_RIGHT * PRIOR_COUNT) / (count + PRIOR_COUNT)


def bucket(length: int) -> int:
    """Return the bucket for a match length: 0 for 1, 1 for 2 and 3, 2 for 4 to 7, and so on."""
    return length.bit_length() - 1
