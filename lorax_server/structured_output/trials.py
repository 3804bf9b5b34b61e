"""Trial compiles: the engine compiles a grammar only after the sandbox has compiled it under limits."""

import hashlib
import math
import threading
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from cachetools import TLRUCache

from lorax_server.errors import InputError
from lorax_server.sandbox.sandbox import Sandbox
from lorax_server.sandbox.task import SandboxTask, TaskError, TaskKilledError, TaskTimeoutError
from lorax_server.types import Structure, TokenTable

TRIAL_TASK = SandboxTask(
    "lorax_server.structured_output.trial_task:compile_grammar",
    cpu_s=0.5,  # a new worker needs up to 0.1 s for the vocabulary
    memory_bytes=2**28,
    stack_bytes=4 * 2**20,  # a quarter of the engine's stack, so a grammar that passes cannot overflow it
    max_reply_bytes=2**12,
    niceness=10,  # forward passes have priority
    max_pending=16,
)
MAX_CACHED_OUTCOMES = 4096  # grammars
REJECTED_GRAMMAR_TTL_S = 60.0

_Outcome = int | str  # size of the compiled grammar in bytes, or the reason why it is rejected


class GrammarTrials:
    """Runs one trial compile per grammar and caches the outcome. All methods are thread-safe."""

    def __init__(self, sandbox: Sandbox, task: SandboxTask = TRIAL_TASK) -> None:
        self._sandbox = sandbox
        self._task = task
        self._lock = threading.RLock()  # guards the fields below; reentrant, as callbacks may run within `submit`
        self._outcomes: TLRUCache[str, _Outcome] = TLRUCache(MAX_CACHED_OUTCOMES, _find_expiry)  # by digest
        self._running: dict[tuple[str, str], Future[bytes]] = {}  # by digest and tenant

    def submit(self, structure: Structure, table: TokenTable, tenant: str = "") -> "Future[Structure]":
        """Return a future with the structure and its size, or with an `InputError` if the trial compile fails."""
        result = Future[Structure]()
        digest = hashlib.sha256(f"{table.digest}\n{structure.grammar}".encode()).hexdigest()
        with self._lock:
            if (known := self._outcomes.get(digest)) is not None:
                _settle_result(result, structure, known)
                return result
            trial = self._running.get((digest, tenant))  # requests with the same new grammar share one trial
            if trial is None:
                special_tokens = list(zip(table.special_ids, table.special_tokens, strict=True))
                args = structure.grammar, len(table.lengths) // 4, special_tokens
                trial = self._running[digest, tenant] = self._sandbox.submit(self._task, *args, tenant=tenant)
                trial.add_done_callback(partial(self._remember, digest, tenant))
        trial.add_done_callback(lambda trial: _settle_result(result, structure, self._read_outcome(trial)))
        return result

    def _remember(self, digest: str, tenant: str, trial: "Future[bytes]") -> None:
        outcome = self._read_outcome(trial)
        with self._lock:
            del self._running[digest, tenant]
            if not isinstance(outcome, BaseException):
                self._outcomes[digest] = outcome

    def _read_outcome(self, trial: "Future[bytes]") -> _Outcome | BaseException:
        """Return the trial's outcome, or the error if the grammar did not cause it (for example, a busy sandbox)."""
        error = trial.exception()
        if error is None:
            return int(trial.result())
        if isinstance(error, TaskTimeoutError):
            return f"the grammar takes longer than {self._task.cpu_s:g} s to compile; simplify it"
        if isinstance(error, TaskKilledError):
            return "the grammar is too deep or too large to compile; simplify it"
        return str(error) if isinstance(error, TaskError) else error


def _find_expiry(_digest: str, outcome: _Outcome, now: float) -> float:
    return now + REJECTED_GRAMMAR_TTL_S if isinstance(outcome, str) else math.inf


def _settle_result(result: "Future[Structure]", structure: Structure, outcome: _Outcome | BaseException) -> None:
    if not result.set_running_or_notify_cancel():
        return  # the caller has cancelled
    if isinstance(outcome, int):
        result.set_result(replace(structure, num_bytes=outcome))
    else:
        result.set_exception(InputError(outcome) if isinstance(outcome, str) else outcome)
