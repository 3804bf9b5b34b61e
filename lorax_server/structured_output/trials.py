"""Trial compiles: a grammar goes to the engine only after the sandbox has compiled it under limits."""

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
_Key = tuple[str, str]  # a vocabulary's digest, a grammar


class GrammarTrials:
    """Try grammars once each and remember the results. Any thread may use it."""

    def __init__(self, sandbox: Sandbox, task: SandboxTask = TRIAL) -> None:
        self._sandbox = sandbox
        self._task = task
        self._lock = threading.Lock()  # guards all below
        self._passed: LRUCache[_Key, int] = LRUCache(MAX_PASSED)  # bytes that the compiled grammar takes
        self._rejected: TTLCache[_Key, str] = TTLCache(MAX_REJECTED, REJECT_S)
        self._waiting: dict[tuple[_Key, str], list[Future[int]]] = {}  # for a running trial, by grammar and tenant

    def submit(self, structure: Structure, table: TokenTable, tenant: str = "") -> "Future[Structure]":
        """Return the structure with its size, or an `InputError` if it cannot be compiled under the limits."""
        key, size, result = (table.digest, structure.grammar), Future[int](), Future[Structure]()
        size.add_done_callback(partial(_settle, structure, result))
        with self._lock:
            num_bytes, rejection = self._passed.get(key), self._rejected.get(key)
            waiting = self._waiting.get((key, tenant))
            if waiting is not None:  # requests with the same new grammar share one trial
                waiting.append(size)
                return result
            if num_bytes is None and rejection is None:
                special_tokens = list(zip(table.special_ids, table.special_tokens, strict=True))
                args = structure.grammar, len(table.lengths) // 4, special_tokens
                trial = self._sandbox.submit(self._task, *args, tenant=tenant)
                self._waiting[key, tenant] = [size]
        if num_bytes is not None:
            size.set_result(num_bytes)
        elif rejection is not None:
            size.set_exception(InputError(rejection))
        else:
            trial.add_done_callback(lambda done: self._conclude(done, key, tenant))
        return result

    def _conclude(self, trial: "Future[bytes]", key: _Key, tenant: str) -> None:
        num_bytes, failure = 0, trial.exception()
        if failure is None:
            num_bytes = int(json.loads(trial.result())["num_bytes"])
        with self._lock:
            if failure is None:
                self._passed[key] = num_bytes
            elif isinstance(failure, TaskError | TaskKilledError):
                self._rejected[key] = _describe(failure)
                failure = InputError(_describe(failure))
            waiting = self._waiting.pop((key, tenant))
        for size in waiting:
            if failure is None:
                size.set_result(num_bytes)
            else:
                size.set_exception(failure)


def _settle(structure: Structure, result: "Future[Structure]", size: "Future[int]") -> None:
    if not result.set_running_or_notify_cancel():
        return  # the caller has left
    failure = size.exception()
    if failure is None:
        result.set_result(replace(structure, num_bytes=size.result()))
    else:
        result.set_exception(failure)


def _describe(error: Exception) -> str:
    if isinstance(error, TaskTimeError):
        return f"the grammar takes longer than {TRIAL.cpu_s:g} s to compile; simplify it"
    if isinstance(error, TaskKilledError):
        return "the grammar is too deep or too large to compile; simplify it"
    return str(error)
