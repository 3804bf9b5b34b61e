"""Trial compiles: a grammar goes to the engine only after the sandbox has compiled it under limits."""

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

from cachetools import LRUCache, TTLCache

from lorax_server.errors import InputError
from lorax_server.sandbox.sandbox import Sandbox
from lorax_server.sandbox.task import Task, TaskError, TaskKilledError, TaskTimeError
from lorax_server.types import Structure, TokenTable

TRIAL = Task(
    "lorax_server.structured_output.trial_task:compile_grammar",
    cpu_s=0.25,
    memory_bytes=2**28,
    stack_bytes=4 * 2**20,  # a quarter of the engine's, so that a grammar that passes cannot overflow there
    max_reply_bytes=2**12,
    niceness=10,  # forwards of the model go first
    max_pending=16,
)
MAX_PASSED = 4096
MAX_REJECTED, REJECT_S = 1024, 60.0
_Key = tuple[str, str]  # a vocabulary's digest, a grammar


class GrammarTrials:
    """Try grammars once each and remember the results. Belongs to one thread or event loop."""

    def __init__(self, sandbox: Sandbox, task: Task = TRIAL) -> None:
        self._sandbox = sandbox
        self._task = task
        self._passed: LRUCache[_Key, int] = LRUCache(MAX_PASSED)  # bytes that the compiled grammar takes
        self._rejected: TTLCache[_Key, str] = TTLCache(MAX_REJECTED, REJECT_S)
        self._running: dict[_Key, Future[bytes]] = {}

    async def check(self, structure: Structure, table: TokenTable, tenant: str = "") -> Structure:
        """Return the structure with its size. Raise `InputError` if it cannot be compiled under the limits."""
        known = self._recall(structure, table)
        if known is not None:
            return known
        future = self._submit(structure, table, tenant)
        await asyncio.wait([asyncio.wrap_future(future)])
        return self._conclude(structure, table, future)

    def check_now(self, structure: Structure, table: TokenTable) -> Structure:
        """Do the same for a caller without an event loop."""
        known = self._recall(structure, table)
        if known is not None:
            return known
        return self._conclude(structure, table, self._submit(structure, table, ""))

    def _recall(self, structure: Structure, table: TokenTable) -> Structure | None:
        key = table.digest, structure.grammar
        if (rejection := self._rejected.get(key)) is not None:
            raise InputError(rejection)
        num_bytes = self._passed.get(key)
        return None if num_bytes is None else replace(structure, num_bytes=num_bytes)

    def _submit(self, structure: Structure, table: TokenTable, tenant: str) -> "Future[bytes]":
        """Start a trial, or join one that is running: n completions of a request have one grammar."""
        key = table.digest, structure.grammar
        running = self._running.get(key)
        if running is None:
            args = structure.grammar, len(table.lengths) // 4, _list_special(table)
            running = self._running[key] = self._sandbox.submit(self._task, *args, tenant=tenant)
            running.add_done_callback(lambda _: self._running.pop(key, None))
        return running

    def _conclude(self, structure: Structure, table: TokenTable, future: "Future[bytes]") -> Structure:
        key = table.digest, structure.grammar
        try:
            num_bytes = int(json.loads(future.result())["num_bytes"])
        except (TaskError, TaskKilledError) as error:
            self._rejected[key] = rejection = _describe(error)
            raise InputError(rejection) from error
        self._passed[key] = num_bytes
        return replace(structure, num_bytes=num_bytes)


def _describe(error: Exception) -> str:
    if isinstance(error, TaskTimeError):
        return f"the grammar takes longer than {TRIAL.cpu_s:g} s to compile; simplify it"
    if isinstance(error, TaskKilledError):
        return "the grammar is too deep or too large to compile; simplify it"
    return str(error)


def _list_special(table: TokenTable) -> Sequence[tuple[int, bytes]]:
    return list(zip(table.special_ids, table.special_tokens, strict=True))
