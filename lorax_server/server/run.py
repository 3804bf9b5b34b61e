"""The server process: a socket, uvicorn, and signals."""

import asyncio
import gc
import logging
import resource
import signal
import socket
import sys
from dataclasses import replace
from types import FrameType

import uvicorn
import uvloop

from lorax_server.config import ServerConfig
from lorax_server.engine.remote.client import EngineClient
from lorax_server.errors import ConfigError, LoraxError
from lorax_server.server.access.keys import KeyRing
from lorax_server.server.app import make_app
from lorax_server.server.greeting import write_greeting
from lorax_server.server.http.connections import Connections
from lorax_server.server.http.protocol import make_protocol
from lorax_server.server.service import Service
from lorax_server.server.telemetry.logs import configure

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 75  # longer than load balancers keep theirs, so that they close connections and not we
BACKLOG = 4096
GRACE_S = 5.0  # after the deadline of draining, for last events
PROGRESS_S = 15.0
OTHER_FILES = 512  # that a process has open besides connections: pipes, logs, connections being refused
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run(config: ServerConfig, engine: EngineClient, keys: KeyRing) -> int:
    """Run the server until a signal stops it, and return the exit code.

    The port is bound before the model is loaded, so that a taken port is known at once. It does not listen yet, so that
    probes are refused until all is ready.
    """
    configure(config.log_level, config.json_logs)
    max_files = _raise_file_limit()
    try:
        config = _fit_connections(config, max_files)
        with _bind(config) as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(config, engine, keys, listener))
    except LoraxError as error:
        logger.error("%s", error)
        return 1


async def _serve(config: ServerConfig, engine: EngineClient, keys: KeyRing, listener: socket.socket) -> int:
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
        return 1
    service = starting.result()
    try:
        await _UvicornServer(service, listener.getsockname()[0]).serve([listener])
    finally:
        await service.close()
    return 0


class _UvicornServer(uvicorn.Server):
    def __init__(self, service: Service, address: str) -> None:
        super().__init__(_uvicorn_config(service, address))
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
            host, port = sockets[0].getsockname()[:2]
            _say_ready(self._service, f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
        gc.collect()
        gc.freeze()  # what is there now stays: collecting it would hold up streams for 80 ms

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.drain()  # here, since a signal may come in the middle of anything
        await super().shutdown(sockets)


def _uvicorn_config(service: Service, address: str = "") -> uvicorn.Config:
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


def _say_ready(service: Service, url: str) -> None:
    config = service.config
    logger.info("ready: %s serves %s; try it at %s/ui", url, config.model_id, url)
    if config.examples is not None and not config.json_logs:
        names, needs_key = sorted(service.model_names.adapters), not service.keys.is_open
        print(write_greeting(url, config.model_id, names, config.examples, needs_key=needs_key), flush=True)


def _bind(config: ServerConfig) -> socket.socket:
    """Bind the port without listening."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen at {config.host}:{config.port}: {error.strerror}; choose another with --port"
        ) from error
    return listener


def _raise_file_limit() -> int:
    """Allow as many open files as possible, since every stream is one. Return their number."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


def _fit_connections(config: ServerConfig, max_files: int) -> ServerConfig:
    """Allow no more connections than files. A connection without a file could not even be refused."""
    most = max(1, max_files - OTHER_FILES)
    if config.max_connections <= most:
        return config
    logger.warning(
        "at most %d connections instead of %d: this process may open %d files; raise that (LimitNOFILE, ulimit -n)",
        most,
        config.max_connections,
        max_files,
    )
    return replace(config, max_connections=most)
