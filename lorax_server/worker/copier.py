"""Copies adapters from pageable host memory to a GPU while steps run.

Asynchronous copies need pinned memory. Pinning is slow and blocks other driver calls, so a few staging buffers are
pinned at startup and all copies go through them in chunks.
"""

import threading
from collections.abc import Callable
from itertools import cycle
from queue import SimpleQueue
from typing import NamedTuple

import torch

from lorax_server.errors import EngineError

NUM_BUFFERS, BUFFER_BYTES = 4, 8 * 2**20
COPIER_CHECK_INTERVAL_S = 0.1  # interval at which a waiting thread checks for a copier failure


class CopyStream:
    """A CUDA stream with the lowest priority, for copies from pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=0)  # the lowest priority

    def pin(self, num_bytes: int) -> torch.Tensor:
        """Allocate and return pinned host memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def wait_for_caller_stream(self) -> None:
        """Make later copies wait for all work that is queued on the caller's stream."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
        """Start a copy, and return an event that is recorded after the copy."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            end = torch.cuda.Event(blocking=True)  # waiting threads sleep instead of spinning
            self._stream.record_event(end)
        return end


class CopyHandle:
    """The state of one copy, which `Copier.start` returns."""

    def __init__(self) -> None:
        self.is_done = False
        self.end: torch.cuda.Event | None = None  # set once all chunks are submitted
        self.is_submitted = threading.Event()


class _Task(NamedTuple):
    target: torch.Tensor
    source: torch.Tensor
    copy_handle: CopyHandle


class _Buffer:
    """A pinned staging buffer. It can be reused after `copied_event`."""

    def __init__(self, pinned: torch.Tensor) -> None:
        self.pinned = pinned
        self.copied_event: torch.cuda.Event | None = None


class Copier:
    """Copies adapters to the GPU in order, on a background thread."""

    def __init__(
        self, copy_stream: CopyStream, num_buffers: int = NUM_BUFFERS, buffer_bytes: int = BUFFER_BYTES
    ) -> None:
        self.notify: Callable[[], None] = lambda: None  # called on the copier thread after each copy or failure
        self._copy_stream = copy_stream
        self._buffer_bytes = buffer_bytes
        self._buffers = cycle(
            [_Buffer(part) for part in copy_stream.pin(num_buffers * buffer_bytes).split(buffer_bytes)]
        )
        self._failure: Exception | None = None  # the copier stops after a failure
        self._is_closed = False
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="copy adapters", daemon=True)
        self._thread.start()

    def wait_for_caller_stream(self) -> None:
        """Make later copies wait, on the device, for all work that is queued on the caller's stream."""
        self._copy_stream.wait_for_caller_stream()

    def start(self, target: torch.Tensor, source: torch.Tensor) -> CopyHandle:
        """Start copying `source` to `target` on the device. `source` must not change until the copy is done."""
        self.check()
        copy_handle = CopyHandle()
        self._tasks.put(_Task(target, source, copy_handle))
        return copy_handle

    def wait_for(self, copy_handle: CopyHandle) -> None:
        """Make the caller's stream wait for a copy. Blocks the caller only until the copy is submitted."""
        if copy_handle.is_done:
            return
        while not copy_handle.is_submitted.wait(COPIER_CHECK_INTERVAL_S):
            self.check()
        assert copy_handle.end is not None
        copy_handle.end.wait()

    def check(self) -> None:
        """Raise EngineError if the copier has failed or is closed."""
        if self._failure is not None:
            raise EngineError("copying adapters to the device failed") from self._failure
        if self._is_closed:
            raise EngineError("the adapter copier is closed")

    def close(self) -> None:
        """Stop the thread after the current copy."""
        self._is_closed = True
        self._tasks.put(None)
        self._thread.join(timeout=10)

    def _run(self) -> None:
        try:
            while (task := self._tasks.get()) is not None and not self._is_closed:
                self._run_task(task)
                self.notify()
                del task  # release the adapter's memory while waiting for the next task
        except Exception as error:  # reported by `check`
            self._failure = error
            self.notify()

    def _run_task(self, task: _Task) -> None:
        """Copy an adapter. The next chunk is staged while previous chunks are copied to the device."""
        source, target = task.source.view(torch.uint8), task.target.view(torch.uint8)
        copied_event: torch.cuda.Event | None = None
        for start in range(0, len(source), self._buffer_bytes):
            piece = slice(start, min(start + self._buffer_bytes, len(source)))
            count = piece.stop - piece.start
            buffer = next(self._buffers)
            if buffer.copied_event is not None:
                buffer.copied_event.synchronize()
            buffer.pinned[:count].copy_(source[piece])  # uses several threads, and releases the GIL
            copied_event = buffer.copied_event = self._copy_stream.copy(target[piece], buffer.pinned[:count])
        assert copied_event is not None, "nothing to copy"
        task.copy_handle.end = copied_event
        task.copy_handle.is_submitted.set()
        copied_event.synchronize()
        task.copy_handle.is_done = True
