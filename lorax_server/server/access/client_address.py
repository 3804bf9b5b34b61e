"""The address of a client behind the ingress of replicas: the ingress signs it, and a replica's server checks that.

Callers without a key are told apart by their addresses. Whoever reaches a replica's port can send the header, so that
it counts only with a signature (HMAC-SHA256) by the key that ingress and replicas share. The key itself never travels.
The signature is good for one method and one target, and for a few minutes, so that what is overheard is of little use.
"""

import hashlib
import hmac
import logging
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

logger = logging.getLogger(__name__)

CLIENT_HEADER = "x-lorax-client"  # seconds since 1970, the signature, and the address
GOOD_S = 300  # of a signature, before and after its time: the clocks of machines differ
WARN_S = 60.0  # between warnings of clocks that differ more


def sign_client(key: str, method: str, target: str, address: str, now: float) -> str:
    """Return the header of a request for a path with its query, from a client's address."""
    seconds = int(now)
    return f"{seconds} {_sign(key.encode(), seconds, method, target.encode(), address.encode())} {address}"


def _sign(key: bytes, seconds: int, method: str, target: bytes, address: bytes) -> str:
    signed = b"\n".join((str(seconds).encode(), method.encode(), target, address))
    return hmac.new(key, signed, hashlib.sha256).hexdigest()


class ClientAddress:
    """Takes the client's address from the ingress. The header goes no further in any case."""

    def __init__(self, app: ASGIApp, ingress_key: str, clock: Callable[[], float] = time.time) -> None:
        self._app, self._key, self._clock = app, ingress_key.encode(), clock
        self._warned_at = -WARN_S

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            name = CLIENT_HEADER.encode()
            sent = [value for key, value in scope["headers"] if key == name]
            scope = {**scope, "headers": [pair for pair in scope["headers"] if pair[0] != name]}
            address = self._read(scope, sent[0]) if len(sent) == 1 and self._key else b""
            if address:
                scope["client"] = (address.decode("latin-1"), 0)
        await self._app(scope, receive, send)

    def _read(self, scope: Scope, header: bytes) -> bytes:
        """Return the address that a header gives, if its signature is good."""
        seconds, _, rest = header.partition(b" ")
        signature, _, address = rest.partition(b" ")
        if not (seconds.isdigit() and len(seconds) < 20 and address):
            return b""
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        expected = _sign(self._key, int(seconds), scope["method"], target, address)
        if not hmac.compare_digest(expected.encode(), signature):
            return b""
        now = self._clock()
        if abs(now - int(seconds)) <= GOOD_S:
            return address
        if now - self._warned_at >= WARN_S:
            self._warned_at = now
            logger.warning(
                "a request was signed by the ingress %d s from now, so that its client is taken for the ingress: set "
                "the clocks of both machines", int(seconds) - int(now)
            )  # fmt: skip
        return b""
