"""Threads that compute token masks and compile grammars beside the engine loop."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

STACK_BYTES = 16 * 2**20  # llguidance recurses; the trial compile has a quarter of this

_starting = threading.Lock()  # `threading.stack_size` is a setting of the whole process


def start_thread(name: str, niceness: int = 0) -> ThreadPoolExecutor:
    """Start a thread with a large stack, which runs the jobs that are submitted, one at a time."""
    thread = ThreadPoolExecutor(1, name, initializer=_lower_priority, initargs=(niceness,))
    with _starting:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.submit(int)  # an executor starts its thread with the first job
        finally:
            threading.stack_size(before)
    return thread


def _lower_priority(niceness: int) -> None:
    with suppress(OSError):  # only Linux has thread priorities
        thread_id = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread_id, os.getpriority(os.PRIO_PROCESS, thread_id) + niceness)
