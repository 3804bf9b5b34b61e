"""Messages between the engine and a process that follows structures, pickled tuples of plain values."""

from typing import NamedTuple

from lorax_server.types import Resolved

MAX_COMPILED = 256  # grammars that a process keeps, those used last


class Begin(NamedTuple):
    """Follow an answer from its first token on. A `Masks` with its first mask follows, or a `FailedAnswer`."""

    request_id: int
    slot: int  # where its masks are written
    grammar: str
    eos: tuple[int, ...]
    stop_tokens: tuple[int, ...]
    min_new_tokens: int
    jump_below: int = 0  # forced tokens below this id are taken ahead; 0: none


class Advance(NamedTuple):
    """Take the tokens that a step has chosen."""

    tokens: list[tuple[int, int]]  # request_id, token_id


class End(NamedTuple):
    request_id: int
    slot: int


ToProgram = Begin | Advance | End


class SlotsMade(NamedTuple):
    """The first message: the slots are there."""

    num_words: int  # of a mask


class Masks(NamedTuple):
    """Slots have the tokens that may come next in some answers, after those that must come and were taken already."""

    request_ids: list[int]
    forced: dict[int, list[int]]  # tokens that must come, by request
    took_s: float  # since the tokens before had come


class FailedAnswer(NamedTuple):
    """An answer that cannot have its form, or cannot go on; it is followed no longer."""

    request_id: int
    message: str
    is_busy: bool = False  # the machine was too busy, and the grammar is not to blame


class Unusable(NamedTuple):
    """The last message: the tokenizer cannot be used."""

    message: str


FromProgram = SlotsMade | Masks | FailedAnswer | Unusable


class Start(NamedTuple):
    """The first message to the program: whose tokenizer it has."""

    model: str  # the base model's folder
    adapter: Resolved | None
