"""The names that a request's `Host` may have.

A page can have its own name point to 127.0.0.1 (DNS rebinding): to a browser this server then is the page's own, and no
rule about origins applies. But such a request still names the page's host, which is none of ours.
"""

import re
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address

LOCAL = ("localhost", "127.0.0.1", "::1")
ANY = "*"
HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\[\]:]*))(?::\d*)?", re.IGNORECASE | re.ASCII)


class Hosts:
    """Checks nothing where an operator allows any name, or where others can connect and no names are given.

    `bound` is what the operator says, `address` what the socket says that it means: many names mean this machine only.
    """

    def __init__(self, bound: str, allowed: Sequence[str], address: str = "") -> None:
        address = address or bound
        self._names = frozenset(_plain(name) for name in (*LOCAL, bound, address, *allowed))
        self._is_checked = ANY not in allowed and (bool(allowed) or _is_loopback(address))
        self._takes_addresses = _is_unspecified(address)  # it listens on all of the machine's, whichever those are

    def allow(self, host: str) -> bool:
        if not self._is_checked:
            return True
        found = HOST.fullmatch(host)
        name = found and (found[1] or found[2]).lower()
        return bool(name) and (name in self._names or (self._takes_addresses and _is_address(str(name))))


def _plain(name: str) -> str:
    return name.strip("[]").lower()


def _is_loopback(bound: str) -> bool:
    return bound.lower() == "localhost" or (_is_address(bound) and _address(bound).is_loopback)


def _is_unspecified(bound: str) -> bool:
    return _is_address(bound) and _address(bound).is_unspecified


def _address(name: str) -> IPv4Address | IPv6Address:
    """Read an address; one of IPv4 that is written as IPv6 is one of IPv4."""
    address = ip_address(name)
    return getattr(address, "ipv4_mapped", None) or address


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
