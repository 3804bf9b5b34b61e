"""A lightweight engine in a separate process that repeats prompts and fails on request."""

import fcntl
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from lorax_server.engine.remote import channel as channel_module
from lorax_server.engine.remote.channel import EngineChannel
from lorax_server.engine.remote.process import open_channel, serve
from lorax_server.errors import (
    AdapterError,
    AdapterNotFoundError,
    ConfigError,
    EngineError,
    InputError,
    LoraxError,
    OverloadedError,
    SourceError,
)
from lorax_server.types import (
    AdapterRef,
    AdapterState,
    EngineInfo,
    EngineStatus,
    FinishReason,
    Merge,
    Output,
    Request,
    ResolvedAdapter,
    SampledToken,
    SamplingParams,
    StopParams,
)

if TYPE_CHECKING:
    from lorax_server.engine.engine import Engine
else:  # imports numpy, which would slow down process start
    Engine = object


def make_fake_request(request_id: int, tokens: Sequence[int] = (1, 2, 3), how: str = "") -> Request:
    """Create a request that repeats these tokens. `how` selects a behavior of `FakeEngine`."""
    return Request(request_id, list(tokens), SamplingParams(), StopParams(), tenant=how)


def fake_info(number: int, pid: int = 0) -> EngineInfo:
    """Return engine info that identifies the process and its start number."""
    return EngineInfo(128, 300, num_blocks=number, block_size=16, dtype="float32", device=f"process {pid}")


class FakeEngine(Engine):
    """An engine that returns one prompt token per request and step."""

    idle_s = 1000.0  # so long that only `wake` causes steps

    def __init__(self, channel: EngineChannel) -> None:
        self.wake = threading.Event()
        self.is_closed = False
        self._channel = channel
        self._requests: dict[int, Request] = {}
        self._left: dict[int, deque[int]] = {}
        self._aborted: dict[int, Future[ResolvedAdapter]] = {}
        self._later: list[tuple[Future[None], LoraxError | None]] = []

    @property
    def is_busy(self) -> bool:
        return bool(self._left or self._later)

    def wait(self) -> None:
        if not self.is_busy:
            self.wake.wait(self.idle_s)
        self.wake.clear()

    def resolve(self, refs: Sequence[AdapterRef], merge: Merge | None = None) -> Future[ResolvedAdapter]:
        future: Future[ResolvedAdapter] = Future()
        ((source, name, token),) = refs
        match source:
            case "pid":
                future.set_result(ResolvedAdapter(str(os.getpid())))
            case "aborted":  # reports the abort
                return self._aborted.setdefault(int(name), future)
            case "never":
                pass
            case "thread":
                threading.Thread(target=lambda: future.set_result(ResolvedAdapter(name))).start()
            case "missing":
                future.set_exception(AdapterNotFoundError(f"no {name}"))
            case "down":
                error = SourceError(f"{name} is down")
                error.retry_after_s = 2.5
                future.set_exception(error)
            case "refused":
                raise InputError(f"not {name}")
            case "mistake":
                future.set_exception(KeyError(name))
            case "exit":
                future.set_exception(SystemExit(name))
            case "cancelled":
                future.cancel()
            case "odd":
                future.set_result(ResolvedAdapter(name, folder="\udcff"))
            case _:
                future.set_result(ResolvedAdapter(f"{source}:{name}:{token}:{merge}", "folder", ("tokenizer.json",)))
        return future

    def add(self, request: Request) -> None:
        match request.tenant:
            case "refused":
                raise OverloadedError("too much", retry_after_s=7.5)
            case "mistake":
                raise KeyError("what")
        self._requests[request.request_id] = request
        self._left[request.request_id] = deque(request.prompt_ids)

    def abort(self, request_id: int) -> None:
        self._left.pop(request_id, None)
        self._aborted.setdefault(request_id, Future()).set_result(ResolvedAdapter("aborted"))

    def forget(self, source: str, name: str) -> None:
        if source == "nowhere":
            raise InputError(f"no {name}")

    def list_adapters(self, identities: Sequence[str]) -> list[AdapterState]:
        return [AdapterState(identity, "name", "on disk", 7, True, 1, 2) for identity in identities]

    def load(self, identity: str, pin: bool | None = None) -> Future[None]:
        future: Future[None] = Future()
        self._later.append((future, None if pin else AdapterError(f"{identity} is not pinned")))
        return future

    def unload(self, identity: str) -> None:
        if identity == "in use":
            raise AdapterError("it is in use")

    def step(self) -> list[Output]:
        for future, error in self._later:
            future.set_result(None) if error is None else future.set_exception(error)
        self._later = []
        return [self._output(request_id) for request_id in list(self._left)]

    def _output(self, request_id: int) -> Output:
        left = self._left[request_id]
        token_id = left.popleft()
        is_first = len(left) + 1 == len(self._requests[request_id].prompt_ids)
        if not is_first:
            self._fail_as_requested(self._requests[request_id].tenant)
        if self._requests[request_id].tenant == "hang" or not left:
            del self._left[request_id]
        match self._requests[request_id].tenant:
            case "failed":
                self._left.pop(request_id, None)
                return Output.failed(request_id, AdapterError("broken adapter"))
            case "unprintable":
                self._left.pop(request_id, None)
                return Output.failed(request_id, AdapterError("broken \udcff"))
            case "hang":
                return Output(request_id, (SampledToken(token_id, 0.0),))
        return Output(request_id, (SampledToken(token_id, -0.5),), None if left else FinishReason.EOS_TOKEN)

    def _fail_as_requested(self, how: str) -> None:
        match how:
            case "raise":
                raise RuntimeError("boom \udcff")
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stuck":
                while True:
                    time.sleep(1)
            case "report" | "report, stuck":
                error = EngineError("rank 1 ended")
                threading.Thread(target=self._channel.report, args=(error,)).start()
                while how == "report, stuck":
                    time.sleep(1)
            case "garbage":
                self._channel._from_engine.send(b"\xc1")

    def status(self) -> EngineStatus:
        return EngineStatus(**{field.name: index for index, field in enumerate(fields(EngineStatus))})

    def close(self) -> None:
        self.is_closed = True


@dataclass(frozen=True)
class FakeConfig:
    folder: str  # each start creates a file there, locked while the process lives
    starts: tuple[str, ...] = ()  # faults by start number; later starts succeed
    ignore_sigterm: bool = False
    orphan_s: float = channel_module.ORPHAN_EXIT_TIMEOUT_S


def fake_target(config: FakeConfig, address: str) -> None:
    logging.disable()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the parent process may ignore SIGINT
    channel_module.ORPHAN_EXIT_TIMEOUT_S = config.orphan_s
    folder = Path(config.folder)
    number = len(list(folder.iterdir()))
    unseen = folder.parent / f"start-{os.getpid()}"
    with unseen.open("w") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        unseen.rename(folder / f"{number}-{os.getpid()}")  # tests can wait for its lock
        if config.ignore_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        how = config.starts[number] if number < len(config.starts) else ""
        if how == "die early":
            os.kill(os.getpid(), signal.SIGKILL)
        with open_channel(address) as channel:
            match how:
                case "raise":
                    raise ConfigError("no such model")
                case "raise, bug":
                    raise ZeroDivisionError("division by zero")
                case "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "exit":
                    raise SystemExit(7)
                case "hang":
                    time.sleep(1000)
            serve(FakeEngine(channel), channel, fake_info(number, os.getpid()))
