"""Sockets between an API process and the engine, in a folder that is theirs alone. Each process listens where it reads.

API process                    a folder with mode 0700
ClientSockets  PUSH ──> to_engine                (the engine listens)
               PULL <── from_engine, worker-<n>  (the API process listens)
"""

import asyncio
from contextlib import suppress
from pathlib import Path

import zmq

from lorax_server.engine.remote.messages import ChannelError, FromEngine, ToEngine, decode_from_engine, encode

TO_ENGINE, FROM_ENGINE = "to_engine", "from_engine"


def name_of(worker: int) -> str:
    """Return the name of the socket at which an API process listens."""
    return f"worker-{worker}" if worker else FROM_ENGINE


class ClientSockets:
    """The end in an API process, for one engine process and one event loop.

    The event loop watches the socket. `zmq.asyncio` would take a fifth of a millisecond for each message, and there is
    one for each step.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._address = ""
        self._from_engine = self._context.socket(zmq.PULL)
        self._to_engine: zmq.Socket[bytes] | None = None
        self._inbox: asyncio.Queue[bytes | None] = asyncio.Queue()

    def listen(self, folder: str, worker: int) -> None:
        """Listen for the engine's messages, in the folder that it shares."""
        bind(self._from_engine, folder, name_of(worker))
        self._address = folder
        self._loop.add_reader(self._from_engine.fileno(), self._take)

    async def receive(self) -> FromEngine | None:
        """Return the next message; None if there are no more, since the engine is gone."""
        data = await self._inbox.get()
        if data is None:
            self._inbox.put_nowait(None)  # for the next call
            return None
        return decode_from_engine(data)

    @property
    def has_more(self) -> bool:
        """The next message is here already."""
        return not self._inbox.empty()

    def send(self, message: ToEngine) -> None:
        """Send without waiting. The engine listens from its first message on."""
        data = encode(message)
        if self._to_engine is None:
            assert self._address, "the channel is not open"
            self._to_engine = self._context.socket(zmq.PUSH)
            connect(self._to_engine, self._address, TO_ENGINE)
        self._to_engine.send(data, zmq.NOBLOCK)

    def finish(self) -> None:
        """Note that the engine is gone: there are no more messages than have come."""
        self._take()
        self._inbox.put_nowait(None)

    def take_rest(self) -> list[FromEngine]:
        """Return all messages that have come and nobody has received, as far as they can be read."""
        self._take()
        rest = []
        with suppress(asyncio.QueueEmpty, ChannelError):
            while (data := self._inbox.get_nowait()) is not None:
                rest.append(decode_from_engine(data))
        return rest

    def close(self) -> None:
        """Close the sockets. Unread messages are lost."""
        if not self._from_engine.closed:
            self._loop.remove_reader(self._from_engine.fileno())
        if self._to_engine is not None:
            self._to_engine.close(linger=0)
        self._context.destroy(linger=0)

    def _take(self) -> None:
        """Read all messages: the socket does not become readable again for those that are left."""
        with suppress(zmq.Again):
            while not self._from_engine.closed:
                self._inbox.put_nowait(self._from_engine.recv(zmq.NOBLOCK))


def bind(socket: zmq.Socket[bytes], folder: str, name: str) -> None:
    socket.set_hwm(0)
    address = _address_of(folder, name)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ChannelError(f"cannot listen at {address}: {error}; TMPDIR chooses another folder") from error


def connect(socket: zmq.Socket[bytes], folder: str, name: str) -> None:
    socket.set_hwm(0)
    socket.connect(_address_of(folder, name))


def _address_of(folder: str, name: str) -> str:
    return f"ipc://{Path(folder) / name}"
