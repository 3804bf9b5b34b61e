"""The channel between the API process and the engine process: typed messages, as msgpack over ZeroMQ.

    API process            a folder with mode 0700                           engine process
    ClientChannel  PUSH ──> to_engine    (the engine listens)      ──> PULL  EngineChannel
                   PULL <── from_engine  (the API process listens) <── PUSH

Each process listens before the other one sends, so no message waits for a second try to connect. The sockets have no
limit: the scheduler decides how much may wait, and tells refused callers when to come back.

Further API processes (`JoinedEngine`) send to the same socket, and each listens at one of its own. The ids of requests
and queries tell them apart, and say whom an output or a reply is for. One socket that addresses them all (ROUTER) would
drop what the engine sends before such a process has connected, and could not be used by two threads.
"""

import asyncio
import atexit
import logging
import multiprocessing
import os
import queue
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import zmq

from lorax_server.engine.remote.messages import (
    EngineMessage,
    Failed,
    FromEngine,
    Ready,
    Stop,
    encode,
    split,
)
from lorax_server.engine.remote.sockets import FROM_ENGINE, TO_ENGINE, ClientSockets, bind, connect, name_of
from lorax_server.errors import EngineError, LoraxError
from lorax_server.types import EngineInfo

logger = logging.getLogger(__name__)

GRACE_S = 10.0  # for a process to end by itself, before stronger signals
LINGER_MS = 1000  # for the last messages, when a process ends
ACKNOWLEDGE_S = 5.0  # how long a failing engine waits until its reason has arrived
ORPHAN_S = 10.0  # how long an engine may take to end once the API process is gone


class ClientChannel(ClientSockets):
    """The end in the process that starts the engine, from the engine's start to its end.

    The process's sentinel shows its end: the system makes it readable the moment it is gone.
    """

    def __init__(self) -> None:
        super().__init__()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._has_heard = False
        self._process: multiprocessing.process.BaseProcess | None = None
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._exit_code: int | None = None

    async def start(self, target: Callable[[str], None]) -> EngineInfo:
        """Start a process that runs `target(address)`, and return the engine's facts once it takes requests.

        Raise if it cannot start; then it is gone.
        """
        try:
            self._launch(target, self.open())
            first = await self.receive()
        except BaseException:
            await self.end()
            raise
        if isinstance(first, Ready):
            return first.info
        exit_code = await self.end()
        reason = f": {first.message}" if isinstance(first, Failed) else ""
        raise EngineError(f"the engine process ended while it was starting ({describe(exit_code)}){reason}")

    def open(self) -> str:
        """Listen, and return the address for the engine."""
        self._folder = tempfile.TemporaryDirectory(prefix="lorax-")  # with mode 0700
        self.listen(self._folder.name, 0)
        return self._folder.name

    async def receive(self) -> FromEngine | None:
        message = await super().receive()
        self._has_heard |= message is not None
        return message

    @property
    def address(self) -> str:
        """The folder, at which further API processes find the engine."""
        return self._address

    async def end(self) -> int | None:
        """End the process, leave nothing of it behind, and return its exit code. May be called again if cancelled."""
        if self._process is not None:
            await self._end_process(self._process)
        self.close()
        return self._exit_code

    def close(self) -> None:
        """Close the sockets and remove the folder. Unread messages are lost."""
        super().close()
        if self._folder is not None:
            self._folder.cleanup()

    def _launch(self, target: Callable[[str], None], address: str) -> None:
        # Not a daemon: those may have no processes of their own, and an engine starts ranks.
        process = multiprocessing.get_context("spawn").Process(
            target=target, args=(address,), name="lorax-engine", daemon=False
        )
        process.start()
        self._process = process
        # Python waits for its processes before it ends, for ever if `end` was never called.
        atexit.register(process.kill)
        self._loop.add_reader(process.sentinel, self._note_end, process.sentinel)

    def _note_end(self, sentinel: int) -> None:
        self._loop.remove_reader(sentinel)
        self.finish()
        if not self._ended.done():
            self._ended.set_result(None)

    async def _end_process(self, process: multiprocessing.process.BaseProcess) -> None:
        """Ask the process to stop, if it listens, then terminate it, then kill it."""
        stop: list[Callable[[], None]] = [partial(self.send, Stop())] if self._has_heard else []
        for end in (*stop, process.terminate, process.kill):
            if not self._ended.done():
                end()
                await asyncio.wait((self._ended,), timeout=GRACE_S)
        await asyncio.wait((self._ended,))  # not the future itself, which would be cancelled with us
        process.join()
        self._exit_code = process.exitcode
        atexit.unregister(process.kill)
        process.close()
        self._process = None


