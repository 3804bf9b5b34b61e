"""Signatures of the ingress that were used: each is good for one request, whichever API process gets it."""

import time
from collections.abc import Callable

from lorax_server.errors import AuthenticationError

GOOD_S = 60  # of a signature, before and after its time: the clocks of machines differ


class UsedSignatures:
    """Remembers signatures for as long as they are good, at most twice that: those of a while, and of the one before.

    Only signatures by the ingress's key come here, so that their number is that of its requests in four minutes.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._began = clock()
        self._signatures, self._earlier = set[bytes](), set[bytes]()

    def use(self, signature: bytes) -> None:
        """Use a signature, or refuse it."""
        now = self._clock()
        if abs(now - self._began) >= 2 * GOOD_S:
            self._began = now
            self._signatures, self._earlier = set(), self._signatures
        if signature in self._signatures or signature in self._earlier:
            raise AuthenticationError("a signature of the ingress was used before")
        self._signatures.add(signature)
