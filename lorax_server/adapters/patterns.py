"""Matches untrusted regular expressions from adapter configs, with the same results as PEFT and within a time
budget.
"""

import re
import re._parser as re_parser  # type: ignore[import-not-found]
import time
from typing import Any

import regex

from lorax_server.errors import AdapterError

MAX_PATTERN_LENGTH = 2000
MATCH_BUDGET_S = 10.0  # limit for all patterns of one adapter together
# `regex` needs up to 2 us and 300 bytes to compile each pattern node, and cannot limit time or memory.
MAX_PATTERN_NODES = 20_000
# PEFT uses `re`, which has no timeout. `regex` has one, but it interprets this syntax differently. With the flag `x`,
# `regex` ignores different characters than `re`, including in repeat counts, so nodes cannot be counted.
INCOMPATIBLE_SYNTAX = re.compile(r"\{[^{}]*[a-z][^{}]*\}|\[:|(?s:\(\?[a-zA-Z-]*x.*[{+])")


class PatternMatcher:
    """Matches module names and compiles each pattern once. Raises AdapterError if the time budget is exceeded."""

    def __init__(self, adapter_id: str) -> None:
        self._adapter_id = adapter_id
        self._compiled: dict[str, Any] = {}
        self._seconds_left = MATCH_BUDGET_S

    def match(self, pattern: str, text: str) -> Any:
        return self._run_method("match", pattern, text)

    def fullmatch(self, pattern: str, text: str) -> bool:
        return self._run_method("fullmatch", pattern, text) is not None

    def _run_method(self, method: str, pattern: str, text: str) -> Any:
        started = time.monotonic()
        if self._seconds_left <= 0:
            raise self._error(pattern, "exceeds the time budget for all patterns")
        try:
            if pattern not in self._compiled:
                self._compiled[pattern] = self._compile(pattern)
            return getattr(self._compiled[pattern], method)(text, timeout=self._seconds_left)
        except (TimeoutError, MemoryError) as error:
            raise self._error(pattern, "takes too long") from error
        finally:
            self._seconds_left -= time.monotonic() - started

    def _compile(self, pattern: str) -> Any:
        if len(pattern) > MAX_PATTERN_LENGTH or INCOMPATIBLE_SYNTAX.search(pattern):
            raise self._error(pattern, "is too long or uses unsupported syntax")
        try:
            # Parse without compiling: `re` takes milliseconds to compile a character set.
            num_nodes = _count_nodes(re_parser.parse(pattern))
            if num_nodes > MAX_PATTERN_NODES:
                raise self._error(pattern, f"expands to {num_nodes} nodes; at most {MAX_PATTERN_NODES} are allowed")
            return regex.compile(pattern)
        except (re.error, regex.error, ValueError, OverflowError, RecursionError, MemoryError) as error:
            raise self._error(pattern, f"is not a valid regular expression: {error}") from error

    def _error(self, pattern: str, reason: str) -> AdapterError:
        short_pattern = pattern if len(pattern) <= 80 else f"{pattern[:77]}..."
        return AdapterError(f"adapter {self._adapter_id!r}: pattern {short_pattern!r} {reason}")


def _count_nodes(node: Any) -> int:
    """Return the number of pattern nodes that `regex` compiles, after unrolling required repeats."""
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
