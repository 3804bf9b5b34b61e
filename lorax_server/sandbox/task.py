"""Sandbox tasks, their limits and their errors."""

from typing import NamedTuple

# Environment variables that a worker inherits. Others may contain secrets.
ENVIRONMENT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")
MAX_ERROR_CHARACTERS = 2000  # untrusted code may raise errors with long messages


class SandboxTask(NamedTuple):
    """A function that runs in a sandbox worker, and its limits."""

    function: str  # "module:name"; it returns bytes and raises `TaskError` for errors that the user caused
    cpu_s: float  # CPU time does not depend on other load, unlike wall time
    memory_bytes: int  # in addition to the worker's memory at task start
    wall_s: float = 30.0
    stack_bytes: int = 8 * 2**20
    max_reply_bytes: int = 2**26
    niceness: int = 0
    is_long: bool = False  # at most one long task runs at a time, so they cannot occupy all workers
    max_pending: int | None = None  # queued or running tasks per tenant; None: unlimited


class TaskError(Exception):
    """The task failed because of its input. The message is for the user."""


class TaskKilledError(Exception):
    """The task crashed its worker or exceeded a limit."""


class TaskTimeError(TaskKilledError):
    """The task exceeded its CPU time."""
