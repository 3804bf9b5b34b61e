"""The names that a request's `Host` may have.

A page can have its own name point to 127.0.0.1 (DNS rebinding): to a browser this server then is the page's own, and no
rule about origins applies. But such a request still names the page's host, which is none of ours.
"""

import re
from collections.abc import Sequence
from ipaddress import ip_address

LOCAL = ("localhost", "127.0.0.1", "::1")
ANY = "*"
HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\[\]:]*))(?::\d*)?", re.IGNORECASE | re.ASCII)


class Hosts:
    """Checks nothing where an operator allows any name, or where others can connect and no names are given."""

    def __init__(self, bound: str, allowed: Sequence[str]) -> None:
        self._names = frozenset(_plain(name) for name in (*LOCAL, bound, *allowed))
        self._is_checked = ANY not in allowed and (bool(allowed) or _is_loopback(bound))
        self._takes_addresses = _is_unspecified(bound)  # it listens on all of the machine's, whichever those are

    def allow(self, host: str) -> bool:
        if not self._is_checked:
            return True
        found = HOST.fullmatch(host)
        name = found and (found[1] or found[2]).lower()
        return bool(name) and (name in self._names or (self._takes_addresses and _is_address(str(name))))


def _plain(name: str) -> str:
    return name.strip("[]").lower()


def _is_loopback(bound: str) -> bool:
    return bound.lower() == "localhost" or (_is_address(bound) and ip_address(bound).is_loopback)


def _is_unspecified(bound: str) -> bool:
    return _is_address(bound) and ip_address(bound).is_unspecified


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
