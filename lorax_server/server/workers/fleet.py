"""The processes of the workers: all are started, and one that ends has another take its place."""

import asyncio
import atexit
import contextlib
import functools
import itertools
import logging
import multiprocessing
import socket
import time
from collections.abc import Callable

from lorax_server.engine.remote.channel import describe
from lorax_server.engine.remote.remote_engine import next_pause_s
from lorax_server.errors import LoraxError
from lorax_server.server.workers.desk import Desk
from lorax_server.server.workers.messages import Drain, ToParent
from lorax_server.server.workers.seat import Seat
from lorax_server.server.workers.wire import Wire

logger = logging.getLogger(__name__)

MAX_FAILURES = 3  # starts in a row that fail, until a place stays empty
FIRST_PAUSE_S = 0.1
KILL_S = 5.0  # for a process to end after its last warning


class WorkerError(LoraxError):
    """An API process that cannot start."""


class Fleet:
    """So many places for workers. `target` is called with a new number, and the worker's ends of two sockets: one for
    messages, the other for connections."""

    def __init__(self, target: Callable[[int, socket.socket, socket.socket], None], count: int, desk: Desk) -> None:
        self.empty: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # done: no place is left
        self._target = target
        self._count = count
        self._desk = desk
        self._numbers = itertools.count(1)
        self._stopping = asyncio.Event()
        self._keepers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start all workers, and wait until all serve. Raise if one cannot; the others have to be stopped then."""
        loop = asyncio.get_running_loop()
        served: list[asyncio.Future[None]] = [loop.create_future() for _ in range(self._count)]
        self._keepers = [asyncio.create_task(self._keep(place, first)) for place, first in enumerate(served, 1)]
        await asyncio.gather(*served)

    async def drain(self, within_s: float) -> None:
        """Let all workers end. Those that take longer are killed."""
        self._stopping.set()
        for seat in list(self._desk.seats):
            if seat.has_started:
                seat.send(Drain(at_once=False))
            else:
                seat.process.terminate()
        if self._keepers:
            await asyncio.wait(self._keepers, timeout=within_s)
        await self.stop()

    def hurry(self) -> None:
        """Let all workers end at once."""
        for seat in self._desk.seats:
            seat.send(Drain(at_once=True))

    async def stop(self) -> None:
        """End all workers that are still there."""
        self._stopping.set()
        for end in ("terminate", "kill"):
            for seat in list(self._desk.seats):
                getattr(seat.process, end)()
            left = [task for task in self._keepers if not task.done()]
            if left and self._desk.seats:
                await asyncio.wait(left, timeout=KILL_S)
        for task in self._keepers:
            task.cancel()  # it waits before it would start another one
        await asyncio.gather(*self._keepers, return_exceptions=True)

    # --- One place ----------------------------------------------------------------------------------------------------

    async def _keep(self, place: int, first: "asyncio.Future[None]") -> None:
        """Keep a place taken. `first` is settled once, when its first worker serves or cannot."""
        pause_s, num_failures = 0.0, 0
        while not self._stopping.is_set():
            began = time.monotonic()
            problem, has_served = await self._run_one(first)
            if self._stopping.is_set():
                break
            num_failures = 0 if has_served else num_failures + 1
            if not first.done():
                first.set_exception(WorkerError(f"API process {place} of {self._count} cannot start: {problem}"))
                return
            if num_failures == MAX_FAILURES:
                logger.error("API process %d cannot start: %s; its place stays empty", place, problem)
                break
            logger.error("API process %d ended (%s); its streams are lost, another takes its place", place, problem)
            self._desk.count_replaced()
            pause_s = next_pause_s(pause_s, time.monotonic() - began, FIRST_PAUSE_S)
            await asyncio.sleep(pause_s)
        others = [task for task in self._keepers if task is not asyncio.current_task()]
        if all(task.done() for task in others) and not self.empty.done():
            self.empty.set_result(None)

    async def _run_one(self, first: "asyncio.Future[None]") -> tuple[str, bool]:
        """Run a worker. Return why it ended, and whether it had served."""
        with contextlib.ExitStack() as undo:  # what was opened, if anything fails
            try:
                seat = await self._launch(first, undo)
            except Exception as error:  # for lack of files, a process or memory: the next try may find them
                return f"{type(error).__name__}: {error}", False
            undo.pop_all()
        return await self._wait_for_end(seat), seat.has_served

    async def _launch(self, first: "asyncio.Future[None]", undo: contextlib.ExitStack) -> Seat:
        wire_end, door_end = _make_pair(undo), _make_pair(undo)
        number = next(self._numbers)
        # Not a daemon: those may have no processes of their own, and templates are run by one.
        process = multiprocessing.get_context("spawn").Process(
            target=self._target, args=(number, wire_end[1], door_end[1]), name=f"lorax-api-{number}", daemon=False
        )
        process.start()
        undo.callback(process.kill)
        atexit.register(process.kill)
        for end in (wire_end[1], door_end[1]):
            end.close()
        door_end[0].setblocking(False)
        seat = Seat(number, process, door_end[0], first)
        asyncio.get_running_loop().add_reader(process.sentinel, _note_end, seat, process.sentinel)
        wire: Wire[ToParent] = Wire(ToParent, lambda message: self._desk.handle(seat, message))
        seat.connect(wire)
        await wire.open(wire_end[0])
        wire.lost.add_done_callback(functools.partial(_kill_unless_ended, seat))
        self._desk.admit(seat)
        return seat

    async def _wait_for_end(self, seat: Seat) -> str:
        """Wait until a worker's process is gone, and return why."""
        await asyncio.wait((seat.ended,))
        await asyncio.wait((seat.lost,), timeout=KILL_S)  # what it has said at last may have to be read
        self._desk.dismiss(seat)
        process = seat.process
        process.join()
        problem = seat.reason or describe(process.exitcode)
        atexit.unregister(process.kill)
        process.close()
        return problem


def _make_pair(undo: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair()
    for end in pair:
        undo.callback(end.close)
    return pair


def _kill_unless_ended(seat: Seat, _: object) -> None:
    """End a worker that cannot be talked to any more."""
    if not seat.ended.done():
        seat.process.kill()


def _note_end(seat: Seat, sentinel: int) -> None:
    asyncio.get_running_loop().remove_reader(sentinel)
    if not seat.ended.done():
        seat.ended.set_result(None)
