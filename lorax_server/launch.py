"""Processes: an engine in one of its own, with a client for it."""

from lorax_server.build import build_engine
from lorax_server.config import EngineConfig
from lorax_server.engine.client import EngineClient
from lorax_server.engine.process import connected, serve


def run_engine(config: EngineConfig, address: str) -> None:
    """What the engine process runs: build, serve, and tell the other side if that fails or a rank dies."""
    with connected(address) as channel:
        engine = build_engine(config, on_death=channel.report)
        found = engine.capabilities
        serve(
            engine, channel, {"max_length": found.max_length, "vocab_size": found.vocab_size, "model": found.model_type}
        )


def make_client(config: EngineConfig, *, restart: bool = True) -> EngineClient:
    """A client whose engine is started by `start`, and again whenever it dies."""
    return EngineClient(run_engine, config, restart=restart)
