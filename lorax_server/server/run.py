"""The server process."""

import asyncio
import logging
import socket

import uvloop

from lorax_server.config import ServerConfig
from lorax_server.engine.remote.client import EngineClient
from lorax_server.errors import LoraxError
from lorax_server.process_tuning import freeze_gc
from lorax_server.server.access.keys import KeyRing
from lorax_server.server.app import make_app
from lorax_server.server.greeting import say_ready
from lorax_server.server.http.listener import bind_port, raise_file_limit, url_of
from lorax_server.server.http.uvicorn_server import GracefulServer, make_uvicorn_config
from lorax_server.server.service import Service
from lorax_server.server.telemetry.logs import configure
from lorax_server.server.workers.common import wait_for_start

logger = logging.getLogger(__name__)


def run(config: ServerConfig, engine: EngineClient, keys: KeyRing) -> int:
    """Run the server until a signal stops it, and return the exit code.

    The port is bound before the model is loaded, so that a taken port is known at once. It does not listen yet, so that
    probes are refused until all is ready.
    """
    configure(config.log_level, config.json_logs)
    raise_file_limit()
    try:
        with bind_port(config) as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(config, engine, keys, listener))
    except LoraxError as error:
        logger.error("%s", error)
        return 1


async def _serve(config: ServerConfig, engine: EngineClient, keys: KeyRing, listener: socket.socket) -> int:
    service = await wait_for_start(Service.start(config, engine, keys), config.model_id)
    if service is None:
        return 1

    def on_ready() -> None:
        say_ready(config, service.model_names, keys, url_of(listener))
        freeze_gc()

    try:
        app = make_app(service, listener.getsockname()[0])
        uvicorn_config = make_uvicorn_config(app, config, service.metrics, service.audit_log)
        await GracefulServer(uvicorn_config, on_ready, service.drain).serve([listener])
    finally:
        await service.close()
    return 0
