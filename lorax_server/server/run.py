"""The server process: a socket, uvicorn, and signals."""

import asyncio
import gc
import logging
import signal
import socket
import time
from importlib import import_module
from types import FrameType
from typing import Any

import uvicorn
import uvloop

from lorax_server.config import ServerConfig
from lorax_server.engine.remote.remote_engine import RemoteEngine
from lorax_server.errors import LoraxError
from lorax_server.server.access.keys import KeyRing
from lorax_server.server.greeting import say_ready
from lorax_server.server.http.connections import Connections
from lorax_server.server.http.listener import BACKLOG, bind_port, fit_connections, raise_file_limit, url_of
from lorax_server.server.http.protocol import make_protocol
from lorax_server.server.service import Service
from lorax_server.server.telemetry.logs import configure

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PROGRESS_S = 15.0
KEEP_ALIVE_S = 75  # longer than load balancers keep theirs, so that they close connections and not we
GRACE_S = 5.0  # after the deadline of draining, for last events
FIRST_S = 1.0  # for the first request of a connection that came just before the end
LOOK_S = 0.01  # between looks whether it is there


def run(config: ServerConfig, engine: RemoteEngine, keys: KeyRing) -> int:
    """Run the server until a signal stops it, and return the exit code.

    The port is bound before the model is loaded, so that a taken port is known at once. It does not listen yet, so that
    probes are refused until all is ready.
    """
    configure(config.log_level, config.json_logs)
    max_files = raise_file_limit()
    try:
        config = fit_connections(config, max_files)
        with bind_port(config) as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(config, engine, keys, listener))
    except LoraxError as error:
        logger.error("%s", error)
        return 1


async def _serve(config: ServerConfig, engine: RemoteEngine, keys: KeyRing, listener: socket.socket) -> int:
    # FastAPI takes a second to import, which passes while the engine process loads the model.
    importing = asyncio.create_task(asyncio.to_thread(import_module, "lorax_server.server.app"))
    service = await _start(config, engine, keys)
    if service is None:
        return 1
    await importing
    try:
        await UvicornServer(service, listener.getsockname()[0]).serve([listener])
    finally:
        await service.close()
    return 0


async def _start(config: ServerConfig, engine: RemoteEngine, keys: KeyRing) -> Service | None:
    """Start the service. Return None if a signal comes first."""
    starting = asyncio.create_task(Service.start(config, engine, keys))
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, starting.cancel)
    logger.info("loading %s", config.model_id)
    seconds = 0.0
    while not (await asyncio.wait((starting,), timeout=PROGRESS_S))[0]:
        seconds += PROGRESS_S
        logger.info("still loading after %g s", seconds)
    for number in SIGNALS:
        loop.remove_signal_handler(number)
    if starting.cancelled():
        logger.info("stopped before it was ready")
        return None
    return starting.result()


class UvicornServer(uvicorn.Server):
    def __init__(self, service: Service, address: str) -> None:
        super().__init__(uvicorn_config(service, address))
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Let requests under way end at the first signal, but not at the second.

        uvicorn's own method would raise the signal again at the end.
        """
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if sockets:
            say_ready(self._service.config, self._service.model_names, self._service.keys, url_of(sockets[0]))
        gc.collect()
        gc.freeze()  # what is there now stays: collecting it would hold up streams for 80 ms

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        await self._await_first_requests()
        self._service.drain()  # here, since a signal may come in the middle of anything
        await super().shutdown(sockets)

    async def _await_first_requests(self) -> None:
        """Wait until connections that have been accepted have sent their requests: uvicorn closes a connection without
        one, and the client of a request that is on its way would lose it without a word."""
        until = time.monotonic() + FIRST_S
        while self._awaits_request() and not self.force_exit and time.monotonic() < until:
            await asyncio.sleep(LOOK_S)

    def _awaits_request(self) -> bool:
        connections: Any = self.server_state.connections
        return any(connection.awaits_request for connection in connections)


def uvicorn_config(service: Service, address: str = "") -> uvicorn.Config:
    from lorax_server.server.app import make_app  # noqa: PLC0415 - imported while the engine starts

    config = service.config
    connections = Connections(config.max_connections, config.max_connections_per_address, service.metrics)
    return uvicorn.Config(
        make_app(service, address),
        http=make_protocol(config.body_timeout_s, connections, service.audit_log),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=logging.WARNING,  # this module logs the rest
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(config.drain_s + GRACE_S),
        backlog=BACKLOG,
    )