class EngineChannel:
    """The end in the engine process. A thread receives messages, and sets `wake` for each.

    Messages that `answer_at_once` takes, on that thread, are not kept. Any thread may send.
    """

    def __init__(self, address: str) -> None:
        self.wake = threading.Event()
        self.answer_at_once: Callable[[bytes], bool] = lambda _: False  # True if it has taken the message
        self._address = address
        self._context = zmq.Context()
        self._from_engine = self._context.socket(zmq.PUSH)
        self._workers: dict[int, zmq.Socket[bytes]] = {}  # to further API processes, by their numbers
        self._inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.has_failed = False
        self._was_heard = False
        self._sending = threading.Lock()

    def open(self) -> None:
        to_engine = self._context.socket(zmq.PULL)
        bind(to_engine, self._address, TO_ENGINE)
        connect(self._from_engine, self._address, FROM_ENGINE)
        threading.Thread(target=self._listen, args=(to_engine,), name="lorax-channel", daemon=True).start()

    def take(self) -> list[bytes]:
        """Return all messages so far, undecoded: the caller answers those that cannot be decoded."""
        return [self._inbox.get() for _ in range(self._inbox.qsize())]

    def send(self, message: EngineMessage) -> None:
        """Send to each API process what is meant for it. Nothing is sent if a part of it cannot be."""
        parts = split(message) if self._workers else {0: message}
        encoded = [(worker, encode(part)) for worker, part in parts.items()]
        with self._sending:
            for worker, data in encoded:
                socket = self._workers.get(worker, self._from_engine)
                if not socket.closed:  # else the API process has stopped listening
                    socket.send(data, zmq.NOBLOCK)

    def join(self, worker: int) -> None:
        """Send to a further API process from now on what is meant for it. It listens already."""
        socket = self._context.socket(zmq.PUSH)
        connect(socket, self._address, name_of(worker))
        with self._sending:
            self._workers[worker] = socket

    def part(self, worker: int) -> None:
        """Drop what a further API process has not read: it is gone."""
        with self._sending:
            socket = self._workers.pop(worker, None)
            if socket is not None:
                socket.close(linger=0)
        with suppress(OSError):
            Path(self._address, name_of(worker)).unlink(missing_ok=True)

    def report(self, error: Exception) -> None:
        """Report why the engine ends, from any thread, even if the step hangs. Only the first reason counts."""
        with self._sending:
            if self.has_failed:
                return
            self.has_failed = True
        reason = str(error) if isinstance(error, LoraxError) else f"{type(error).__name__}: {error}"
        self.send(Failed(reason.encode(errors="backslashreplace").decode()))

    def fail(self, error: Exception) -> None:
        """Report, and wait until the report has arrived: messages on their way may be lost when a process ends."""
        self.report(error)
        until, stop = time.monotonic() + ACKNOWLEDGE_S, encode(Stop())
        with suppress(queue.Empty):
            while not self._was_heard:
                self._was_heard = self._inbox.get(timeout=max(0.0, until - time.monotonic())) == stop

    def close(self) -> None:
        with self._sending:
            for socket in (self._from_engine, *self._workers.values()):
                socket.close(linger=LINGER_MS)
        self._context.term()  # also ends the thread

    def _listen(self, to_engine: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(to_engine, zmq.POLLIN)
        parent = multiprocessing.parent_process()
        if parent is not None:
            poller.register(parent.sentinel, zmq.POLLIN)
        try:
            while any(ready is to_engine for ready, _ in poller.poll()):
                self._put(to_engine.recv())
        except zmq.ContextTerminated:
            return
        except Exception as error:
            self._end_as_deaf(error)
            return
        finally:
            to_engine.close(linger=0)
        self._end_as_orphan()

    def _end_as_deaf(self, error: Exception) -> None:
        """Report that no message can be received any more, and stop, so that another engine is started."""
        logger.error("the engine cannot listen any more, and ends", exc_info=error)
        self.report(error)
        self._inbox.put(encode(Stop()))
        self.wake.set()

    def _end_as_orphan(self) -> None:
        """Clean up after the API process, which is gone, and stop; by force if that takes long."""
        shutil.rmtree(self._address, ignore_errors=True)
        self._put(encode(Stop()))
        time.sleep(ORPHAN_S)  # a daemon thread does not keep the process alive
        os._exit(1)

    def _put(self, data: bytes) -> None:
        if not self.answer_at_once(data):
            self._inbox.put(data)
            self.wake.set()


def describe(exit_code: int | None) -> str:
    """Describe an exit code, with the signal that it stands for."""
    name = ""
    if exit_code is not None and exit_code < 0:
        with suppress(ValueError):
            name = f", {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}{name}"
