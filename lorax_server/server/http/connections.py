"""Open connections: how many there may be, in all and from one address. Idle ones give way to new ones.

A connection is idle while it has no request: none yet, none any more, or one whose headers are still on their way. So
clients that connect and then dawdle make room for those that ask for something.
"""

from dataclasses import dataclass, field
from ipaddress import IPv6Address
from typing import Protocol

from lorax_server.server.http.hosts import parse_address
from lorax_server.server.telemetry.metrics import Metrics

FULL, FULL_ADDRESS, GAVE_WAY = "full", "address", "gave_way"
NETWORK_BITS = 64  # of IPv6: a provider's customer has a whole network, and can be at any address of it


class Connection(Protocol):
    def give_way(self) -> None:
        """Close, since another connection needs the place."""


@dataclass
class _Address:
    """The connections of one address."""

    count: int = 0
    idle: dict[Connection, None] = field(default_factory=dict)


class Connections:
    """The open connections of one event loop. A limit of 0 for an address is none."""

    def __init__(self, most: int, most_per_address: int, metrics: Metrics) -> None:
        self._most = most
        self._most_per_address = most_per_address
        self._metrics = metrics
        self._open: dict[Connection, str] = {}  # with the address of each
        self._idle: dict[Connection, None] = {}  # those that have been idle for longest come first
        self._addresses: dict[str, _Address] = {}
        self.num_lingering = 0  # those that were refused and are about to be closed

    def enter(self, connection: Connection, client: str) -> str | None:
        """Take a place, or return the limit that is in the way."""
        name = network(client)
        address = self._addresses.get(name) or _Address()
        reason = None
        if 0 < self._most_per_address <= address.count and not self._make_room(address.idle):
            reason = FULL_ADDRESS
        elif len(self._open) >= self._most and not self._make_room(self._idle):
            reason = FULL
        if reason is not None:
            self._metrics.refuse_connection(reason)
            return reason
        self._addresses[name] = address
        address.count += 1
        self._open[connection] = name
        self.mark_idle(connection)
        self._metrics.set_connections(len(self._open))
        return None

    def leave(self, connection: Connection) -> None:
        self.mark_busy(connection)
        name = self._open.pop(connection, None)
        if name is None:
            return
        self._addresses[name].count -= 1
        if self._addresses[name].count == 0:
            del self._addresses[name]
        self._metrics.set_connections(len(self._open))

    def mark_idle(self, connection: Connection) -> None:
        name = self._open.get(connection)
        if name is not None:
            self._idle[connection] = self._addresses[name].idle[connection] = None

    def mark_busy(self, connection: Connection) -> None:
        name = self._open.get(connection)
        if name is not None:
            self._idle.pop(connection, None)
            self._addresses[name].idle.pop(connection, None)

    def _make_room(self, idle: dict[Connection, None]) -> bool:
        connection = next(iter(idle), None)
        if connection is None:
            return False
        self.leave(connection)
        self._metrics.refuse_connection(GAVE_WAY)
        connection.give_way()
        return True


def network(client: str) -> str:
    """Return the unit that is limited as one address: an IPv4 address, or the network of an IPv6 address."""
    address = parse_address(client.partition("%")[0])
    if isinstance(address, IPv6Address):
        return f"{int(address) >> NETWORK_BITS:x}"
    return client if address is None else str(address)
