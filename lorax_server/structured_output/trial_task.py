"""A sandbox task that compiles a grammar and measures its memory before the engine compiles it."""

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import llguidance  # noqa: F401 - so that its import is not charged to the task

from lorax_server.sandbox.task import TaskError
from lorax_server.structured_output.matcher import CompiledGrammar, GrammarError
from lorax_server.structured_output.vocabulary import Vocabulary

MAX_CACHED_VOCABULARIES = 8


class _MallInfo(ctypes.Structure):
    """The result of glibc's `mallinfo2`: ten sizes, of which `hblkhd` is at index 4 and `uordblks` at index 7."""

    _fields_ = [("sizes", ctypes.c_size_t * 10)]


def compile_grammar(grammar: str, num_ids: int, special_tokens: Sequence[tuple[int, bytes]]) -> bytes:
    """Return the memory of the compiled grammar in bytes, as text. Raise `TaskError` if the grammar is invalid.

    The vocabulary has all single bytes and the special tokens. Validity, compile time and memory hardly depend on the
    other tokens, and a new worker builds this vocabulary in milliseconds.
    """
    vocabulary = _make_vocabulary(num_ids, tuple(special_tokens))
    before = _allocated_bytes()
    try:
        compiled = CompiledGrammar(vocabulary, grammar)
    except GrammarError as error:
        raise TaskError(str(error)) from None
    num_bytes = max(0, _allocated_bytes() - before)
    del compiled
    return str(num_bytes).encode()


@lru_cache(MAX_CACHED_VOCABULARIES)
def _make_vocabulary(num_ids: int, special_tokens: tuple[tuple[int, bytes], ...]) -> Vocabulary:
    tokens = [b""] * num_ids + [bytes([value]) for value in range(256)]
    for token_id, content in special_tokens:
        tokens[token_id] = content
    return Vocabulary(tokens, [token_id for token_id, _ in special_tokens], slices=())


def _allocated_bytes() -> int:
    """Return the number of bytes allocated with malloc, or 0 without glibc."""
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is None:
        return 0
    function.restype = _MallInfo
    sizes = function().sizes
    return int(sizes[4] + sizes[7])
