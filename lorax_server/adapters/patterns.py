"""Untrusted regular expressions of adapters: they mean what they mean to PEFT, and have a time budget."""

import re
import re._parser as re_parser  # type: ignore[import-not-found]
import time
from typing import Any

import regex

from lorax_server.errors import AdapterError

MAX_LENGTH = 2000
BUDGET_S = 10.0  # for all patterns of an adapter together
# Nodes of a compiled pattern. `regex` takes up to 2 us and 300 bytes for each, and neither can be limited.
MAX_NODES = 20_000
# PEFT uses `re`, which cannot be stopped. `regex` can, and reads patterns alike except for these. With the flag `x` it
# skips other characters than `re` does, also in the count of a repeat, so that nodes cannot be counted.
ONLY_REGEX = re.compile(r"\{[^{}]*[a-z][^{}]*\}|\[:|(?s:\(\?[a-zA-Z-]*x.*[{+])")


class Patterns:
    """Compiles each pattern once, and stops when all of them together have taken too long."""

    def __init__(self, adapter_id: str) -> None:
        self._adapter_id = adapter_id
        self._compiled: dict[str, Any] = {}
        self._seconds_left = BUDGET_S

    def match(self, pattern: str, text: str) -> Any:
        return self._run("match", pattern, text)

    def fullmatch(self, pattern: str, text: str) -> bool:
        return self._run("fullmatch", pattern, text) is not None

    def _run(self, method: str, pattern: str, text: str) -> Any:
        started = time.monotonic()
        if self._seconds_left <= 0:
            raise self._refuse(pattern, "and those before it take too long")
        try:
            if pattern not in self._compiled:
                self._compiled[pattern] = self._compile(pattern)
            return getattr(self._compiled[pattern], method)(text, timeout=self._seconds_left)
        except (TimeoutError, MemoryError) as error:
            raise self._refuse(pattern, "takes too long") from error
        finally:
            self._seconds_left -= time.monotonic() - started

    def _compile(self, pattern: str) -> Any:
        if len(pattern) > MAX_LENGTH or ONLY_REGEX.search(pattern):
            raise self._refuse(pattern, "is too long or not plain enough")
        try:
            # Only parsed: `re` takes milliseconds to compile a set of characters.
            num_nodes = _count_nodes(re_parser.parse(pattern))
            if num_nodes > MAX_NODES:
                raise self._refuse(pattern, f"has {num_nodes} nodes with its repeats; at most {MAX_NODES} are allowed")
            return regex.compile(pattern)
        except (re.error, regex.error, ValueError, OverflowError, RecursionError, MemoryError) as error:
            raise self._refuse(pattern, f"is no regular expression: {error}") from error

    def _refuse(self, pattern: str, reason: str) -> AdapterError:
        shown = pattern if len(pattern) <= 80 else f"{pattern[:77]}..."
        return AdapterError(f"adapter {self._adapter_id!r}: pattern {shown!r} {reason}")


def _count_nodes(node: Any) -> int:
    """Count the nodes of a pattern that `re` has parsed, as `regex` compiles them: it unrolls required repeats."""
    if isinstance(node, re_parser.SubPattern):
        return sum(map(_count_nodes, node.data))
    match node:
        case (re_parser.MAX_REPEAT | re_parser.MIN_REPEAT | re_parser.POSSESSIVE_REPEAT, (int(least), _, repeated)):
            return (int(least) + 1) * (1 + _count_nodes(repeated))
        case (re_parser.ASSERT | re_parser.ASSERT_NOT, (-1, preceding)) if len(set(preceding.getwidth())) == 2:
            raise re.error("look-behind requires fixed-width pattern")
        case tuple() | list():
            return 1 + sum(map(_count_nodes, node))
    return 0
