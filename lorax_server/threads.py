"""A pool of daemon threads, and helpers for futures."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
Combined = TypeVar("Combined")


class DaemonThreads:
    """A pool of at most `limit` daemon threads, started on demand. Running work does not delay process exit."""

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._num_started = 0
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    def submit(self, work: Callable[[], None]) -> None:
        if self._num_started < self._limit:
            self._start()
        self._work.put(work)

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` on a pool thread and return its result. Cancellation does not stop work that has started."""
        result: Future[T] = Future()
        self.submit(partial(_settle, result, work))
        return await asyncio.wrap_future(result)

    def _start(self) -> None:
        try:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
            self._num_started += 1
        except RuntimeError:  # no more threads are available
            if not self._num_started:
                raise

    def close(self) -> None:
        for _ in range(self._num_started):
            self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # release the function and its arguments while the thread is idle


def _settle(future: "Future[T]", work: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)


def gather(
    futures: Sequence["Future[T]"],
    combine: Callable[[list[T]], Combined],
    copy_error: Callable[[BaseException], BaseException],
) -> "Future[Combined]":
    """Return a future for the combined results or the first error.

    The error is copied, because raising an exception modifies its traceback.
    """
    outcome: Future[Combined] = Future()
    lock, num_missing = threading.Lock(), len(futures)

    def arrive(future: "Future[T]") -> None:
        nonlocal num_missing
        error = future.exception()
        with lock:
            if num_missing == 0:
                return
            num_missing = 0 if error is not None else num_missing - 1
            is_over = num_missing == 0
        if not is_over or not outcome.set_running_or_notify_cancel():
            return
        if error is not None:
            outcome.set_exception(copy_error(error))
            return
        try:
            outcome.set_result(combine([future.result() for future in futures]))
        except Exception as bug:
            outcome.set_exception(bug)

    for future in futures:
        future.add_done_callback(arrive)
    return outcome


def completed_future(result: T) -> "Future[T]":
    future: Future[T] = Future()
    future.set_result(result)
    return future


def failed_future(error: BaseException) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_exception(error)
    return future
