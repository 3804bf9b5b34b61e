"""The parent of several API processes: it holds the port, the engine, and what must be one for all of them."""

import asyncio
import functools
import logging
import signal
import socket
from contextlib import AsyncExitStack
from dataclasses import replace

import uvloop

from lorax_server.config import ServerConfig
from lorax_server.engine.remote.remote_engine import RemoteEngine
from lorax_server.errors import LoraxError
from lorax_server.server.access.keys import KeyRing
from lorax_server.server.greeting import say_ready
from lorax_server.server.http.listener import bind_port, raise_file_limit, url_of
from lorax_server.server.telemetry.logs import configure
from lorax_server.server.workers.common import SIGNALS, note_preloaded, wait_for_start, watch_folder
from lorax_server.server.workers.desk import Desk
from lorax_server.server.workers.door import Door
from lorax_server.server.workers.fleet import Fleet

logger = logging.getLogger(__name__)

GRACE_S = 10.0  # after the deadline of draining, for workers to end by themselves


def run_parent(config: ServerConfig, engine: RemoteEngine, keys: KeyRing, count: int) -> int:
    """Run `count` API processes until a signal stops them, and return the exit code.

    The port is bound before the model is loaded, so that a taken port is known at once. It does not listen yet, so that
    probes are refused until all is ready.
    """
    configure(config.log_level, config.json_logs)
    raise_file_limit()
    try:
        with bind_port(config) as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(Parent(config, engine, keys, count, listener).run())
    except LoraxError as error:
        logger.error("%s", error)
        return 1


class Parent:
    """The engine, the desk, the door and the workers, from their start to their end."""

    def __init__(
        self, config: ServerConfig, engine: RemoteEngine, keys: KeyRing, count: int, listener: socket.socket
    ) -> None:
        self._config = config
        self._engine = engine
        self._keys = keys
        self._count = count
        self._listener = listener

    async def run(self) -> int:
        self._desk = desk = Desk(self._config, self._engine, self._keys)
        self._door = door = Door(self._listener, lambda: desk.seats)
        desk.on_open = door.wake
        async with AsyncExitStack() as closing:
            if await wait_for_start(self._start(closing), self._config.model_id) is None:
                return 1
            stopping = self._listen_to_signals()
            door.open()
            say_ready(self._config, desk.names, self._keys, url_of(self._listener))
            await asyncio.wait((stopping, self._fleet.empty), return_when=asyncio.FIRST_COMPLETED)
            if not stopping.done():
                logger.error("no API process is left")
                return 1
            await self._drain()
        return 0

    async def _start(self, closing: AsyncExitStack) -> bool:
        """Start everything, and wait until all workers serve. The workers start while the engine loads the model."""
        loop, config, desk = asyncio.get_running_loop(), self._config, self._desk
        closing.push_async_callback(self._engine.close)
        closing.callback(self._door.close)
        target = functools.partial(start_worker, _share(config, self._count), self._keys, self._address, self._count)
        self._fleet = Fleet(target, self._count, desk)
        closing.push_async_callback(self._fleet.stop)
        starting = [asyncio.create_task(self._engine.start()), asyncio.create_task(self._fleet.start())]
        try:
            await watch_folder(config, functools.partial(desk.note_folder, loop), closing)
            await asyncio.gather(*starting)
            await note_preloaded(config, self._engine, desk.names, desk.change)
        finally:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
        return True

    @property
    def _address(self) -> str:
        return str(self._listener.getsockname()[0])

    def _listen_to_signals(self) -> "asyncio.Future[None]":
        """Return a future that the first signal settles. The next one lets the workers end at once."""
        loop = asyncio.get_running_loop()
        stopping = loop.create_future()

        def stop() -> None:
            if stopping.done():
                self._fleet.hurry()
            else:
                stopping.set_result(None)

        for number in SIGNALS:
            loop.add_signal_handler(number, stop)
        return stopping

    async def _drain(self) -> None:
        """Accept no more connections, and let workers answer what is under way."""
        self._door.close()
        logger.info("stopping: requests may take up to %g s", self._config.drain_s)
        await self._fleet.drain(self._config.drain_s + GRACE_S)


def start_worker(
    config: ServerConfig,
    keys: KeyRing,
    address: str,
    num_workers: int,
    number: int,
    wire: socket.socket,
    door: socket.socket,
) -> None:
    """Run a worker, in its own process: only workers need the web stack."""
    from lorax_server.server.workers.worker import WorkerPlan, run_worker  # noqa: PLC0415

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    run_worker(WorkerPlan(config, keys, address, number, num_workers), wire, door)


def _share(config: ServerConfig, count: int) -> ServerConfig:
    """Give each worker its share of the connections, since it counts only its own. They are handed out evenly."""
    return replace(
        config,
        max_connections=-(-config.max_connections // count),
    )
