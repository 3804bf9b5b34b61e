"""One engine process, as the API process sees it, from its start to its end."""

import asyncio
import atexit
import multiprocessing
import signal
from collections.abc import Callable
from contextlib import suppress

from lorax_server.engine.remote import messages
from lorax_server.engine.remote.channel import ClientChannel
from lorax_server.errors import EngineError
from lorax_server.types import EngineInfo

GRACE_S = 10.0  # to end by itself, before stronger signals


class Child:
    """A process that runs `target(address)`, from `start` to `end`.

    Its sentinel shows its end: the system makes it readable the moment the process is gone.
    """

    def __init__(self, target: Callable[[str], None]) -> None:
        self._channel = ClientChannel()
        self._target = target
        self._process: multiprocessing.process.BaseProcess | None = None
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._has_spoken = False
        self._exit_code: int | None = None

    async def start(self) -> EngineInfo:
        """Wait until the engine takes requests, and return its facts. Raise if it cannot start; then it is gone."""
        try:
            self._launch(self._channel.open())
            first = await self.receive()
        except BaseException:
            await self.end()
            raise
        if isinstance(first, messages.Ready):
            return first.info
        exit_code = await self.end()
        reason = f": {first.message}" if isinstance(first, messages.Failed) else ""
        raise EngineError(f"the engine process ended while it was starting ({describe(exit_code)}){reason}")

    def send(self, message: messages.ToEngine) -> None:
        self._channel.send(message)

    async def receive(self) -> messages.FromEngine | None:
        """Return the next message; None when the process has ended."""
        message = await self._channel.receive()
        self._has_spoken = self._has_spoken or message is not None
        return message

    async def end(self) -> int | None:
        """End the process, leave nothing of it behind, and return its exit code. May be called again if cancelled."""
        if self._process is not None:
            await self._end_process(self._process)
        self._channel.close()
        return self._exit_code

    def _launch(self, address: str) -> None:
        # Not a daemon: those may have no processes of their own, and an engine starts ranks.
        process = multiprocessing.get_context("spawn").Process(
            target=self._target, args=(address,), name="lorax-engine", daemon=False
        )
        process.start()
        self._process = process
        # Python waits for its processes before it ends, for ever if `end` was never called.
        atexit.register(process.kill)
        asyncio.get_running_loop().add_reader(process.sentinel, self._note_end, process.sentinel)

    def _note_end(self, sentinel: int) -> None:
        asyncio.get_running_loop().remove_reader(sentinel)
        self._channel.end()
        if not self._ended.done():
            self._ended.set_result(None)

    async def _end_process(self, process: multiprocessing.process.BaseProcess) -> None:
        """Ask the process to stop, if it listens, then terminate it, then kill it."""
        stop = [self._ask_to_stop] if self._has_spoken else []
        for end in (*stop, process.terminate, process.kill):
            if not self._ended.done():
                end()
                await asyncio.wait((self._ended,), timeout=GRACE_S)
        await asyncio.wait((self._ended,))  # not the future itself, which would be cancelled with us
        process.join()
        self._exit_code = process.exitcode
        atexit.unregister(process.kill)
        process.close()
        self._process = None

    def _ask_to_stop(self) -> None:
        self._channel.send(messages.Stop())


def describe(exit_code: int | None) -> str:
    """Describe an exit code, with the signal that it stands for."""
    name = ""
    if exit_code is not None and exit_code < 0:
        with suppress(ValueError):
            name = f", {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}{name}"
