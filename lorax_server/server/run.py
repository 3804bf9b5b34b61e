"""Starts and stops the HTTP server process."""

import asyncio
import logging
import resource
import signal
import socket
from contextlib import suppress
from importlib import import_module

import uvloop

from lorax_server.config import ServerConfig
from lorax_server.engine.remote.remote_engine import RemoteEngine
from lorax_server.errors import ConfigError, LoraxError
from lorax_server.process_tuning import freeze_gc
from lorax_server.server.access.keys import KeyRing
from lorax_server.server.http.uvicorn_server import GracefulServer, make_uvicorn_config
from lorax_server.server.service import Service
from lorax_server.server.startup_banner import announce_ready
from lorax_server.server.telemetry.logs import configure_logging

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
PROGRESS_LOG_INTERVAL_S = 15.0


def run(config: ServerConfig, engine: RemoteEngine, keys: KeyRing) -> int:
    """Run the server until a signal stops it. Return the exit code: 2 for a configuration error, 1 for other errors.

    The port is bound before the model is loaded, so a port conflict fails early. The socket does not listen until the
    server is ready, so health probes fail until then.
    """
    configure_logging(config.log_level, config.json_logs)
    raise_open_file_limit()
    try:
        with bind_port(config) as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(config, engine, keys, listener))
    except LoraxError as error:
        logger.error("%s", " ".join(str(error).split()))
        return 2 if isinstance(error, ConfigError) else 1


async def _serve(config: ServerConfig, engine: RemoteEngine, keys: KeyRing, listener: socket.socket) -> int:
    # Importing FastAPI takes about a second. Do it while the engine process loads the model.
    importing = asyncio.create_task(asyncio.to_thread(import_module, "lorax_server.server.app"))
    service = await _start_service(config, engine, keys)
    if service is None:
        return 1
    await importing
    from lorax_server.server.app import make_app  # noqa: PLC0415 - imported while the engine starts

    def on_ready() -> None:
        announce_ready(config, service.model_names, keys, make_url(listener))
        freeze_gc()

    try:
        app = make_app(service, listener.getsockname()[0])
        uvicorn_config = make_uvicorn_config(app, config, service.metrics, service.audit_log)
        await GracefulServer(uvicorn_config, on_ready, service.drain).serve([listener])
    finally:
        await service.close()
    return 0


async def _start_service(config: ServerConfig, engine: RemoteEngine, keys: KeyRing) -> Service | None:
    """Start and return the service, or return None if a stop signal arrives first."""
    starting = asyncio.create_task(Service.start(config, engine, keys))
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, starting.cancel)
    logger.info("loading %s", config.model_id)
    seconds = 0.0
    while not (await asyncio.wait((starting,), timeout=PROGRESS_LOG_INTERVAL_S))[0]:
        seconds += PROGRESS_LOG_INTERVAL_S
        logger.info("still loading after %g s", seconds)
    for number in STOP_SIGNALS:
        loop.remove_signal_handler(number)
    if starting.cancelled():
        logger.info("stopped before the server was ready")
        return None
    return starting.result()


# --- Socket and open file limit ---------------------------------------------------------------------------------------


def make_url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def bind_port(config: ServerConfig) -> socket.socket:
    """Return a socket that is bound to the port but does not listen."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror}; choose another port with --port"
        ) from error
    return listener


def raise_open_file_limit() -> None:
    """Raise the open file limit to the maximum, because every connection uses a file descriptor."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError):  # macOS rejects an infinite limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
