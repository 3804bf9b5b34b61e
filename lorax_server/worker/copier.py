"""Copies from ordinary host memory to a GPU, beside the steps of the model.

Pinned memory is what a GPU can copy from on its own. To pin memory takes long and holds up all that use the driver, so
a little is pinned once, at the start, and all copies go through it in pieces.
"""

import threading
from collections.abc import Callable
from itertools import cycle
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import torch

from lorax_server.errors import EngineError

NUM_BUFFERS, BUFFER_BYTES = 4, 8 * 2**20
CHECK_S = 0.1  # between two looks at whether the copier still works, for a thread that waits for it


class StreamLane:
    """Copies from pinned memory to a GPU, in order, on a stream of the lowest priority."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=0)  # the lowest that there is

    def pin(self, num_bytes: int) -> torch.Tensor:
        """Allocate memory that this lane can copy from."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def follow_caller(self) -> None:
        """Copy nothing more until the caller's stream has done its work so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
        """Start a copy. Return the event of its end."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            end = torch.cuda.Event(blocking=True)  # a thread that waits sleeps
            self._stream.record_event(end)
        return end


class Arrival:
    """The end of one copy."""

    def __init__(self) -> None:
        self.is_there = False  # all of it
        self.end: torch.cuda.Event | None = None  # once all pieces have been handed to the lane
        self.has_end = threading.Event()


class _Task(NamedTuple):
    target: torch.Tensor
    source: torch.Tensor
    arrival: Arrival


class _Buffer:
    """A piece of pinned memory. The lane reads it until `mark`."""

    def __init__(self, pinned: torch.Tensor) -> None:
        self.pinned = pinned
        self.bytes = pinned.numpy()
        self.mark: torch.cuda.Event | None = None


class Copier:
    """Makes copies on a thread of its own, one after the other. Who asks for one waits for nothing."""

    def __init__(self, lane: StreamLane, num_buffers: int = NUM_BUFFERS, buffer_bytes: int = BUFFER_BYTES) -> None:
        self.notify: Callable[[], None] = lambda: None  # called, on the thread, when a copy has arrived or failed
        self._lane = lane
        self._buffer_bytes = buffer_bytes
        self._buffers = cycle([_Buffer(part) for part in lane.pin(num_buffers * buffer_bytes).split(buffer_bytes)])
        self._failure: Exception | None = None  # after which nothing is copied
        self._is_closed = False
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="copy adapters", daemon=True)
        self._thread.start()

    def follow_caller(self) -> None:
        """Let the copies asked for from now on wait, on the device, for what the caller's stream was given so far."""
        self._lane.follow_caller()

    def begin(self, target: torch.Tensor, source: torch.Tensor) -> Arrival:
        """Copy all of `source`, which must not change, to `target` on the device."""
        self.check()
        arrival = Arrival()
        self._tasks.put(_Task(target, source, arrival))
        return arrival

    def wait_for(self, arrival: Arrival) -> None:
        """Let the caller's stream wait, on the device, for a copy. The caller waits until the copy has been issued."""
        if arrival.is_there:
            return
        while not arrival.has_end.wait(CHECK_S):
            self.check()
        assert arrival.end is not None
        arrival.end.wait()

    def check(self) -> None:
        """Raise if copies fail, and so will never arrive."""
        if self._failure is not None:
            raise EngineError("adapters cannot be copied to the device any more") from self._failure
        if self._is_closed:
            raise EngineError("adapters are not copied any more: the worker is stopped")

    def close(self) -> None:
        """End the thread, after the copy that it is at."""
        self._is_closed = True
        self._tasks.put(None)
        self._thread.join(timeout=10)

    def _run(self) -> None:
        try:
            while (task := self._tasks.get()) is not None and not self._is_closed:
                self._carry(task)
                self.notify()
                del task  # or the thread would hold an adapter's memory while it waits for the next
        except Exception as error:  # of the device: others must hear of it
            self._failure = error
            self.notify()

    def _carry(self, task: _Task) -> None:
        """Make one copy, and wait for its end. The next piece is staged while the lane copies the ones before."""
        source, target = task.source.view(torch.uint8), task.target.view(torch.uint8)
        staged = source.numpy()
        mark: torch.cuda.Event | None = None
        for start in range(0, len(staged), self._buffer_bytes):
            piece = slice(start, min(start + self._buffer_bytes, len(staged)))
            count = piece.stop - piece.start
            buffer = next(self._buffers)
            if buffer.mark is not None:
                buffer.mark.synchronize()
            np.copyto(buffer.bytes[:count], staged[piece])  # without the interpreter's lock, and on this thread alone
            mark = buffer.mark = self._lane.copy(target[piece], buffer.pinned[:count])
        assert mark is not None, "nothing to copy"
        task.arrival.end = mark
        task.arrival.has_end.set()
        mark.synchronize()
        task.arrival.is_there = True
