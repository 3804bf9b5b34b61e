"""Copies adapters between pageable host memory and a GPU while steps run.

Asynchronous copies need pinned memory. Pinning is slow and blocks other driver calls, so a few staging buffers are
pinned at startup and all copies between host and GPU go through them in chunks.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import cycle
from queue import SimpleQueue
from typing import Any

import torch

from lorax_server.errors import EngineError
from lorax_server.kernels.device import is_host

NUM_BUFFERS, BUFFER_BYTES = 4, 8 * 2**20
COPIER_CHECK_INTERVAL_S = 0.1  # interval at which a waiting thread checks for a copier failure


class CopyStream:
    """A CUDA stream for copies and for packing adapters.

    To pack adapters quickly, it needs the priority of the step stream. With a lower priority, the few short kernels
    would wait for gaps between the kernels of steps. Priorities do not affect copies between host and device.
    """

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self._stream = torch.cuda.Stream(device, priority=priority)

    def use(self) -> AbstractContextManager[Any]:
        """Return a context manager that runs work on this stream."""
        return torch.cuda.stream(self._stream)

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


class _Buffer:
    """A pinned staging buffer. It can be reused after `copied_event`."""

    def __init__(self, pinned: torch.Tensor) -> None:
        self.pinned = pinned
        self.copied_event: torch.cuda.Event | None = None


class Copier:
    """Copies adapters to and from the GPU in order, on a background thread."""

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
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="copy adapters", daemon=True)
        self._thread.start()

    def wait_for_caller_stream(self) -> None:
        """Make later copies wait, on the device, for all work that is queued on the caller's stream."""
        self._copy_stream.wait_for_caller_stream()

    def use_stream(self) -> AbstractContextManager[Any]:
        """Return a context manager that runs work on the stream of the copies."""
        return self._copy_stream.use()

    def start(self, target: torch.Tensor, source: torch.Tensor) -> CopyHandle:
        """Start copying `source` to `target` on the device. `source` must not change until the copy is done."""
        if is_host(source.device):
            return self.start_all(target, [source])
        self.check()
        copy_handle = CopyHandle()
        copy_handle.end = self._copy_stream.copy(target, source)
        copy_handle.is_submitted.set()
        self._tasks.put(partial(self._finish, copy_handle, source))
        return copy_handle

    def start_all(self, target: torch.Tensor, sources: Sequence[torch.Tensor]) -> CopyHandle:
        """Start copying flat host tensors to adjacent parts of `target`, and casting them to its dtype."""
        self.check()
        copy_handle = CopyHandle()
        self._tasks.put(partial(self._copy_to_device, target, sources, copy_handle))
        return copy_handle

    def start_fetch(self, target: torch.Tensor, source: torch.Tensor, on_done: Callable[[], None]) -> None:
        """Start copying `source` on the device to `target` in host memory. The copier thread calls `on_done`."""
        self.check()
        self._tasks.put(partial(self._copy_to_host, target, source, on_done))

    def wait_for(self, copy_handle: CopyHandle) -> None:
        """Make the caller's stream wait for a copy. Blocks the caller only until the copy is submitted."""
        if copy_handle.is_done:
            return
        self.wait_until_submitted(copy_handle)
        assert copy_handle.end is not None
        copy_handle.end.wait()

    def wait_until_submitted(self, copy_handle: CopyHandle) -> None:
        """Block until the sources of a copy have been read and the copy is on the stream."""
        while not copy_handle.is_submitted.wait(COPIER_CHECK_INTERVAL_S):
            self.check()

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
                task()
                self.notify()
                del task  # release the adapter's memory while waiting for the next task
        except Exception as error:  # reported by `check`
            self._failure = error
            self.notify()

    def _copy_to_device(self, target: torch.Tensor, sources: Sequence[torch.Tensor], copy_handle: CopyHandle) -> None:
        """Copy tensors to the device. The next chunk is staged while previous chunks are copied to the device."""
        start = 0
        for pieces in _split(sources, self._buffer_bytes // target.itemsize):
            stop = start + sum(map(len, pieces))
            buffer = self._take_buffer()
            staged = buffer.pinned[: (stop - start) * target.itemsize]
            parts = staged.view(target.dtype).split([len(piece) for piece in pieces])
            torch._foreach_copy_(parts, pieces)  # uses several threads, and releases the GIL
            buffer.copied_event = self._copy_stream.copy(target[start:stop].view(torch.uint8), staged)
            copy_handle.end, start = buffer.copied_event, stop
        assert copy_handle.end is not None, "nothing to copy"
        copy_handle.is_submitted.set()
        self._finish(copy_handle, None)

    def _copy_to_host(self, target: torch.Tensor, source: torch.Tensor, on_done: Callable[[], None]) -> None:
        """Copy a tensor to the host."""
        old, new = source.view(torch.uint8), target.view(torch.uint8)
        for start in range(0, len(old), self._buffer_bytes):
            piece = slice(start, min(start + self._buffer_bytes, len(old)))
            buffer = self._take_buffer()
            staged = buffer.pinned[: piece.stop - piece.start]
            self._copy_stream.copy(staged, old[piece]).synchronize()
            new[piece].copy_(staged)
        on_done()

    def _finish(self, copy_handle: CopyHandle, source: torch.Tensor | None) -> None:  # noqa: ARG002 - kept alive
        """Wait for a submitted copy. The argument `source` keeps the source's memory allocated until then."""
        assert copy_handle.end is not None
        copy_handle.end.synchronize()
        copy_handle.is_done = True

    def _take_buffer(self) -> _Buffer:
        buffer = next(self._buffers)
        if buffer.copied_event is not None:
            buffer.copied_event.synchronize()
        return buffer


def _split(tensors: Sequence[torch.Tensor], limit: int) -> Iterator[list[torch.Tensor]]:
    """Split a sequence of flat tensors into lists of parts with at most `limit` elements per list."""
    pieces, space = list[torch.Tensor](), limit
    for tensor in tensors:
        start = 0
        while start < len(tensor):
            piece = tensor[start : start + space]
            pieces.append(piece)
            start, space = start + len(piece), space - len(piece)
            if not space:
                yield pieces
                pieces, space = [], limit
    if pieces:
        yield pieces
