"""Messages over a pair of sockets between two processes, each after its length. The end of one ends the wire."""

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import msgspec

from lorax_server.errors import InputError
from lorax_server.server.workers.messages import WireMessage

logger = logging.getLogger(__name__)
Heard = TypeVar("Heard")

HEAD_BYTES = 4  # of a length


class Wire(asyncio.Protocol, Generic[Heard]):
    """One end. `on_message` gets the messages in their order. `lost` is done when there will be no more.

    A mistake in `on_message` ends the wire: what was told is not known then, and the other end begins anew.
    """

    def __init__(self, kind: Any, on_message: Callable[[Heard], None]) -> None:
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._decoder: msgspec.msgpack.Decoder[Heard] = msgspec.msgpack.Decoder(kind)
        self._on_message = on_message
        self._unread = bytearray()
        self._transport: asyncio.Transport | None = None

    async def open(self, end: socket.socket) -> None:
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)

    def send(self, message: WireMessage) -> None:
        """Send without waiting; to nobody, if the other end is gone. A text that cannot be sent is a caller's."""
        try:
            data = msgspec.msgpack.encode(message)
        except (TypeError, ValueError, OverflowError) as error:
            raise InputError(f"a message {type(message).__name__} cannot be sent: {error}") from error
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(len(data).to_bytes(HEAD_BYTES, "little") + data)

    def close(self) -> None:
        """Send what waits, then end."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it

    def data_received(self, data: bytes) -> None:
        unread, start = self._unread, 0
        unread += data
        while len(unread) - start >= HEAD_BYTES:
            begin = start + HEAD_BYTES
            end = begin + int.from_bytes(unread[start:begin], "little")
            if len(unread) < end:
                break
            start = end
            try:
                self._on_message(self._decoder.decode(unread[begin:end]))
            except Exception:
                logger.exception("a message of another process was not understood; its wire is cut")
                assert self._transport is not None
                self._transport.abort()
                return
        del unread[:start]

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if not self.lost.done():
            self.lost.set_result(None)
