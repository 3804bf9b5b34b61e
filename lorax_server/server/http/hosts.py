"""Validates the `Host` header, to prevent DNS rebinding.

A web page can point its domain to 127.0.0.1, so that the browser treats this server as same-origin. The `Host` header
of such a request still contains the page's domain.
"""

import re
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
ANY_HOST = "*"
IPV6_NETWORK_BITS = 64  # a client may use any address in its /64 network
HOST_PATTERN = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\[\]:]*))(?::\d*)?", re.IGNORECASE | re.ASCII)


class AllowedHosts:
    """Checks `Host` headers.

    The check is disabled if `*` is allowed, or if the server is reachable from other machines and no names are set.
    `host` is the configured host. `address` is the socket address, which shows if the host resolves to loopback.
    """

    def __init__(self, host: str, allowed: Sequence[str], address: str = "") -> None:
        address = address or host
        ip = parse_address(address)
        self._names = frozenset(name.strip("[]").lower() for name in (*LOOPBACK_NAMES, host, address, *allowed))
        self._is_checked = ANY_HOST not in allowed and (bool(allowed) or is_loopback(address))
        self._allows_any_address = ip is not None and ip.is_unspecified  # the server listens on all interfaces

    def is_allowed(self, host: str) -> bool:
        if not self._is_checked:
            return True
        match = HOST_PATTERN.fullmatch(host)
        name = (match[1] or match[2]).lower() if match else ""
        return bool(name) and (name in self._names or (self._allows_any_address and parse_address(name) is not None))


def is_loopback(host: str) -> bool:
    """Return True if the host is only reachable from this machine."""
    ip = parse_address(host)
    return host.lower() == "localhost" or (ip is not None and ip.is_loopback)


def parse_address(name: str) -> IPv4Address | IPv6Address | None:
    """Return the IP address, or None if the name is not an address. IPv4-mapped IPv6 addresses become IPv4."""
    try:
        address = ip_address(name)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def client_network(client: str) -> str:
    """Return an identifier for the client: its IPv4 address, or the /64 network of its IPv6 address."""
    address = parse_address(client.partition("%")[0])
    if isinstance(address, IPv6Address):
        return f"{int(address) >> IPV6_NETWORK_BITS:x}"
    return client if address is None else str(address)
