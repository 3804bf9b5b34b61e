"""An API process among several: uvicorn with connections that its parent hands over."""

import asyncio
import logging
import os
import signal
import socket
import sys
from types import FrameType
from typing import Any, NamedTuple

import uvloop

from lorax_server.config import ServerConfig
from lorax_server.errors import LoraxError
from lorax_server.process_tuning import set_malloc_thresholds
from lorax_server.server.access.keys import KeyRing
from lorax_server.server.app import make_app
from lorax_server.server.generations import cancel_all
from lorax_server.server.http.listener import raise_file_limit
from lorax_server.server.http.uvicorn_server import GracefulServer, make_uvicorn_config
from lorax_server.server.telemetry.logs import configure
from lorax_server.server.workers.door import take_connections
from lorax_server.server.workers.joined_service import JoinedService
from lorax_server.server.workers.link import ParentLink
from lorax_server.server.workers.messages import CannotStart, Departing, Serving

logger = logging.getLogger(__name__)

LAST_S = 5.0  # for the worker's last message, and its end without a parent


class WorkerPlan(NamedTuple):
    """All that a worker gets from its parent when it starts."""

    config: ServerConfig
    keys: KeyRing
    address: str  # at which the parent listens
    number: int
    num_workers: int


def run_worker(plan: WorkerPlan, wire: socket.socket, door: socket.socket) -> None:
    """Serve until the parent says that it is enough, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal; the parent decides
    set_malloc_thresholds()
    configure(plan.config.log_level, plan.config.json_logs)
    raise_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(_work(plan, wire, door))
    sys.exit(code)


async def _work(plan: WorkerPlan, wire: socket.socket, door: socket.socket) -> int:
    link = ParentLink(plan.config, plan.number)
    starting = asyncio.create_task(_start(plan, link, wire))
    await _first(starting, link.lost)
    if not starting.done():
        await cancel_all([starting])
        return 1
    if (error := starting.exception()) is not None:
        await _report(link, error)
        return 1
    service = starting.result()
    try:
        server = WorkerServer(service, plan.address, door)
        serving = asyncio.create_task(server.serve([]))
        await _first(serving, link.lost, link.engine.broken)
        if serving.done():
            serving.result()
            return 0
        logger.error("an API process ends: %s", link.engine.broken.result() if not link.lost.done() else "it is alone")
        await cancel_all([serving])
        return 1
    finally:
        asyncio.get_running_loop().call_later(LAST_S, os._exit, 1)
        await service.close()


async def _start(plan: WorkerPlan, link: ParentLink, wire: socket.socket) -> JoinedService:
    await link.open(wire)
    return await JoinedService.join(plan.config, plan.keys, link, plan.num_workers)


async def _report(link: ParentLink, error: BaseException) -> None:
    """Tell the parent why this process cannot start. It logs the reason."""
    if not isinstance(error, LoraxError):
        logger.error("an API process cannot start because of a mistake of the server", exc_info=error)
    link.tell(CannotStart(str(error) or type(error).__name__))
    link.close()
    await asyncio.wait((link.lost,), timeout=LAST_S)


async def _first(*futures: "asyncio.Future[Any]") -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


class WorkerServer(GracefulServer):
    """uvicorn without a listening socket: connections come from the parent."""

    def __init__(self, service: JoinedService, address: str, door: socket.socket) -> None:
        app = make_app(service, address)
        config = make_uvicorn_config(app, service.config, service.metrics, service.audit_log)
        super().__init__(config, lambda: None, service.drain)
        self._link = service.link
        self._door = door
        self._tasks: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        self._door.setblocking(False)
        self._loop.add_reader(self._door.fileno(), self._take)
        self._link.on_drain = self._drain
        self._link.tell(Serving())

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Ask the parent for no more connections, and end when it has answered."""
        if sig == signal.SIGTERM:
            self._loop.call_soon_threadsafe(self._link.tell, Departing())

    def _drain(self, at_once: bool) -> None:
        self._take()  # the parent has handed over the last ones before it said so
        self.should_exit = True
        self.force_exit |= at_once

    def _take(self) -> None:
        try:
            connections = take_connections(self._door)
        except OSError:  # it was cut off; the parent's end shows elsewhere
            self._loop.remove_reader(self._door.fileno())
            return
        for connection in connections:
            connection.setblocking(False)
            task = self._loop.create_task(self._adopt(connection))
            self._tasks.add(task)  # a task that nobody holds may vanish
            task.add_done_callback(self._tasks.discard)
        self._link.note_taken(len(connections))

    async def _adopt(self, connection: socket.socket) -> None:
        """Begin to serve a connection. Its client may have left already."""
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, connection)
        except OSError:
            connection.close()

    def _make_protocol(self) -> asyncio.Protocol:
        kind: Any = self.config.http_protocol_class
        made: asyncio.Protocol = kind(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        return made
