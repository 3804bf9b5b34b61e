"""The channel between the API process and the engine process, which exchange msgpack messages over ZeroMQ.

API process            a folder with mode 0700                           engine process
    ClientChannel  PUSH ──> to_engine    (the engine listens)      ──> PULL  EngineChannel
                   PULL <── from_engine  (the API process listens) <── PUSH

Each process listens before the other process sends, so no message waits for a reconnect. The sockets have no high-water
mark: the scheduler limits the queue and returns a retry time to rejected callers.
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
from lorax_server.types import EngineInfo, Failure

logger = logging.getLogger(__name__)

TO_ENGINE, FROM_ENGINE = "to_engine", "from_engine"  # socket names in the folder
STOP_GRACE_S = 10.0  # wait for the process to exit before the next, stronger signal
LINGER_MS = 1000  # maximum wait for unsent messages at shutdown
ACKNOWLEDGE_TIMEOUT_S = 5.0  # maximum wait until the API process has received the failure
ORPHAN_EXIT_TIMEOUT_S = 10.0  # maximum shutdown time after the API process exited


class ClientChannel:
    """The API process's side of the channel. An instance belongs to one engine process and one event loop.

    The event loop watches the socket directly, because `zmq.asyncio` takes 0.2 ms per message, and every step sends a
    message. The process sentinel becomes readable when the engine process exits.
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
        self._exited: asyncio.Future[None] = self._loop.create_future()
        self._exit_code: int | None = None

    async def start(self, target: Callable[[str], None]) -> EngineInfo:
        """Start a process that runs `target(address)`, and wait until it accepts requests.

        If the engine fails to start, stop the process and raise an error. User errors are raised unchanged.
        """
        try:
            self._launch(target, self.open())
            first = await self.receive()
        except BaseException:
            await self.stop()
            raise
        if isinstance(first, messages.Ready):
            return first.info
        exit_code = await self.stop()
        if isinstance(first, messages.EngineFailed) and first.user_error is not None:
            raise first.user_error.to_error()
        reason = f": {first.message}" if isinstance(first, messages.EngineFailed) else ""
        raise EngineError(f"the engine process exited during startup ({describe_exit(exit_code)}){reason}")

    def open(self) -> str:
        """Open the receiving socket, and return the address for the engine process."""
        self._folder = tempfile.TemporaryDirectory(prefix="lorax-")  # with mode 0700
        bind(self._from_engine, self._folder.name, FROM_ENGINE)
        self._loop.add_reader(self._from_engine.fileno(), self._read_socket)
        return self._folder.name

    async def receive(self) -> messages.FromEngine | None:
        """Return the next message, or None if the engine has stopped and all its messages were returned."""
        data = await self._inbox.get()
        if data is None:
            self._inbox.put_nowait(None)  # put back for the next call
            return None
        self._has_received = True
        return messages.decode_from_engine(data)

    @property
    def has_more(self) -> bool:
        """Return True if the next message has already arrived."""
        return not self._inbox.empty()

    def send(self, message: messages.ToEngine) -> None:
        """Send a message without blocking. Call this only after the engine's first message has arrived."""
        data = messages.encode(message)
        if self._to_engine is None:
            assert self._folder is not None, "the channel is not open"
            self._to_engine = self._context.socket(zmq.PUSH)
            connect(self._to_engine, self._folder.name, TO_ENGINE)
        self._to_engine.send(data, zmq.NOBLOCK)

    async def stop(self) -> int | None:
        """Stop the process, clean up, and return the exit code. If this is canceled, it can be called again."""
        if self._process is not None:
            await self._stop_process(self._process)
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
        # Daemon processes cannot have children, but the engine starts one process per rank.
        process = multiprocessing.get_context("spawn").Process(
            target=target, args=(address,), name="lorax-engine", daemon=False
        )
        process.start()
        self._process = process
        # Otherwise Python would wait for the process at exit if `stop` was not called.
        atexit.register(process.kill)
        self._loop.add_reader(process.sentinel, self._on_process_exit, process.sentinel)

    def _on_process_exit(self, sentinel: int) -> None:
        self._loop.remove_reader(sentinel)
        self._read_socket()
        self._inbox.put_nowait(None)
        if not self._exited.done():
            self._exited.set_result(None)

    def _read_socket(self) -> None:
        """Read all messages, because the event loop is not notified again about unread messages."""
        with suppress(zmq.Again):
            while not self._from_engine.closed:
                self._inbox.put_nowait(self._from_engine.recv(zmq.NOBLOCK))

    async def _stop_process(self, process: multiprocessing.process.BaseProcess) -> None:
        """Send `Stop` if the engine accepts messages, then SIGTERM, then SIGKILL, until the process exits."""
        request: list[Callable[[], None]] = [partial(self.send, messages.Stop())] if self._has_received else []
        for stop in (*request, process.terminate, process.kill):
            if not self._exited.done():
                stop()
                await asyncio.wait((self._exited,), timeout=STOP_GRACE_S)
        await asyncio.wait((self._exited,))  # do not await the future directly: cancellation would cancel it
        process.join()
        self._exit_code = process.exitcode
        atexit.unregister(process.kill)
        process.close()
        self._process = None


