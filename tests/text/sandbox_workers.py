"""Find the sandbox workers of this process."""

import asyncio
import time

import psutil

from tests.processes import has_role

WAIT_S = 120.0
PAUSE_S = 0.005


def find_workers() -> list[psutil.Process]:
    """Return the running sandbox workers that this process has started."""
    return [child for child in psutil.Process().children() if _is_worker(child)]


def _is_worker(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and has_role(process, "sandbox")
    except psutil.NoSuchProcess:
        return False


async def wait_until_busy(worker: psutil.Process) -> None:
    """Wait until a worker runs a task, which starts a second thread."""
    deadline = time.monotonic() + WAIT_S
    while worker.num_threads() < 2:
        assert time.monotonic() < deadline, "the worker does not run a task"
        await asyncio.sleep(PAUSE_S)
