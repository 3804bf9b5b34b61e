"""Trial compiles: a grammar goes to the engine only after the sandbox has compiled it under limits."""

import json
import threading
from concurrent.futures import Future
from dataclasses import replace

from cachetools import LRUCache, TTLCache

from lorax_server.errors import InputError
from lorax_server.sandbox.sandbox import Sandbox
from lorax_server.sandbox.task import SandboxTask, TaskError, TaskKilledError, TaskTimeError
from lorax_server.types import Structure, TokenTable

TRIAL = SandboxTask(
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
    """Try grammars once each and remember the results. Any thread may use it."""

    def __init__(self, sandbox: Sandbox, task: SandboxTask = TRIAL) -> None:
        self._sandbox = sandbox
        self._task = task
        self._lock = threading.Lock()  # guards all below
        self._passed: LRUCache[_Key, int] = LRUCache(MAX_PASSED)  # bytes that the compiled grammar takes
        self._rejected: TTLCache[_Key, str] = TTLCache(MAX_REJECTED, REJECT_S)

    def submit(self, structure: Structure, table: TokenTable, tenant: str = "") -> "Future[Structure]":
        """Return the structure with its size, or an `InputError` if it cannot be compiled under the limits."""
        key, result = (table.digest, structure.grammar), Future[Structure]()
        with self._lock:
            num_bytes, rejection = self._passed.get(key), self._rejected.get(key)
        if num_bytes is not None:
            result.set_result(replace(structure, num_bytes=num_bytes))
        elif rejection is not None:
            result.set_exception(InputError(rejection))
        else:
            special_tokens = list(zip(table.special_ids, table.special_tokens, strict=True))
            args = structure.grammar, len(table.lengths) // 4, special_tokens
            trial = self._sandbox.submit(self._task, *args, tenant=tenant)
            trial.add_done_callback(lambda done: self._conclude(done, key, structure, result))
        return result

    def _conclude(self, trial: "Future[bytes]", key: _Key, structure: Structure, result: "Future[Structure]") -> None:
        if not result.set_running_or_notify_cancel():
            return
        try:
            num_bytes = int(json.loads(trial.result())["num_bytes"])
        except (TaskError, TaskKilledError) as error:
            rejection = _describe(error)
            with self._lock:
                self._rejected[key] = rejection
            result.set_exception(InputError(rejection))
        except BaseException as error:
            result.set_exception(error)
        else:
            with self._lock:
                self._passed[key] = num_bytes
            result.set_result(replace(structure, num_bytes=num_bytes))


def _describe(error: Exception) -> str:
    if isinstance(error, TaskTimeError):
        return f"the grammar takes longer than {TRIAL.cpu_s:g} s to compile; simplify it"
    if isinstance(error, TaskKilledError):
        return "the grammar is too deep or too large to compile; simplify it"
    return str(error)
