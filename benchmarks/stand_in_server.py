"""A server whose engine computes nothing: every request gets a token in each step, one step after the other at a
settable pace. The API processes, the channel and the sockets are the real ones.

    python benchmarks/stand_in_server.py FOLDER STEP_MS REPORT [WORKERS [TOKENS_PER_S]]

`FOLDER` has a tokenizer. When the server ends, `REPORT` has the seconds that the engine's thread took to send each
step's outputs, and where the API process was whenever a thousandth of a second of its CPU time had passed (with several
API processes: where their parent was). With `TOKENS_PER_S` a step takes as long as its tokens need at that rate.
"""

import json
import random
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import fields, replace
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from lorax_server.config import EngineConfig, ModelConfig, ServerConfig
from lorax_server.engine.remote.channel import EngineChannel
from lorax_server.engine.remote.messages import EngineMessage, Outputs
from lorax_server.engine.remote.process import connected, serve
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
    Resolved,
    SampledToken,
    Started,
)

VOCAB = 700  # bytes and words of the tokenizer, without its special tokens
INFO = EngineInfo(max_length=10_000, vocab_size=VOCAB, num_blocks=1, block_size=16, dtype="bfloat16", device="cpu")
TICK_S = 0.001
MANY = 10_000  # streams at once
PARTS = {  # by the file of the innermost frame that one of these names
    "engine/remote/messages": "decoding",
    "engine/remote": "routing",
    "text/": "text",
    "generation/": "text",
    "server/generations": "text",
    "server/routes": "event",
    "server/exchange": "event",
    "server/http": "writing",
    "uvicorn": "writing",
    "starlette": "writing",
    "fastapi": "writing",
}


class Pace(NamedTuple):
    """The settings of a stand-in, which its process gets."""

    step_s: float
    report: str
    tokens_per_s: float = 0.0  # of all streams together, in place of `step_s`


def make_tokens() -> list[SampledToken]:
    """Make the tokens of all streams: one that has so many left gets the token of that place."""
    choice = random.Random(0)
    return [SampledToken(choice.randrange(256, VOCAB), -8 * choice.random()) for _ in range(4096)]


class StandIn:
    """An engine that gives each request a token in each step."""

    def __init__(self, pace: Pace) -> None:
        self.wake = threading.Event()
        self._pace = pace
        self._left: dict[int, int] = {}
        self._new: set[int] = set()
        self._next_at = 0.0
        self._tokens = make_tokens()

    @property
    def is_busy(self) -> bool:
        return bool(self._left)

    def wait(self) -> None:
        if not self.is_busy:
            self.wake.wait(0.05)
        self.wake.clear()

    def resolve(self, refs: Sequence[AdapterRef], merge: Merge | None = None) -> Future[Resolved]:
        future: Future[Resolved] = Future()
        future.set_result(Resolved(refs[0].name, tier="device"))
        return future

    def add(self, request: Request) -> None:
        self._left[request.request_id] = request.stop.max_new_tokens
        self._new.add(request.request_id)

    def abort(self, request_id: int) -> None:
        self._left.pop(request_id, None)

    def step(self) -> list[Output]:
        if not self._left:
            return []
        time.sleep(max(0.0, self._next_at - time.perf_counter()))
        pace = self._pace
        step_s = len(self._left) / pace.tokens_per_s if pace.tokens_per_s else pace.step_s
        self._next_at = max(self._next_at, time.perf_counter() - step_s) + step_s
        return [self._next(request_id) for request_id in list(self._left)]

    def _next(self, request_id: int) -> Output:
        left = self._left[request_id] - 1
        token = self._tokens[left % len(self._tokens)]
        self._left[request_id] = left
        if not left:
            del self._left[request_id]
        if request_id not in self._new:
            return Output(request_id, (token,), None if left else FinishReason.LENGTH)
        self._new.discard(request_id)
        return Output(request_id, (token,), None if left else FinishReason.LENGTH, started=Started(0.0, 0.0, 0))

    def status(self) -> EngineStatus:
        """Tell how many requests run; all else is 0."""
        return EngineStatus(**({field.name: 0 for field in fields(EngineStatus)} | {"running": len(self._left)}))

    def close(self) -> None:
        pass


class TimedChannel(EngineChannel):
    """A channel that notes how long the engine's thread is busy with sending a step's outputs."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.sends: dict[int, list[float]] = {}  # by the number of outputs

    def send(self, message: EngineMessage) -> None:
        start = time.thread_time()
        super().send(message)
        if isinstance(message, Outputs):
            self.sends.setdefault(len(message.outputs), []).append(time.thread_time() - start)


def run_stand_in(pace: Pace, address: str) -> None:
    with connected(address) as channel:
        channel.__class__, channel.sends = TimedChannel, {}  # type: ignore[attr-defined]
        serve(StandIn(pace), channel, INFO)  # type: ignore[arg-type]
        medians = {count: statistics.median(times) for count, times in channel.sends.items()}  # type: ignore[attr-defined]
    Path(f"{pace.report}.engine").write_text(json.dumps(medians))


class Sampler:
    """Notes the part of the code that runs, at equal intervals of CPU time."""

    def __init__(self) -> None:
        self.parts: Counter[str] = Counter()
        self.lines: Counter[str] = Counter()

        self._has_begun = False

    def start(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            signal.signal(signal.SIGPROF, self._note)
            signal.setitimer(signal.ITIMER_PROF, TICK_S, TICK_S)

    def stop(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0.0)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if frame is not None:
            self.lines[f"{frame.f_code.co_filename[-40:]}:{frame.f_lineno} {frame.f_code.co_name}"] += 1
        while frame is not None:
            part = next((part for sign, part in PARTS.items() if sign in frame.f_code.co_filename), None)
            if part is not None:
                self.parts[part] += 1
                return
            frame = frame.f_back
        self.parts["event loop and others"] += 1


class SampledEngine(RemoteEngine):
    """A client that samples from the first request on."""

    def __init__(self, pace: Pace, sampler: Sampler) -> None:
        super().__init__(run_stand_in, pace)
        self._sampler = sampler

    def new_id(self) -> int:
        self._sampler.start()
        return super().new_id()


def main(folder: str, step_ms: str, report: str, tokens_per_s: str = "0") -> int:
    config = ServerConfig(EngineConfig(ModelConfig(Path(folder))), "stand-in", port=0, default_source="local")
    config = replace(config, max_concurrent_requests=MANY)
    sampler = Sampler()
    client = SampledEngine(Pace(float(step_ms) / 1e3, report, float(tokens_per_s)), sampler)
    try:
        return run(config, client, KeyRing((), None, None))
    finally:
        sampler.stop()
        Path(report).write_text(json.dumps({"parts": sampler.parts, "lines": sampler.lines.most_common(60)}))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
