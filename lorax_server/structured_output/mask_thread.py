"""Threads that compute token masks and compile grammars beside the engine loop."""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

STACK_BYTES = 16 * 2**20  # llguidance recurses; the trial compile has a quarter of this
Item = TypeVar("Item")

logger = logging.getLogger(__name__)
_starting = threading.Lock()  # `threading.stack_size` is a setting of the whole process


class WorkThread(Generic[Item]):
    """Hand items to a function on another thread: all that are queued, or one at a time."""

    def __init__(self, name: str, work: Callable[[Sequence[Item]], None], *, max_items: int, niceness: int = 0) -> None:
        self._work = work
        self._max_items = max_items
        self._niceness = niceness
        self._changed = threading.Condition()  # guards the next two
        self._items: list[Item] = []
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        with _starting:
            before = threading.stack_size(STACK_BYTES)
            try:
                self._thread.start()
            finally:
                threading.stack_size(before)

    def put(self, items: Iterable[Item], *, is_urgent: bool = False) -> None:
        """Queue items, urgent ones before all others."""
        with self._changed:
            self._items = [*items, *self._items] if is_urgent else [*self._items, *items]
            self._changed.notify()

    def close(self) -> None:
        """Finish the items that are being worked on, drop the others."""
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
                while not self._items and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                items, self._items = self._items[: self._max_items], self._items[self._max_items :]
            self._work(items)