class EngineChannel:
    """The engine process's side of the channel. A thread receives messages and sets `wake`. `send` is thread-safe.

    Messages that `handle_urgent` accepts are handled on the receiving thread. `receive_all` returns all other messages.
    """

    def __init__(self, address: str) -> None:
        self.wake = threading.Event()
        # Called on the receiving thread. Returns True if it has handled the message.
        self.handle_urgent: Callable[[messages.ToEngine], bool] = lambda _: False
        self._address = address
        self._context = zmq.Context()
        self._from_engine = self._context.socket(zmq.PUSH)
        self._inbox: queue.SimpleQueue[messages.ToEngine] = queue.SimpleQueue()
        self.has_failed = False
        self._is_acknowledged = False
        self._sending = threading.Lock()

    def open(self) -> None:
        to_engine = self._context.socket(zmq.PULL)
        bind(to_engine, self._address, TO_ENGINE)
        connect(self._from_engine, self._address, FROM_ENGINE)
        threading.Thread(target=self._listen, args=(to_engine,), name="lorax-channel", daemon=True).start()

    def receive_all(self) -> list[messages.ToEngine]:
        """Return all messages received so far, without blocking."""
        return [self._inbox.get() for _ in range(self._inbox.qsize())]

    def send(self, message: messages.EngineMessage) -> None:
        data = messages.encode(message)
        with self._sending:
            if not self._from_engine.closed:  # otherwise the channel is closed
                self._from_engine.send(data, zmq.NOBLOCK)

    def report(self, error: Exception) -> None:
        """Send a fatal error to the API process. Only the first call has an effect.

        Any thread may call this, even if the engine thread hangs in a step.
        """
        with self._sending:
            if self.has_failed:
                return
            self.has_failed = True
        reason = str(error) if isinstance(error, LoraxError) else f"{type(error).__name__}: {error}"
        user_error = None
        if isinstance(error, LoraxError) and not isinstance(error, EngineError):
            user_error = Failure.from_error(error)
        self.send(messages.EngineFailed(reason.encode(errors="backslashreplace").decode(), user_error))

    def fail(self, error: Exception) -> None:
        """Report a fatal error and wait for the acknowledgment, because unsent messages may be lost at process exit."""
        self.report(error)
        until = time.monotonic() + ACKNOWLEDGE_TIMEOUT_S
        with suppress(queue.Empty):
            while not self._is_acknowledged:
                self._is_acknowledged = isinstance(
                    self._inbox.get(timeout=max(0.0, until - time.monotonic())), messages.Stop
                )

    def close(self) -> None:
        with self._sending:
            self._from_engine.close(linger=LINGER_MS)
        self._context.term()  # also stops the thread

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
            self._stop_after_receive_error(error)
            return
        finally:
            to_engine.close(linger=0)
        self._stop_after_parent_exit()

    def _stop_after_receive_error(self, error: Exception) -> None:
        """Report the error and stop, so that the API process starts a new engine."""
        logger.error("the engine cannot receive messages and stops", exc_info=error)
        self.report(error)
        self._inbox.put(messages.Stop())
        self.wake.set()

    def _stop_after_parent_exit(self) -> None:
        """Stop the engine because the API process has exited. If the engine does not stop in time, kill this
        process.
        """
        shutil.rmtree(self._address, ignore_errors=True)
        self._inbox.put(messages.Stop())
        self.wake.set()
        time.sleep(ORPHAN_EXIT_TIMEOUT_S)  # this thread is a daemon and does not delay a normal exit
        os._exit(1)

    def _receive(self, data: bytes) -> None:
        try:
            message = messages.decode_to_engine(data)
        except messages.ChannelError as error:
            reply = messages.reply_to_unreadable(data, error)
            if reply is None:
                raise  # the sender cannot be notified
            logger.exception("rejected an unreadable message")
            self.send(reply)
        else:
            if not self.handle_urgent(message):
                self._inbox.put(message)
                self.wake.set()


def describe_exit(exit_code: int | None) -> str:
    """Return a description of an exit code, with the signal name if a signal killed the process."""
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
        raise messages.ChannelError(f"cannot listen at {address}: {error}; set TMPDIR to use another folder") from error


def connect(socket: zmq.Socket[bytes], folder: str, name: str) -> None:
    socket.set_hwm(0)
    socket.connect(f"ipc://{Path(folder) / name}")
