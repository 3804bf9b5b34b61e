"""Runs a server with an engine that does not use torch and whose streams are controlled by the test.

`python -m tests.e2e.gated_engine_server MODEL_FOLDER GATE DRAIN_S`: every request gets its first token immediately, and
the remaining tokens once the file GATE exists.
"""

import itertools
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

from lorax_server.config import EngineConfig, ModelConfig, ServerConfig
from lorax_server.engine.remote.channel import EngineChannel
from lorax_server.engine.remote.process import open_channel, serve
from lorax_server.engine.remote.remote_engine import RemoteEngine
from lorax_server.server.access.keys import KeyRing
from lorax_server.server.run import run
from lorax_server.types import (
    AdapterRef,
    EngineInfo,
    EngineStatus,
    FinishReason,
    Merge,
    Output,
    Request,
    ResolvedAdapter,
    SampledToken,
)
from tests.engine.fake_engine import FakeEngine

INFO = EngineInfo(max_length=10_000, vocab_size=300, num_blocks=1, block_size=16, dtype="float32", device="cpu")


class GatedEngine(FakeEngine):
    """An engine that repeats the prompt."""

    idle_s = 0.05

    def __init__(self, channel: EngineChannel, gate: Path) -> None:
        super().__init__(channel)
        self._gate = gate
        self._started: dict[int, tuple[Request, int]] = {}  # request and number of generated tokens by ID

    @property
    def is_busy(self) -> bool:
        return self._gate.exists() and bool(self._started)

    def resolve(self, refs: Sequence[AdapterRef], merge: Merge | None = None) -> Future[ResolvedAdapter]:
        return Future()  # adapters are never found

    def add(self, request: Request) -> None:
        self._started[request.request_id] = request, 0

    def abort(self, request_id: int) -> None:
        self._started.pop(request_id, None)

    def status(self) -> EngineStatus:
        return replace(super().status(), running=len(self._started), waiting=0)

    def step(self) -> list[Output]:
        is_open = self._gate.exists()
        return [self._next(each) for each, (_, count) in list(self._started.items()) if is_open or not count]

    def _next(self, request_id: int) -> Output:
        request, count = self._started[request_id]
        self._started[request_id] = request, count + 1
        token_id = next(itertools.islice(itertools.cycle(request.prompt_ids), count, None))
        is_last = count + 1 == request.stop.max_new_tokens
        if is_last:
            del self._started[request_id]
        return Output(request_id, (SampledToken(token_id, -0.5),), FinishReason.LENGTH if is_last else None)


def run_engine(gate: str, address: str) -> None:
    with open_channel(address) as channel:
        serve(GatedEngine(channel, Path(gate)), channel, INFO)


def main(folder: str, gate: str, drain_s: str) -> int:
    model = ModelConfig(Path(folder))
    config = ServerConfig(EngineConfig(model), "light", port=0, default_source="local", drain_s=float(drain_s))
    return run(config, RemoteEngine(run_engine, gate), KeyRing((), None, None))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
