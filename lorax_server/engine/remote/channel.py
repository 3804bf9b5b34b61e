"""The channel between who talks to users and the engine: typed messages, as msgpack over ZeroMQ.

    API process            a folder that only we may enter                   engine process
    ClientChannel  PUSH ──> to_engine    (the engine listens)      ──> PULL  EngineChannel
                   PULL <── from_engine  (the API process listens) <── PUSH

Each process listens before it is sent anything, so no message waits for a connection to be tried again. No socket has
a limit: how much may wait is for the scheduler to say, with an answer that tells when to come back.
"""

import asyncio
import logging
import multiprocessing
import os
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import zmq

from lorax_server.engine.remote.messages import (
    ChannelError,
    Failed,
    FromEngine,
    Stop,
    ToEngine,
    decode_from_engine,
    encode,
)
from lorax_server.errors import LoraxError

logger = logging.getLogger(__name__)

LINGER_MS = 1000  # for what was sent last, when a process ends
ACKNOWLEDGE_S = 5.0  # how long a failing engine waits until it is known why
ORPHAN_S = 10.0  # how long an engine may take to end once nobody is there to use it


class ClientChannel:
    """The end in the API process, for one engine process; of one event loop.

    The socket is read when the event loop finds it readable, not by `zmq.asyncio`: that takes a fifth of a millisecond
    for each message, and there is one for each step.
    """

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._from_engine = self._context.socket(zmq.PULL)
        self._to_engine: zmq.Socket[bytes] | None = None
        self._inbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> str:
        """Listen; the address that the engine needs."""
        self._folder = tempfile.TemporaryDirectory(prefix="lorax-")  # of mode 0700
        _bind(self._from_engine, self._folder.name, "from_engine")
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._from_engine.fileno(), self._take)
        return self._folder.name

    async def receive(self) -> FromEngine | None:
        """The next message; None if there is none any more."""
        data = await self._inbox.get()
        if data is None:
            self._inbox.put_nowait(None)  # for whoever asks again
            return None
        return decode_from_engine(data)

    def end(self) -> None:
        """The engine is gone: what it has sent is all that there will be."""
        self._take()
        self._inbox.put_nowait(None)

    def _take(self) -> None:
        """All that is there: of what is left nobody would be told."""
        try:
            while True:
                self._inbox.put_nowait(self._from_engine.recv(zmq.NOBLOCK))
        except zmq.Again:
            pass

    def send(self, message: ToEngine) -> None:
        """Never waits. Before the engine's first message nobody is there to listen."""
        data = encode(message)
        if self._to_engine is None:
            assert self._folder is not None, "the channel is not open"
            self._to_engine = self._context.socket(zmq.PUSH)
            _connect(self._to_engine, self._folder.name, "to_engine")
        self._to_engine.send(data, zmq.NOBLOCK)

    def close(self) -> None:
        """Leave nothing behind. What was not read is lost."""
        if self._loop is not None and not self._from_engine.closed:
            self._loop.remove_reader(self._from_engine.fileno())
        if self._to_engine is not None:
            self._to_engine.close(linger=0)
        self._context.destroy(linger=0)
        if self._folder is not None:
            self._folder.cleanup()


class EngineChannel:
    """The end in the engine process. A thread takes what arrives, and `wake` is set whenever something did.

    What `answer_at_once` takes, on that thread, is not kept. Any thread may send.
    """

    def __init__(self, address: str) -> None:
        self.wake = threading.Event()
        self.answer_at_once: Callable[[bytes], bool] = lambda _: False  # whether it has taken a message
        self._address = address
        self._context = zmq.Context()
        self._from_engine = self._context.socket(zmq.PUSH)
        self._inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.has_failed = False
        self._was_heard = False
        self._sending = threading.Lock()

    def open(self) -> None:
        to_engine = self._context.socket(zmq.PULL)
        _bind(to_engine, self._address, "to_engine")
        _connect(self._from_engine, self._address, "from_engine")
        threading.Thread(target=self._listen, args=(to_engine,), name="lorax-channel", daemon=True).start()

    def take(self) -> list[bytes]:
        """All messages that are there. They are decoded by who can answer those that cannot be."""
        return [self._inbox.get() for _ in range(self._inbox.qsize())]

    def send(self, message: FromEngine) -> None:
        data = encode(message)
        with self._sending:
            if not self._from_engine.closed:  # else nobody is there to hear what a thread has found out since
                self._from_engine.send(data, zmq.NOBLOCK)

    def report(self, error: Exception) -> None:
        """Say why the engine ends, from any thread: whoever is stuck will be ended. Only the first reason counts."""
        with self._sending:
            if self.has_failed:
                return
            self.has_failed = True
        reason = str(error) if isinstance(error, LoraxError) else f"{type(error).__name__}: {error}"
        self.send(Failed(reason.encode(errors="backslashreplace").decode()))

    def fail(self, error: Exception) -> None:
        """Report, and wait until it was heard: what is on its way when a process ends may be lost."""
        self.report(error)
        until, stop = time.monotonic() + ACKNOWLEDGE_S, encode(Stop())
        with suppress(queue.Empty):
            while not self._was_heard:
                self._was_heard = self._inbox.get(timeout=max(0.0, until - time.monotonic())) == stop

    def close(self) -> None:
        with self._sending:
            self._from_engine.close(linger=LINGER_MS)
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
        """Nothing is heard any more: say so and stop, so that another engine is started."""
        logger.error("the engine cannot listen any more, and ends", exc_info=error)
        self.report(error)
        self._inbox.put(encode(Stop()))
        self.wake.set()

    def _end_as_orphan(self) -> None:
        """The other process is gone, however it ended: clean up after it, and stop; by force if that takes long."""
        shutil.rmtree(self._address, ignore_errors=True)
        self._put(encode(Stop()))
        time.sleep(ORPHAN_S)  # in a daemon thread, which does not keep the process
        os._exit(1)

    def _put(self, data: bytes) -> None:
        if not self.answer_at_once(data):
            self._inbox.put(data)
            self.wake.set()


def _bind(socket: zmq.Socket[bytes], folder: str, name: str) -> None:
    socket.set_hwm(0)
    address = _address_of(folder, name)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ChannelError(f"cannot listen at {address}: {error}; TMPDIR chooses another folder") from error


def _connect(socket: zmq.Socket[bytes], folder: str, name: str) -> None:
    socket.set_hwm(0)
    socket.connect(_address_of(folder, name))


def _address_of(folder: str, name: str) -> str:
    return f"ipc://{Path(folder) / name}"
