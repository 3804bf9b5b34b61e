"""A request's output stream, from the engine client to the reader."""

import asyncio
from collections.abc import Callable, Sequence

from lorax_server.types import Output

Handler = Callable[[Sequence[Output]], bool]  # returns True if it has handled the outputs


class OutputStream:
    """Buffers outputs until the reader drains them. A handler may process outputs directly while the reader is waiting.

    The handler avoids waking one task per stream in every decode step, which would take longer than writing the data.
    """

    __slots__ = ("_handler", "_waiter", "error", "is_closed", "outputs")

    def __init__(self, handler: Handler | None = None) -> None:
        self.outputs: list[Output] = []
        self.is_closed = False
        self.error: Exception | None = None  # the reason for closing, if the request failed
        self._handler = handler
        self._waiter: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Wait until the stream has outputs or is closed."""
        if self.outputs or self.is_closed:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def drain(self) -> list[Output]:
        """Return and remove all buffered outputs."""
        outputs, self.outputs = self.outputs, []
        return outputs

    def push(self, outputs: Sequence[Output], is_last: bool = False) -> None:
        """Buffer outputs, or pass them to the handler. A closed stream ignores outputs.

        The last outputs are always buffered, so that the reader wakes up.
        """
        if self.is_closed:
            return
        if self._handler is not None and not is_last and self._waiter is not None and not self._waiter.done():
            try:
                if self._handler(outputs):
                    return
            except Exception as error:  # fails only this request
                self.close(error)
                return
        self.outputs += outputs
        self._wake()

    def close(self, error: Exception | None = None) -> None:
        """Mark the stream as complete, and wake its reader. Later calls do not change the error."""
        if not self.is_closed:
            self.is_closed, self.error = True, error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
