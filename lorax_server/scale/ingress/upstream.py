"""One request to one replica's server, over HTTP."""

import socket
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from lorax_server.server.access.client_address import CLIENT_HEADER, sign_client

Headers = list[tuple[bytes, bytes]]

# Of a connection, and not of a request.
HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
     b"trailer", b"transfer-encoding", b"upgrade")
)  # fmt: skip
BY_PROXY = frozenset((b"date", b"server", b"x-request-id"))
AUTOMATIC = ("accept", "accept-encoding", "content-type", "user-agent")
EVENTS = "text/event-stream"
EVENT_END = b"\n\n"
CONNECT_S = 5.0
# Seconds of silence until a machine is asked whether it is still there, seconds between questions, number of questions;
# milliseconds that sent bytes may stay unconfirmed. A machine that loses its power closes no connection.
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}


class LostError(Exception):
    """A replica that went away before it had answered, or in the middle of a stream."""


class Received(NamedTuple):
    """A request as the ingress has it, with all of its body."""

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    client: str  # the client's address


class Answer:
    """A replica's answer: whole, or a stream of events whose first bytes are there."""

    def __init__(self, response: aiohttp.ClientResponse, body: bytes) -> None:
        self._response = response
        self.status = response.status
        self.body = body
        self.is_stream = response.content_type == EVENTS
        self.headers: Headers = [pair for pair in response.raw_headers if pair[0].lower() not in HOP_BY_HOP | BY_PROXY]

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield whole events, as they come. What is left of an event that never ended is left out."""
        rest = b""
        try:
            async for chunk in self._response.content.iter_any():
                end = (rest + chunk).rfind(EVENT_END)
                if end < 0:
                    rest += chunk
                else:
                    whole = rest + chunk
                    yield whole[: end + len(EVENT_END)]
                    rest = whole[end + len(EVENT_END) :]
        except (aiohttp.ClientError, OSError) as error:
            raise LostError(str(error)) from error


class Upstream:
    """Connections to the servers of all replicas."""

    def __init__(self, key: str) -> None:
        self._key = key  # the ingress's
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def send(self, address: str, received: Received) -> AsyncIterator[Answer]:
        """Send a request and yield the answer. Leaving before its end closes the connection, which aborts it there."""
        url = _url(address, received)
        try:
            async with self._client().request(
                received.method,
                url,
                headers=_forwarded(received, address, url.raw_path_qs, self._key),
                data=received.body or None,
                skip_auto_headers=AUTOMATIC,
                allow_redirects=False,
            ) as response:
                body = b"" if response.content_type == EVENTS else await response.read()
                yield Answer(response, body)
        except (aiohttp.ClientError, OSError) as error:
            raise LostError(str(error)) from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, connect=None, sock_connect=CONNECT_S)
            connector = aiohttp.TCPConnector(limit=0, socket_factory=_make_socket)
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=timeout, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
            )
        return self._session


def _make_socket(address: tuple[Any, ...]) -> socket.socket:
    """Make a socket that notices when the other machine is gone. Some systems lack some of the options."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


def _url(address: str, received: Received) -> URL:
    query = f"?{received.query.decode('latin-1')}" if received.query else ""
    return URL(f"http://{address}{received.path}{query}", encoded=True)


def _forwarded(received: Received, server: str, target: str, key: str) -> CIMultiDict[str]:
    """Return the headers as the client sent them, with its address, which the server cannot see, signed."""
    dropped = HOP_BY_HOP | {b"content-length", CLIENT_HEADER.encode()}
    kept: Iterable[tuple[bytes, bytes]] = (pair for pair in received.headers if pair[0].lower() not in dropped)
    headers = CIMultiDict((name.decode("latin-1"), value.decode("latin-1")) for name, value in kept)
    headers[CLIENT_HEADER] = sign_client(key, server, received.method, target, received.client, time.time())
    return headers
