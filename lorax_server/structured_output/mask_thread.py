"""Threads that compute token masks and compile grammars beside the engine loop."""

import heapq
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

STACK_BYTES = 16 * 2**20  # llguidance recurses; the trial compile has a quarter of this
Job = Callable[[], None]

logger = logging.getLogger(__name__)
_starting = threading.Lock()  # `threading.stack_size` is a setting of the whole process


class JobThread:
    """Run jobs on one thread, urgent ones first."""

    def __init__(self, name: str, niceness: int = 0) -> None:
        """`niceness` lowers the priority of the thread, on systems that have thread priorities."""
        self._niceness = niceness
        self._changed = threading.Condition()
        self._jobs: list[tuple[int, int, Job]] = []  # a heap: priority, order of arrival
        self._numbers = itertools.count()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        with _starting:
            before = threading.stack_size(STACK_BYTES)
            try:
                self._thread.start()
            finally:
                threading.stack_size(before)

    def put(self, jobs: Iterable[tuple[int, Job]]) -> None:
        """Queue jobs with their priorities; the lowest runs first."""
        with self._changed:
            for priority, job in jobs:
                heapq.heappush(self._jobs, (priority, next(self._numbers), job))
            self._changed.notify()

    def close(self) -> None:
        """Finish the job that is running, drop the others."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        with suppress(OSError):  # only Linux has thread priorities
            thread_id = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread_id, os.getpriority(os.PRIO_PROCESS, thread_id) + self._niceness)
        while True:
            with self._changed:
                while not self._jobs and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                *_, job = heapq.heappop(self._jobs)
            try:
                job()
            except Exception:
                logger.exception("a structured-output job failed")
            del job
