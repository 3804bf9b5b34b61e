"""Run the engine's plans on several ranks. A single rank needs no more than its worker."""

import logging
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from lorax_server.config import EngineConfig
from lorax_server.distributed import join_group
from lorax_server.errors import ConfigError, EngineError, LoraxError
from lorax_server.phases import Phases
from lorax_server.plan import Capabilities, Prepared, StepMasks, StepPlan, StepResult
from lorax_server.process_tuning import limit_malloc_arenas, trim_malloc
from lorax_server.worker.worker import Worker, build_worker

logger = logging.getLogger(__name__)

CLOSE_S = 5.0  # for a rank to end by itself
REST_S = 1.0  # without a plan, until a rank gives memory back
EXPLAIN_S = 5.0  # to find out why a rank has ended
GROUP_TIMEOUT_S = 600.0  # for ranks to wait for each other, e.g. while one loads


class GroupExecutor:
    """The first rank in this process, each other rank in a process of its own. They end together."""

    def __init__(
        self,
        config: EngineConfig,
        on_death: Callable[[EngineError], None] | None = None,
        phases: Phases | None = None,
    ) -> None:
        """`on_death` is called, on a thread, as soon as a rank has ended unexpectedly. The first rank has `phases`."""
        self._on_death = on_death
        self._failure: EngineError | None = None
        self._is_closing = False
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="lorax-ranks-")
        meeting = f"file://{Path(self._folder.name) / 'meeting'}"
        self._ranks: list[BaseProcess] = []
        self._connections: list[Connection] = []
        for rank in range(1, config.tensor_parallel):
            ours, theirs = context.Pipe()
            process = context.Process(target=_run_rank, args=(config, rank, meeting, theirs), name=f"rank {rank}")
            process.start()
            theirs.close()
            self._ranks.append(process)
            self._connections.append(ours)
        self._watcher = threading.Thread(target=self._watch, name="watch ranks", daemon=True)
        self._watcher.start()
        try:
            self._worker = _join(config, 0, meeting, phases)
        except BaseException as error:
            explained = self._explain(error)
            self.close()
            raise explained from error

    @property
    def capabilities(self) -> Capabilities:
        return self._worker.capabilities

    def on_news(self, notify: Callable[[], None]) -> None:
        self._worker.on_news(notify)

    def take_prepared(self) -> list[Prepared]:
        return self._worker.take_prepared()

    def take_loaded(self) -> list[int]:
        return self._worker.take_loaded()

    def submit(self, plan: StepPlan) -> LoraxError | None:
        """Start a step on all ranks. A rank without memory for it ends them all: they cannot undo it together."""
        return self._do(plan, lambda: self._worker.submit(plan))

    def mask(self, masks: StepMasks) -> LoraxError | None:
        return self._do(masks, lambda: self._worker.mask(masks))

    def _do(self, order: StepPlan | StepMasks, work: Callable[[], LoraxError | None]) -> LoraxError | None:
        message = pickle.dumps(order, protocol=5)
        try:
            for connection in self._connections:
                connection.send_bytes(message)
            return work()
        except (OSError, RuntimeError) as error:  # a rank is gone, or a collective noticed that one is
            raise self._explain(error) from error

    def collect(self) -> StepResult:
        try:
            return self._worker.collect()
        except RuntimeError as error:
            raise self._explain(error) from error

    def close(self) -> None:
        self._is_closing = True
        for connection in self._connections:
            connection.close()  # tells the rank to end
        for process in self._ranks:
            process.join(CLOSE_S)
            if process.is_alive():
                process.kill()
                process.join()
        if hasattr(self, "_worker"):
            self._worker.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        self._folder.cleanup()

    def _explain(self, error: BaseException) -> BaseException:
        """Return what a rank said before it ended, which comes at about the same time as the error."""
        self._watcher.join(timeout=EXPLAIN_S)
        return self._failure or error

    def _watch(self) -> None:
        """Wait until a rank ends, then end the others: in the middle of a step they would not even notice."""
        ended = wait([process.sentinel for process in self._ranks])
        if self._is_closing:
            return
        dead = next(process for process in self._ranks if process.sentinel in ended)
        dead.join()  # for its exit code, which comes a moment later
        said = _last_words(self._connections[self._ranks.index(dead)])
        self._failure = EngineError(f"tensor-parallel {dead.name} ended with exit code {dead.exitcode}{said}")
        logger.error("%s", self._failure)
        for process in self._ranks:
            process.kill()
        if self._on_death is not None:
            self._on_death(self._failure)


def build_executor(
    config: EngineConfig, on_death: Callable[[EngineError], None] | None = None, phases: Phases | None = None
) -> Worker | GroupExecutor:
    if config.tensor_parallel == 1:
        return build_worker(config, phases=phases)
    return GroupExecutor(config, on_death, phases)


def _join(config: EngineConfig, rank: int, meeting: str, phases: Phases | None = None) -> Worker:
    if config.model.device.startswith("cuda:"):
        raise ConfigError(f"device {config.model.device!r} is one GPU; several ranks need one each: set device cuda")
    if config.model.device == "cuda":
        config = replace(config, model=replace(config.model, device=f"cuda:{rank}"))
    device = torch.device(config.model.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return build_worker(config, join_group(rank, config.tensor_parallel, meeting, device, GROUP_TIMEOUT_S), phases)


def _run_rank(config: EngineConfig, rank: int, meeting: str, connection: Connection) -> None:
    """Run a rank's process: execute the plans that come through the pipe until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; the engine ends its ranks itself
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        limit_malloc_arenas()
        worker = _join(config, rank, meeting)
        while True:
            plan = receive_plan(connection)
            worker.submit(plan)
            if plan.is_masked:
                masks: StepMasks = pickle.loads(connection.recv_bytes())
                worker.mask(masks)
            worker.take_prepared()
            worker.forget()
    except EOFError:
        os._exit(0)  # without waiting for threads that wait for other ranks
    except BaseException as error:
        text = str(error) if isinstance(error, LoraxError) else traceback.format_exc()
        connection.send_bytes(text.encode())
        print(f"rank {rank}: {text}", file=sys.stderr, flush=True)
        time.sleep(0.1)
        os._exit(1)


def receive_plan(connection: Connection) -> StepPlan:
    """Wait for the next plan. If none comes for a while, give back, once, the memory that the largest step needed."""
    if not connection.poll(REST_S):
        trim_malloc()
    plan: StepPlan = pickle.loads(connection.recv_bytes())
    return plan


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _last_words(connection: Connection) -> str:
    try:
        return f": {connection.recv_bytes().decode().strip()}" if connection.poll() else ""
    except (EOFError, OSError):
        return ""
