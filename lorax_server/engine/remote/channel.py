"""The channel between the API process and the engine process: typed messages, as msgpack over ZeroMQ.

    API process            a folder with mode 0700                           engine process
    ClientChannel  PUSH ──> to_engine    (the engine listens)      ──> PULL  EngineChannel
                   PULL <── from_engine  (the API process listens) <── PUSH

Each process listens before the other one sends, so no message waits for a second connection attempt. The sockets have
no high-water mark: the scheduler limits the queue, and tells rejected callers when to retry.
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

from lorax_server.engine.remote import messages
from lorax_server.errors import EngineError, LoraxError
from lorax_server.types import EngineInfo

logger = logging.getLogger(__name__)

TO_ENGINE, FROM_ENGINE = "to_engine", "from_engine"  # socket names in the folder
GRACE_S = 10.0  # for a process to end by itself, before stronger signals
LINGER_MS = 1000  # for the last messages, when a process ends
ACKNOWLEDGE_S = 5.0  # how long a failing engine waits until its reason has arrived
ORPHAN_S = 10.0  # how long an engine may take to end once the API process is gone


class ClientChannel:
    """The API process's end, for one engine process and one event loop, from the engine's start to its end.

    The event loop watches the socket itself: `zmq.asyncio` costs a fifth of a millisecond per message, and there is one
    message per step. The process sentinel becomes readable when the engine process is gone.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._from_engine = self._context.socket(zmq.PULL)
        self._to_engine: zmq.Socket[bytes] | None = None
        self._inbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._has_received = False
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
        if isinstance(first, messages.Ready):
            return first.info
        exit_code = await self.end()
        reason = f": {first.message}" if isinstance(first, messages.Failed) else ""
        raise EngineError(f"the engine process ended while it was starting ({describe(exit_code)}){reason}")

    def open(self) -> str:
        """Listen, and return the address for the engine."""
        self._folder = tempfile.TemporaryDirectory(prefix="lorax-")  # with mode 0700
        bind(self._from_engine, self._folder.name, FROM_ENGINE)
        self._loop.add_reader(self._from_engine.fileno(), self._read_socket)
        return self._folder.name

    async def receive(self) -> messages.FromEngine | None:
        """Return the next message, or None after the last message of an engine that is gone."""
        data = await self._inbox.get()
        if data is None:
            self._inbox.put_nowait(None)  # for the next call
            return None
        self._has_received = True
        return messages.decode_from_engine(data)

    @property
    def has_more(self) -> bool:
        """True if the next message has already arrived."""
        return not self._inbox.empty()

    def send(self, message: messages.ToEngine) -> None:
        """Send without waiting. The engine listens from its first message on."""
        data = messages.encode(message)
        if self._to_engine is None:
            assert self._folder is not None, "the channel is not open"
            self._to_engine = self._context.socket(zmq.PUSH)
            connect(self._to_engine, self._folder.name, TO_ENGINE)
        self._to_engine.send(data, zmq.NOBLOCK)

    async def end(self) -> int | None:
        """End the process, leave nothing of it behind, and return its exit code. May be called again if cancelled."""
        if self._process is not None:
            await self._end_process(self._process)
        self.close()
        return self._exit_code

    def close(self) -> None:
        """Close the sockets and remove the folder. Unread messages are lost."""
        if not self._from_engine.closed and self._folder is not None:
            self._loop.remove_reader(self._from_engine.fileno())
        if self._to_engine is not None:
            self._to_engine.close(linger=0)
        self._context.destroy(linger=0)
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
        self._read_socket()
        self._inbox.put_nowait(None)
        if not self._ended.done():
            self._ended.set_result(None)

    def _read_socket(self) -> None:
        """Read all messages: the socket does not become readable again for messages that are left in it."""
        with suppress(zmq.Again):
            while not self._from_engine.closed:
                self._inbox.put_nowait(self._from_engine.recv(zmq.NOBLOCK))

    async def _end_process(self, process: multiprocessing.process.BaseProcess) -> None:
        """Ask the process to stop, if it listens, then terminate it, then kill it."""
        stop: list[Callable[[], None]] = [partial(self.send, messages.Stop())] if self._has_received else []
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
    """The engine process's end. A thread receives messages, and sets `wake` for each. Any thread may send.

    Messages that `handle_urgent` handles, on that thread, do not reach `take`.
    """

    def __init__(self, address: str) -> None:
        self.wake = threading.Event()
        # Returns True if it has handled the message.
        self.handle_urgent: Callable[[messages.ToEngine], bool] = lambda _: False
        self._address = address
        self._context = zmq.Context()
        self._from_engine = self._context.socket(zmq.PUSH)
        self._inbox: queue.SimpleQueue[messages.ToEngine] = queue.SimpleQueue()
        self.has_failed = False
        self._was_heard = False
        self._sending = threading.Lock()

    def open(self) -> None:
        to_engine = self._context.socket(zmq.PULL)
        bind(to_engine, self._address, TO_ENGINE)
        connect(self._from_engine, self._address, FROM_ENGINE)
        threading.Thread(target=self._listen, args=(to_engine,), name="lorax-channel", daemon=True).start()

    def take(self) -> list[messages.ToEngine]:
        """Return all messages so far."""
        return [self._inbox.get() for _ in range(self._inbox.qsize())]

    def send(self, message: messages.EngineMessage) -> None:
        data = messages.encode(message)
        with self._sending:
            if not self._from_engine.closed:  # otherwise the API process has stopped listening
                self._from_engine.send(data, zmq.NOBLOCK)

    def report(self, error: Exception) -> None:
        """Report why the engine ends, from any thread, even if the step hangs. Only the first reason counts."""
        with self._sending:
            if self.has_failed:
                return
            self.has_failed = True
        reason = str(error) if isinstance(error, LoraxError) else f"{type(error).__name__}: {error}"
        self.send(messages.Failed(reason.encode(errors="backslashreplace").decode()))

    def fail(self, error: Exception) -> None:
        """Report, and wait until the report has arrived: messages on their way may be lost when a process ends."""
        self.report(error)
        until = time.monotonic() + ACKNOWLEDGE_S
        with suppress(queue.Empty):
            while not self._was_heard:
                self._was_heard = isinstance(self._inbox.get(timeout=max(0.0, until - time.monotonic())), messages.Stop)

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
                self._receive(to_engine.recv())
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
        self._inbox.put(messages.Stop())
        self.wake.set()

    def _end_as_orphan(self) -> None:
        """Clean up after the API process, which is gone, and stop; by force if that takes long."""
        shutil.rmtree(self._address, ignore_errors=True)
        self._inbox.put(messages.Stop())
        self.wake.set()
        time.sleep(ORPHAN_S)  # a daemon thread does not keep the process alive
        os._exit(1)

    def _receive(self, data: bytes) -> None:
        try:
            message = messages.decode_to_engine(data)
        except messages.ChannelError as error:
            answer = messages.answer_to_unreadable(data, error)
            if answer is None:
                raise  # a caller would wait for ever
            logger.exception("a message that cannot be read is rejected")
            self.send(answer)
        else:
            if not self.handle_urgent(message):
                self._inbox.put(message)
                self.wake.set()


def describe(exit_code: int | None) -> str:
    """Describe an exit code, with the signal that it stands for."""
    name = ""
    if exit_code is not None and exit_code < 0:
        with suppress(ValueError):
            name = f", {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}{name}"


def bind(socket: zmq.Socket[bytes], folder: str, name: str) -> None:
    socket.set_hwm(0)
    address = f"ipc://{Path(folder) / name}"
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise messages.ChannelError(f"cannot listen at {address}: {error}; TMPDIR chooses another folder") from error


def connect(socket: zmq.Socket[bytes], folder: str, name: str) -> None:
    socket.set_hwm(0)
    socket.connect(f"ipc://{Path(folder) / name}")
