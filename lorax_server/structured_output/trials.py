"""Trial compiles: a grammar goes to the engine only after the sandbox has compiled it under limits."""

import hashlib
import json
import threading
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from cachetools import LRUCache, TTLCache

from lorax_server.errors import InputError
from lorax_server.sandbox.sandbox import Sandbox
from lorax_server.sandbox.task import SandboxTask, TaskError, TaskKilledError, TaskTimeError
from lorax_server.types import Structure, TokenTable

TRIAL = SandboxTask(
    "lorax_server.structured_output.trial_task:compile_grammar",
    cpu_s=0.5,  # of which a new worker needs up to 0.1 s for the vocabulary
    memory_bytes=2**28,
    stack_bytes=4 * 2**20,  # a quarter of the engine's, so that a grammar that passes cannot overflow there
    max_reply_bytes=2**12,
    niceness=10,  # forwards of the model go first
    max_pending=16,
)
MAX_PASSED = 4096
MAX_REJECTED, REJECT_S = 1024, 60.0


class GrammarTrials:
    """Try grammars once each and remember the results. Any thread may use it."""

    def __init__(self, sandbox: Sandbox, task: SandboxTask = TRIAL) -> None:
        self._sandbox = sandbox
        self._task = task
        self._lock = threading.RLock()  # guards all below; a trial that is done calls back at once
        self._passed: LRUCache[str, int] = LRUCache(MAX_PASSED)  # bytes that the compiled grammar takes, by digest
        self._rejected: TTLCache[str, str] = TTLCache(MAX_REJECTED, REJECT_S)
        self._running: dict[tuple[str, str], Future[bytes]] = {}  # by digest and tenant

    def submit(self, structure: Structure, table: TokenTable, tenant: str = "") -> "Future[Structure]":
        """Return the structure with its size, or an `InputError` if it cannot be compiled under the limits."""
        result = Future[Structure]()
        digest = hashlib.sha256(f"{table.digest}\n{structure.grammar}".encode()).hexdigest()
        with self._lock:
            if digest in self._passed:
                result.set_result(replace(structure, num_bytes=self._passed[digest]))
                return result
            if (reason := self._rejected.get(digest)) is not None:
                result.set_exception(InputError(reason))
                return result
            trial = self._running.get((digest, tenant))  # requests with the same new grammar share one trial
            if trial is None:
                special_tokens = list(zip(table.special_ids, table.special_tokens, strict=True))
                args = structure.grammar, len(table.lengths) // 4, special_tokens
                trial = self._running[digest, tenant] = self._sandbox.submit(self._task, *args, tenant=tenant)
                trial.add_done_callback(partial(self._conclude, digest, tenant))
        trial.add_done_callback(partial(self._settle, structure, result))
        return result

    def _conclude(self, digest: str, tenant: str, trial: "Future[bytes]") -> None:
        """Remember a result, but not that the sandbox was busy."""
        failure = trial.exception()
        with self._lock:
            del self._running[digest, tenant]
            if failure is None:
                self._passed[digest] = _read_size(trial)
            elif isinstance(failure, TaskError | TaskKilledError):
                self._rejected[digest] = self._describe(failure)

    def _settle(self, structure: Structure, result: "Future[Structure]", trial: "Future[bytes]") -> None:
        if not result.set_running_or_notify_cancel():
            return  # the caller has left
        failure = trial.exception()
        if failure is None:
            result.set_result(replace(structure, num_bytes=_read_size(trial)))
        elif isinstance(failure, TaskError | TaskKilledError):
            result.set_exception(InputError(self._describe(failure)))
        else:
            result.set_exception(failure)

    def _describe(self, failure: Exception) -> str:
        if isinstance(failure, TaskTimeError):
            return f"the grammar takes longer than {self._task.cpu_s:g} s to compile; simplify it"
        if isinstance(failure, TaskKilledError):
            return "the grammar is too deep or too large to compile; simplify it"
        return str(failure)


def _read_size(trial: "Future[bytes]") -> int:
    return int(json.loads(trial.result())["num_bytes"])
