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
MAX_TRIALS, TRIAL_S = 1024, 60.0
_Key = tuple[str, str]  # a vocabulary's digest, a grammar


class GrammarTrials:
    """Try grammars once each and remember the results. Any thread may use it."""

    def __init__(self, sandbox: Sandbox, task: SandboxTask = TRIAL) -> None:
        self._sandbox = sandbox
        self._task = task
        self._lock = threading.RLock()  # guards all below; a trial that is done calls back at once
        self._passed: LRUCache[_Key, Future[bytes]] = LRUCache(MAX_PASSED)
        self._recent: TTLCache[tuple[_Key, str], Future[bytes]] = TTLCache(MAX_TRIALS, TRIAL_S)  # also by tenant

    def submit(self, structure: Structure, table: TokenTable, tenant: str = "") -> "Future[Structure]":
        """Return the structure with its size, or an `InputError` if it cannot be compiled under the limits."""
        key = table.digest, structure.grammar
        with self._lock:
            trial = self._passed.get(key) or self._recent.get((key, tenant))
            if trial is None:  # requests with the same new grammar share one trial
                special_tokens = list(zip(table.special_ids, table.special_tokens, strict=True))
                args = structure.grammar, len(table.lengths) // 4, special_tokens
                trial = self._recent[key, tenant] = self._sandbox.submit(self._task, *args, tenant=tenant)
                trial.add_done_callback(partial(self._conclude, key, tenant))
        result = Future[Structure]()
        trial.add_done_callback(partial(_settle, structure, result))
        return result

    def _conclude(self, key: _Key, tenant: str, trial: "Future[bytes]") -> None:
        with self._lock:
            if trial.exception() is None:
                self._passed[key] = trial
            elif not isinstance(trial.exception(), TaskError | TaskKilledError):  # it may pass next time
                self._recent.pop((key, tenant), None)


def _settle(structure: Structure, result: "Future[Structure]", trial: "Future[bytes]") -> None:
    if not result.set_running_or_notify_cancel():
        return  # the caller has left
    failure = trial.exception()
    if failure is None:
        result.set_result(replace(structure, num_bytes=int(json.loads(trial.result())["num_bytes"])))
    elif isinstance(failure, TaskTimeError):
        limit_s = f"{TRIAL.cpu_s:g} s"
        result.set_exception(InputError(f"the grammar takes longer than {limit_s} to compile; simplify it"))
    elif isinstance(failure, TaskKilledError):
        result.set_exception(InputError("the grammar is too deep or too large to compile; simplify it"))
    else:
        result.set_exception(InputError(str(failure)) if isinstance(failure, TaskError) else failure)
