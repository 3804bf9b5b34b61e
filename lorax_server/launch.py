"""Starts the engine process, its client, and the server.

Both processes import this module, so it imports neither torch nor the web stack.
"""

import logging
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

from lorax_server.config import EngineConfig, ServerConfig
from lorax_server.engine.remote.process import open_channel, serve
from lorax_server.engine.remote.remote_engine import RemoteEngine
from lorax_server.pooling import read_pooling
from lorax_server.process_tuning import (
    limit_malloc_arenas,
    set_gil_switch_interval,
    set_malloc_thresholds,
    set_mimalloc_purge_delay,
    set_process_title,
    tune_gc,
)
from lorax_server.types import EngineInfo

logger = logging.getLogger(__name__)


class LogFormat(NamedTuple):
    """Log level and format of a process."""

    level: str
    is_json: bool


def serve_forever(config: ServerConfig) -> int:
    """Run the server until it receives a signal, and return the exit code."""
    from lorax_server.server.access.keys import KeyRing  # noqa: PLC0415
    from lorax_server.server.run import run  # noqa: PLC0415

    set_process_title("server")
    set_malloc_thresholds()
    set_mimalloc_purge_delay()
    keys = KeyRing(config.api_keys, config.admin_key, config.keys_file)
    engine = replace(config.engine, tenant_weights={**keys.weights, **config.engine.tenant_weights})
    return run(config, make_client(engine, logs=LogFormat(config.log_level, config.json_logs)), keys)


def make_client(config: EngineConfig, *, restart: bool = True, logs: LogFormat | None = None) -> RemoteEngine:
    """Return a client whose `start` starts the engine process. With `restart`, it restarts the engine after a crash."""
    return RemoteEngine(partial(run_engine, logs), config, restart=restart)


def run_engine(logs: LogFormat | None, config: EngineConfig, address: str) -> None:
    """Run the engine process: build the engine, serve requests, and report failures."""
    from lorax_server.build import build_engine, build_vocabulary, warm_up  # noqa: PLC0415
    from lorax_server.server.telemetry.logs import configure_logging  # noqa: PLC0415

    set_process_title("engine")
    if logs is not None:
        configure_logging(logs.level, logs.is_json)
    limit_malloc_arenas()
    set_gil_switch_interval()
    with open_channel(address) as channel, ThreadPoolExecutor(1) as thread:
        make_vocabulary = cache(partial(build_vocabulary, config.model.path))
        generates = read_pooling(config.model) is None
        engine = build_engine(config, on_rank_exit=channel.report, make_vocabulary=make_vocabulary)
        # Build the vocabulary before the first request, because building it holds the GIL and would delay steps.
        building = [thread.submit(make_vocabulary)] if generates else []
        rate = warm_up(engine)
        wait(building)
        tune_gc()
        sizes = engine.capabilities
        logger.info("weights: %s, %.0f MB", sizes.weight_format or sizes.dtype, sizes.weight_bytes / 1e6)
        if generates:
            logger.info("one sequence decodes %.3g tokens/s", rate)
        info = EngineInfo(
            max_length=sizes.max_length,
            vocab_size=sizes.vocab_size,
            num_blocks=sizes.num_blocks,
            block_size=sizes.block_size,
            dtype=sizes.dtype,
            device=config.model.device.partition(":")[0],
            weight_format=sizes.weight_format,
            weight_bytes=sizes.weight_bytes,
            task=sizes.task,
        )
        serve(engine, channel, info)
