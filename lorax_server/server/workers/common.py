"""Work that is done once, whoever does it: the one API process, or the parent of several."""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack, suppress
from typing import Any, TypeVar

import msgspec

from lorax_server.config import ServerConfig
from lorax_server.engine.remote.client import EngineClient
from lorax_server.errors import LoraxError, SourceError
from lorax_server.server.access.folder import FolderWatch
from lorax_server.server.access.model_names import ModelNames
from lorax_server.server.telemetry.metrics import Metrics
from lorax_server.server.workers.changes import AdapterFound, AdapterPinned, Changes
from lorax_server.types import AdapterRef

logger = logging.getLogger(__name__)
Started = TypeVar("Started")

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PROGRESS_S = 15.0
STATUS_TIMEOUT_S = 2.0  # metrics are useful also without the status of a slow engine


def make_names(config: ServerConfig) -> ModelNames:
    """Make the names that the settings give."""
    names = ModelNames(
        config.model_id,
        config.served_names,
        config.default_source,
        config.static_adapter,
        config.engine.sources.roots,
    )
    for source, name in config.engine.preload:
        names.add(name, source, name)
    return names


async def watch_folder(
    config: ServerConfig, on_change: Callable[[Iterable[str]], None], closing: AsyncExitStack
) -> None:
    """Watch the folder of adapters, if there is one. `on_change` is called on another thread, now and later."""
    if config.adapters_dir:
        watch = FolderWatch(config.adapters_dir, on_change)
        closing.callback(watch.close)
        await asyncio.to_thread(watch.start)


async def note_preloaded(
    config: ServerConfig, engine: EngineClient, names: ModelNames, change: Callable[[Changes], Awaitable[None]]
) -> None:
    """Note the adapters that the engine has loaded and pinned at its start."""
    for source, name in config.engine.preload:
        with suppress(SourceError):  # the engine has logged it already
            identity = (await engine.resolve([AdapterRef(source, name)])).identity
            named = names.tidy(source, name)
            await change(AdapterFound(identity, named))
            await change(AdapterPinned(identity, named))


async def wait_for_start(start: Coroutine[Any, Any, Started], model_id: str) -> Started | None:
    """Wait for a start, which a signal can end: then there is nothing."""
    starting = asyncio.create_task(start)
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, starting.cancel)
    logger.info("loading %s", model_id)
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


async def scrape(metrics: Metrics, engine: EngineClient, as_json: bool) -> bytes:
    """Write all metrics, with the engine's status as it is now."""
    status = None
    with suppress(LoraxError, TimeoutError):
        async with asyncio.timeout(STATUS_TIMEOUT_S):
            status = await engine.status()
    metrics.engine.update(status, engine.is_healthy, engine.num_restarts)
    return msgspec.json.encode(metrics.json()) if as_json else metrics.prometheus()
