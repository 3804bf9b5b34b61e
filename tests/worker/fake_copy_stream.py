"""A fake copy stream without a GPU. Copies run only when a test or a wait finishes them."""

import threading
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from lorax_server.worker.copier import CopyStream


@dataclass
class FakeEvent:
    """The event after one fake copy."""

    lane: "FakeCopyStream"
    number: int

    def synchronize(self) -> None:
        with self.lane.changed:
            assert self.lane.changed.wait_for(lambda: self.lane.num_done >= self.number, 60)

    def wait(self) -> None:
        self.lane.waits.append(self.number)


@dataclass
class FakeCopyStream(CopyStream):
    """Copies as late as possible, so that a buffer that is reused too early is detected."""

    is_free: bool = True  # copies run immediately
    fails_at: int | None = None  # the number of the copy that fails
    num_done: int = 0
    num_begun: int = 0
    num_follows: int = 0
    num_pinned: int = 0
    waits: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    waiting: deque[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=deque)

    def pin(self, num_bytes: int) -> torch.Tensor:
        self.num_pinned += 1
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def use(self) -> AbstractContextManager[None]:
        return nullcontext()

    def wait_for_caller_stream(self) -> None:
        self.num_follows += 1

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        with self.changed:
            self.num_begun += 1
            self.sizes.append(len(source))
            if self.num_begun == self.fails_at:
                raise RuntimeError("the device is gone")
            self.waiting.append((target, source))
            if self.is_free:
                self._finish(1)
            self.changed.notify_all()
            return FakeEvent(self, self.num_begun)

    def finish(self, count: int) -> None:
        """Run `count` pending copies, waiting until enough are submitted."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.waiting) >= count, 60)
            self._finish(count)
            self.changed.notify_all()

    def wait_for_started(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.num_begun >= count, 60)

    def _finish(self, count: int) -> None:
        for _ in range(count):
            target, source = self.waiting.popleft()
            target.copy_(source)
            self.num_done += 1
