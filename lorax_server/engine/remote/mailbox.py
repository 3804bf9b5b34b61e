"""Outputs of one request on their way to its reader."""

import asyncio
from collections.abc import Callable, Sequence

from lorax_server.types import Output

Take = Callable[[Sequence[Output]], bool]  # True if the outputs need no reader any more


class Mailbox:
    """Outputs wait here for their reader. While the reader waits for them, `take` may handle them in its place.

    With 256 streams a step has 256 outputs: to wake a task for each would take longer than to write them.
    """

    __slots__ = ("_take", "_waiter", "error", "is_ended", "outputs")

    def __init__(self, take: Take | None = None) -> None:
        self.outputs: list[Output] = []
        self.is_ended = False
        self.error: Exception | None = None  # that ended it, if one did
        self._take = take
        self._waiter: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Wait until there are outputs, or there will be no more."""
        if self.outputs or self.is_ended:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def empty(self) -> list[Output]:
        """Return all outputs so far."""
        outputs, self.outputs = self.outputs, []
        return outputs

    def put(self, outputs: Sequence[Output]) -> None:
        """Add outputs, of which none is the last one."""
        if self.is_ended:
            return
        if self._take is not None and self._waiter is not None and not self._waiter.done():
            try:
                if self._take(outputs):
                    return
            except Exception as error:  # it belongs to this reader: others wait for theirs
                self.end(error)
                return
        self.outputs += outputs
        self._wake()

    def put_last(self, outputs: Sequence[Output]) -> None:
        """Add outputs for the reader itself: it has to end. After an error it gets none, since one before is lost."""
        if not self.is_ended:
            self.outputs += outputs

    def end(self, error: Exception | None = None) -> None:
        """Tell the reader that no more outputs come, and why. Only the first reason counts."""
        if not self.is_ended:
            self.is_ended, self.error = True, error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
