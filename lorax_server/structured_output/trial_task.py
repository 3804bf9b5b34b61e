"""Compile a grammar as a sandbox task, to find out what it takes before the engine compiles it."""

import ctypes
import json
from collections.abc import Sequence
from functools import lru_cache

import llguidance  # noqa: F401 - so that its import is not charged to the task

from lorax_server.sandbox.task import TaskError
from lorax_server.structured_output.matcher import CompiledGrammar, GrammarError
from lorax_server.structured_output.vocabulary import Vocabulary

NUM_VOCABULARIES = 8


class _MallInfo(ctypes.Structure):
    """The result of glibc's `mallinfo2`."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")),
        *((name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")),
    ]


def compile_grammar(grammar: str, num_ids: int, special_tokens: Sequence[tuple[int, bytes]]) -> bytes:
    """Return the bytes that the compiled grammar takes, as JSON. Raise `TaskError` if it is invalid.

    A vocabulary of all single bytes and the special tokens stands in for the model's: validity, time and memory of
    compiling hardly depend on the other tokens, and a new worker builds it in milliseconds.
    """
    vocabulary = _make_vocabulary(num_ids, tuple(special_tokens))
    before = _allocated_bytes()
    try:
        compiled = CompiledGrammar(vocabulary, grammar)
    except GrammarError as error:
        raise TaskError(str(error)) from None
    num_bytes = max(0, _allocated_bytes() - before)
    del compiled
    return json.dumps({"num_bytes": num_bytes}).encode()


@lru_cache(NUM_VOCABULARIES)
def _make_vocabulary(num_ids: int, special_tokens: tuple[tuple[int, bytes], ...]) -> Vocabulary:
    tokens = [b""] * num_ids + [bytes([value]) for value in range(256)]
    for token_id, content in special_tokens:
        tokens[token_id] = content
    return Vocabulary(tokens, [token_id for token_id, _ in special_tokens], slices=())


def _allocated_bytes() -> int:
    """Return the bytes that malloc has handed out; 0 without glibc."""
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is None:
        return 0
    function.restype = _MallInfo
    info = function()
    return int(info.uordblks + info.hblkhd)
