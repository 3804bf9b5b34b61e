"""Names that a request's `Host` may have.

A page can have its own name point to 127.0.0.1 (DNS rebinding): to a browser this server then is the page's own, and no
rule about origins applies. But such a request still names the page's host, which is none of this server's.
"""

import re
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address

LOCAL = ("localhost", "127.0.0.1", "::1")
ANY = "*"
IPV6_NETWORK_BITS = 64  # a client may use any address of its /64 network
HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\[\]:]*))(?::\d*)?", re.IGNORECASE | re.ASCII)


class Hosts:
    """Checks nothing where the operator allows any name, or where other machines can connect and no names are set.

    `bound` is the operator's name of the interface, `address` the socket's: many names mean this machine only.
    """

    def __init__(self, bound: str, allowed: Sequence[str], address: str = "") -> None:
        address = address or bound
        ip = parse_address(address)
        self._names = frozenset(name.strip("[]").lower() for name in (*LOCAL, bound, address, *allowed))
        self._is_checked = ANY not in allowed and (bool(allowed) or is_local(address))
        self._takes_addresses = ip is not None and ip.is_unspecified  # then it listens on all of the machine's

    def allow(self, host: str) -> bool:
        if not self._is_checked:
            return True
        match = HOST.fullmatch(host)
        name = (match[1] or match[2]).lower() if match else ""
        return bool(name) and (name in self._names or (self._takes_addresses and parse_address(name) is not None))


def is_local(host: str) -> bool:
    """Return True if only this machine can connect to a host."""
    ip = parse_address(host)
    return host.lower() == "localhost" or (ip is not None and ip.is_loopback)


def parse_address(name: str) -> IPv4Address | IPv6Address | None:
    """Read an IP address; None if it is none. An IPv4 address that is written as IPv6 becomes IPv4."""
    try:
        address = ip_address(name)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def client_network(client: str) -> str:
    """Return the unit that counts as one client: an IPv4 address, or the /64 network of an IPv6 address."""
    address = parse_address(client.partition("%")[0])
    if isinstance(address, IPv6Address):
        return f"{int(address) >> IPV6_NETWORK_BITS:x}"
    return client if address is None else str(address)
