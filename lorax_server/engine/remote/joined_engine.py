"""The engine as a further API process sees it: another process starts it, and tells where it is."""

import asyncio
import logging

from lorax_server.engine.remote import messages
from lorax_server.engine.remote.engine_requests import EngineRequests
from lorax_server.engine.remote.sockets import ClientSockets
from lorax_server.types import EngineInfo

logger = logging.getLogger(__name__)


class JoinedEngine(EngineRequests):
    """An `EngineClient` for an engine that others use as well. `worker` is the number of this process, above 0.

    `find` and `lose` are called by whoever hears from the process that starts engines. `broken` is settled with the
    reason if the engine's messages are not understood: then only a new process helps.
    """

    def __init__(self, worker: int) -> None:
        assert worker > 0, "0 is the process that starts engines"
        super().__init__(worker)
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._worker = worker
        self._found = asyncio.Event()
        self._listening: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Wait until the engine takes requests."""
        await self._found.wait()

    async def close(self) -> None:
        self.lose("the engine is stopped", None)

    def find(self, address: str, info: EngineInfo) -> None:
        """Join the engine at an address. If its folder is gone already, so is the engine: that will be told next."""
        channel = ClientSockets()
        try:
            channel.listen(address, self._worker)
            channel.send(messages.Join(self._worker))
        except messages.ChannelError as error:
            logger.warning("the engine is gone before it could be joined: %s", error)
            channel.close()
            return
        self._channel, self.info, self.is_healthy = channel, info, True
        self._listening = asyncio.create_task(self._listen(channel))
        self._found.set()

    def lose(self, problem: str, retry_after_s: float | None) -> None:
        """Deliver what the engine has sent before it ended, then end all requests and queries with an error.

        The problem is in the words of the process that starts engines.
        """
        channel, self._channel = self._channel, None
        if channel is not None and self._listening is not None:
            self._listening.cancel()  # it holds nothing while it waits
            for message in channel.take_rest():
                if isinstance(message, messages.Outputs):
                    self._deliver_steps([message.outputs])
            channel.close()
        self._end_all(problem, retry_after_s)

    async def _listen(self, channel: ClientSockets) -> None:
        problem = await self._deliver_all(channel)
        if not self.broken.done():
            self.broken.set_result(problem)
