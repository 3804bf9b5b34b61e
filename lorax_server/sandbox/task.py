"""Describe the tasks that run in a sandbox, their limits, and how they fail."""

from typing import NamedTuple

# Variables that a worker inherits. All others may hold secrets.
ENVIRONMENT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")
MAX_ERROR = 2000  # characters: untrusted code may raise errors of any length


class SandboxTask(NamedTuple):
    """A function for a sandbox worker, and its limits."""

    function: str  # "module:name"; it returns bytes and raises `TaskError` for errors that the user caused
    cpu_s: float  # CPU time, so that a busy machine is not charged to the task
    memory_bytes: int  # beyond what the worker uses when the task starts
    wall_s: float = 30.0
    stack_bytes: int = 8 * 2**20
    max_reply_bytes: int = 2**26
    niceness: int = 0
    is_long: bool = False  # at most one runs at a time, so that it cannot occupy all workers
    max_pending: int | None = None  # tasks of one tenant that are queued or running; None: unlimited


class TaskError(Exception):
    """A task that failed because of its input. The message is for the user."""


class TaskKilledError(Exception):
    """A task that crashed its worker or exceeded a limit."""


class TaskTimeError(TaskKilledError):
    """A task that used more than its CPU time."""
