"""Sandbox tasks, their limits and their errors."""

from typing import NamedTuple

# Environment variables that a worker inherits. Other variables may contain secrets.
ENVIRONMENT_VARIABLES = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "LORAX_PROCESS_TUNING")
MAX_ERROR_CHARACTERS = 2000  # longer messages are truncated, because untrusted code may raise any error


class SandboxTask(NamedTuple):
    """A function that runs in a sandbox worker, and its limits."""

    function: str  # "module:name"; the function returns bytes, and raises `TaskError` for user errors
    cpu_s: float  # limit for CPU time, which does not depend on other load
    memory_bytes: int  # limit in addition to the worker's memory at task start
    wall_s: float = 30.0
    stack_bytes: int = 8 * 2**20
    max_reply_bytes: int = 2**26
    niceness: int = 0
    is_long: bool = False  # only one long task runs at a time, so that long tasks cannot occupy all workers
    max_pending: int | None = None  # maximum queued and running tasks per tenant; None means unlimited


class TaskError(Exception):
    """Raised if a task fails because of its input. The message is shown to the user."""


class TaskKilledError(Exception):
    """Raised if a task crashes its worker or exceeds a limit."""


class TaskTimeoutError(TaskKilledError):
    """Raised if a task exceeds its CPU time."""
