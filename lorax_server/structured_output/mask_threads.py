"""Threads on which the engine process compiles grammars and computes token masks."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

STACK_BYTES = 16 * 2**20  # llguidance recurses; a trial compile has a quarter of this stack
COMPILE_NICENESS = 10  # forward passes have priority, but compiles must finish on a busy machine


class MaskThreads:
    """Three threads and an llguidance thread pool, all with large stacks.

    One thread computes the masks of fast grammars in batches. A second thread computes all other masks one by one, so
    fast masks do not wait for slow masks.
    """

    def __init__(self, num_threads: int) -> None:
        from llguidance import LLExecutor  # noqa: PLC0415 - an engine can run without llguidance

        os.environ["RUST_MIN_STACK"] = str(STACK_BYTES)  # read when the pool's threads start
        self.executor = LLExecutor(num_threads)
        self.fast_thread = start_thread("masks")
        self.slow_thread = start_thread("slow-masks")
        self.compile_thread = start_thread("grammar-compiler", COMPILE_NICENESS)

    def close(self) -> None:
        for thread in (self.fast_thread, self.slow_thread, self.compile_thread):
            thread.shutdown(cancel_futures=True)


def start_thread(name: str, niceness: int = 0) -> ThreadPoolExecutor:
    """Start an executor with one thread that has a large stack."""
    thread = ThreadPoolExecutor(1, name, initializer=_lower_priority, initargs=(niceness,))
    default_bytes = threading.stack_size(STACK_BYTES)
    thread.submit(int)  # the thread starts with the first job
    threading.stack_size(default_bytes)
    return thread


def _lower_priority(niceness: int) -> None:
    with suppress(OSError):  # only Linux has thread priorities
        thread_id = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread_id, os.getpriority(os.PRIO_PROCESS, thread_id) + niceness)
