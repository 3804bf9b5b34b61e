"""The engine in a process of its own, as the API process that starts it sees it."""

import asyncio
import functools
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from lorax_server.engine.remote import messages
from lorax_server.engine.remote.channel import ClientChannel, describe
from lorax_server.engine.remote.engine_requests import EngineRequests

logger = logging.getLogger(__name__)
Config = TypeVar("Config")

FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0
STEADY_S = 300.0  # an engine that ran so long did not die because of its start


class RemoteEngine(EngineRequests):
    """An `EngineClient` that starts an engine process, passes requests to it, and starts it again when it dies.

    `target(config, address)` is a function at the top of a module; it builds an engine and calls `process.serve`.
    `on_change` is called whenever the engine is there, and whenever it is lost.
    """

    def __init__(
        self,
        target: Callable[[Config, str], None],
        config: Config,
        *,
        restart: bool = True,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        super().__init__()
        self.on_change: Callable[[], None] = lambda: None
        self._target = functools.partial(target, config)
        self._restart = restart
        self._first_pause_s = first_pause_s
        self._own_channel: ClientChannel | None = None
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def address(self) -> str | None:
        """The address at which further API processes find the engine; None while it is lost."""
        return self._own_channel.address if self.is_healthy and self._own_channel is not None else None

    def let_go(self, worker: int) -> None:
        """Tell the engine that a further API process is gone. An engine that is lost itself has no requests of it."""
        if self.is_healthy:
            self._send(messages.Leave(worker))

    # --- Start and end ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Wait until the engine takes requests. An engine that never did is not started again."""
        assert self._supervisor is None, "the client is started already"
        start_s = await self._launch()
        self._supervisor = asyncio.create_task(self._supervise(start_s))

    async def close(self) -> None:
        """End the engine, and with an error all requests and queries."""
        self._lose("the engine is stopped", None)
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait((self._supervisor,))
        if self._own_channel is not None:
            await self._own_channel.end()

    # --- Death and restart --------------------------------------------------------------------------------------------

    async def _launch(self) -> float:
        """Start a process, and return the seconds that it took."""
        began = time.monotonic()
        channel = ClientChannel()
        self.info = await channel.start(self._target)
        self._channel = self._own_channel = channel
        self.is_healthy = True
        self.on_change()
        return time.monotonic() - began

    async def _describe_end(self) -> str:
        assert self._own_channel is not None
        return f"the engine process ended ({describe(await self._own_channel.end())})"

    def _lose(self, problem: str, retry_after_s: float | None) -> None:
        super()._lose(problem, retry_after_s)
        self.on_change()

    async def _supervise(self, start_s: float) -> None:
        pause_s = 0.0
        try:
            while True:
                assert self._own_channel is not None
                began = time.monotonic()
                problem = await self._deliver_all(self._own_channel)
                pause_s = next_pause_s(pause_s, time.monotonic() - began, self._first_pause_s)
                logger.error("%s; %d requests are lost", problem, len(self._streams))
                self._lose(problem, pause_s + start_s if self._restart else None)
                await self._own_channel.end()  # it may hold what the next one needs
                if not self._restart:
                    return
                start_s, pause_s = await self._launch_again(start_s, pause_s)
        finally:  # also a bug in here must leave no caller waiting
            if self.is_healthy:
                self._lose("the engine is not watched any more", None)

    async def _launch_again(self, start_s: float, pause_s: float) -> tuple[float, float]:
        """Try until it succeeds. Return the seconds that the start took, and those of the pause before it."""
        while True:
            await asyncio.sleep(pause_s)
            try:
                start_s = await self._launch()
                self.num_restarts += 1
                return start_s, pause_s
            except Exception as error:  # also for lack of a process or a folder: the next try may find one
                pause_s = next_pause_s(pause_s, 0.0, self._first_pause_s)
                logger.error("%s", error)
                self._lose(str(error), pause_s + start_s)


def next_pause_s(last_s: float, lived_s: float, first_s: float) -> float:
    """Return the pause before an engine is started again: none if it lived, else longer each time, up to a limit."""
    if lived_s >= STEADY_S:
        return 0.0
    return min(max(first_s, 2 * last_s), MAX_PAUSE_S)
