"""HTTP requests from the ingress to the servers of replicas."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from lorax_server.server.http.replica_protocol import CHANGE_HEADER, CLIENT_HEADER, SECRET_HEADER

Headers = list[tuple[bytes, bytes]]

# Headers that belong to a connection and not to a request.
HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
     b"trailer", b"transfer-encoding", b"upgrade")
)  # fmt: skip
NOT_FORWARDED = HOP_BY_HOP | {b"content-length", CLIENT_HEADER.encode(), SECRET_HEADER.encode()}
NOT_RETURNED = HOP_BY_HOP | {b"date", b"server", b"x-request-id", CHANGE_HEADER.encode()}  # Ray's proxy adds its own
AUTOMATIC_HEADERS = ("accept", "accept-encoding", "content-type", "user-agent")  # those that aiohttp would add
EVENT_STREAM = "text/event-stream"
EVENT_END = b"\n\n"
CONNECT_S = 5.0
# A machine that loses power closes no connection. Keep-alive probes: seconds until the first one, seconds between them,
# and their number; then milliseconds that sent bytes may stay unacknowledged. Not all systems have all options.
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}
KEEP_ALIVE_OPTIONS = {getattr(socket, name): value for name, value in KEEP_ALIVE.items() if hasattr(socket, name)}


class LostReplicaError(Exception):
    """A replica disconnected before the end of its response."""


class ForwardedRequest(NamedTuple):
    """A client's request with its whole body."""

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytearray
    client: str  # the client address


class Answer:
    """A replica's response: a whole body, or a stream of events."""

    def __init__(self, response: aiohttp.ClientResponse, body: bytes) -> None:
        self._response = response
        self.status = response.status
        self.body = body
        self.is_stream = response.content_type == EVENT_STREAM
        self.change = response.headers.get(CHANGE_HEADER)
        self.headers: Headers = [pair for pair in response.raw_headers if pair[0].lower() not in NOT_RETURNED]

    async def events(self) -> AsyncIterator[bytes]:
        """Yield complete events. An incomplete event at the end of a broken stream is dropped."""
        rest = b""
        try:
            async for chunk in self._response.content.iter_any():
                events, end, rest = (rest + chunk).rpartition(EVENT_END)
                if end:
                    yield events + end
        except (aiohttp.ClientError, OSError) as error:
            raise LostReplicaError(str(error)) from error


class Upstream:
    """Connections to the servers of all replicas."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def send(self, address: str, request: ForwardedRequest) -> AsyncIterator[Answer]:
        """Send a request and yield the response. Leaving early closes the connection, which aborts the request."""
        query = f"?{request.query.decode('latin-1')}" if request.query else ""
        kept = ((name, value) for name, value in request.headers if name.lower() not in NOT_FORWARDED)
        headers = CIMultiDict((name.decode("latin-1"), value.decode("latin-1")) for name, value in kept)
        headers[SECRET_HEADER], headers[CLIENT_HEADER] = self._secret, request.client
        try:
            async with self._client().request(
                request.method,
                URL(f"http://{address}{request.path}{query}", encoded=True),
                headers=headers,
                data=request.body or None,
                skip_auto_headers=AUTOMATIC_HEADERS,
                allow_redirects=False,
            ) as response:
                body = b"" if response.content_type == EVENT_STREAM else await response.read()
                yield Answer(response, body)
        except (aiohttp.ClientError, OSError) as error:
            raise LostReplicaError(str(error)) from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, socket_factory=_make_socket),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session


def _make_socket(address: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEP_ALIVE_OPTIONS.items():
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made
