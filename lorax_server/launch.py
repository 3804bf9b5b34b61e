"""Processes: an engine in a process of its own, a client for it, and the server in front of both.

Both processes import this module, so it imports neither torch, which only the engine needs, nor the web stack, which
only the server needs.
"""

from dataclasses import replace

from lorax_server.config import EngineConfig, ServerConfig
from lorax_server.engine.remote.process import connected, serve
from lorax_server.engine.remote.remote_engine import RemoteEngine
from lorax_server.machine import return_large_blocks, share_arenas, shorten_turns, spare_steps
from lorax_server.types import EngineInfo


def check_files(config: ServerConfig) -> None:
    """Read the files that settings name, so that what is wrong with them is known before a model is fetched."""
    from lorax_server.server.access.keys import KeyRing  # noqa: PLC0415
    from lorax_server.server.routes.playground import read_examples  # noqa: PLC0415

    KeyRing(config.api_keys, config.admin_key, config.keys_file)
    read_examples(config.examples)


def serve_forever(config: ServerConfig) -> int:
    """Serve until a signal comes, and return the exit code."""
    from lorax_server.server.access.keys import KeyRing  # noqa: PLC0415
    from lorax_server.server.run import run  # noqa: PLC0415

    return_large_blocks()
    keys = KeyRing(config.api_keys, config.admin_key, config.keys_file)
    engine = replace(config.engine, tenant_weights={**keys.weights, **config.engine.tenant_weights})
    return run(config, make_client(engine), keys)


def make_client(config: EngineConfig, *, restart: bool = True) -> RemoteEngine:
    """Make a client that starts its engine in `start`, and again whenever it dies."""
    return RemoteEngine(run_engine, config, restart=restart)


def run_engine(config: EngineConfig, address: str) -> None:
    """Run the engine process: build and serve an engine, and report if that fails or a rank dies."""
    from lorax_server.build import build_engine, warm_up  # noqa: PLC0415

    share_arenas()
    shorten_turns()
    with connected(address) as channel:
        engine = build_engine(config, on_death=channel.report)
        warm_up(engine)
        spare_steps()
        sizes = engine.capabilities
        info = EngineInfo(
            max_length=sizes.max_length,
            vocab_size=sizes.vocab_size,
            num_blocks=sizes.num_blocks,
            block_size=sizes.block_size,
            dtype=sizes.dtype,
            device=config.model.device.partition(":")[0],
        )
        serve(engine, channel, info)
