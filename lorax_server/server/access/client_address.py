"""The address of a client behind the ingress of replicas: the ingress signs it, and a replica's server checks that.

Callers without a key are told apart by their addresses. Whoever reaches a replica's port can send the header, so that
it counts only with a signature (HMAC-SHA256) by the key that ingress and replicas share. The key itself never travels.
The signature is good for one request of one method and one target at one server, within a minute, so that it is of no
use to those who overhear a request that has arrived.
"""

import hmac
import logging
import secrets
import time
from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from lorax_server.errors import AuthenticationError, LoraxError
from lorax_server.server.access.used_signatures import GOOD_S

logger = logging.getLogger(__name__)

CLIENT_HEADER = "x-lorax-client"  # seconds since 1970, a number for one use, the signature, and the address
NUMBER_BYTES = 8
WARN_S = 60.0  # between warnings: requests that are sent again and again must not fill the log


def sign_client(key: str, server: str, method: str, target: str, address: str, now: float) -> str:
    """Return the header of a request to a server, for a path with its query, from a client's address."""
    seconds, number = str(int(now)), secrets.token_hex(NUMBER_BYTES)
    parts = (seconds, number, server, method, target, address)
    return f"{seconds} {number} {_sign(key.encode(), *(part.encode() for part in parts)).hex()} {address}"


def _sign(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"\n".join(parts), "sha256")


class ClientAddress:
    """Takes the client's address from the ingress. The header goes no further in any case."""

    def __init__(
        self,
        app: ASGIApp,
        ingress_key: str,
        server: str,
        use: Callable[[bytes], Awaitable[None]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Make the check of a server, by the address at which the ingress calls it; `use` refuses what was used."""
        self._app, self._key, self._clock = app, ingress_key.encode(), clock
        self._server, self._use = server.encode(), use
        self._warned_at: dict[str, float] = {}  # by kind of warning

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            name = CLIENT_HEADER.encode()
            sent = [value for key, value in scope["headers"] if key == name]
            scope = {**scope, "headers": [pair for pair in scope["headers"] if pair[0] != name]}
            address = await self._read(scope, sent[0]) if len(sent) == 1 and self._key else b""
            if address:
                scope["client"] = (address.decode("latin-1"), 0)
        await self._app(scope, receive, send)

    async def _read(self, scope: Scope, header: bytes) -> bytes:
        """Return the address that a header gives, if its signature is good and was not used before."""
        seconds, number, signature, address = (*header.split(b" ", 3), b"", b"", b"")[:4]
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        expected = _sign(self._key, seconds, number, self._server, scope["method"].encode(), target, address)
        if not (address and hmac.compare_digest(expected.hex().encode(), signature)):
            return b""
        if not self._is_recent(int(seconds)):
            return b""
        try:
            await self._use(expected)
        except AuthenticationError as error:
            self._warn("used", f"{error}, so that the client is taken for the one who has sent it")
            return b""
        except LoraxError:
            return b""  # the server ends
        return address

    def _is_recent(self, seconds: int) -> bool:
        apart = seconds - self._clock()
        if abs(apart) <= GOOD_S:
            return True
        self._warn(
            "time",
            f"a request was signed by the ingress {apart:.0f} s from now, so that its client is taken for the one who "
            "has sent it: set the clocks of both machines, or somebody sends an old request again",
        )
        return False

    def _warn(self, kind: str, message: str) -> None:
        now = self._clock()
        if now - self._warned_at.get(kind, -WARN_S) >= WARN_S:
            self._warned_at[kind] = now
            logger.warning("%s", message)
