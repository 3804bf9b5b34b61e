"""Simulate a cluster of replicas with the router of `lorax_server.scale.placement`.

Requests arrive at random times; adapters follow Zipf's law. A replica serves all its requests at the same time. Each
takes a random time, and longer if its adapter is not on the device, which evicts least recently used adapters. The
router knows the load that it has caused and receives a report of resident adapters every second.
"""

import heapq
import itertools
import random
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from lorax_server.scale.placement import ReplicaChooser, ReplicaReport, RoutingKey, hash_name

REPORT_S = 1.0


@dataclass(frozen=True)
class Cluster:
    """Simulation sizes."""

    replicas: int = 100
    adapters: int = 100_000
    capacity: int = 1_200  # adapters on a device
    in_flight: float = 20.0  # mean requests per replica
    request_s: float = 2.0
    load_s: float = 0.5


@dataclass
class Device:
    """A replica. `adapters` are ordered by last use."""

    capacity: int
    adapters: OrderedDict[int, None] = field(default_factory=OrderedDict)
    load: int = 0
    load_seconds: float = 0.0
    since: float = 0.0

    def use(self, adapter: int) -> bool:
        """Use an adapter. Return True if it was on the device."""
        is_hit = adapter in self.adapters
        self.adapters[adapter] = None
        self.adapters.move_to_end(adapter)
        if len(self.adapters) > self.capacity:
            self.adapters.popitem(last=False)
        return is_hit

    def change_load(self, by: int, now: float) -> None:
        self.load_seconds += self.load * (now - self.since)
        self.since = now
        self.load += by


class Outcome(NamedTuple):
    """Simulation results."""

    hits: float  # share of requests whose adapter was on the device
    load_spread: float  # largest mean replica load, relative to the overall mean


class Simulation:
    """A cluster and its router in simulated time."""

    def __init__(self, cluster: Cluster, is_random: bool = False) -> None:
        """`is_random` replaces our router by random choice."""
        self.cluster, self.is_random = cluster, is_random
        self.random = random.Random(0)
        self.devices = {f"replica-{index}": Device(cluster.capacity) for index in range(cluster.replicas)}
        self.placement = ReplicaChooser()
        self.placement.set_replicas(self.devices)
        self.now = 0.0
        self._ends: list[tuple[float, int, str]] = []
        self._numbers = itertools.count()
        self._names = [hash_name(f"adapter-{index}") for index in range(cluster.adapters)]
        self._weights = list(itertools.accumulate(1 / rank for rank in range(1, cluster.adapters + 1)))

    def warm_up(self) -> None:
        """Use every adapter once."""
        for name in self.random.sample(self._names, len(self._names)):
            self.devices[self._choose_replica(name)].use(name)
        self._report()

    def run(self, requests: int) -> Outcome:
        for device in self.devices.values():
            device.load_seconds = 0.0
        hits = 0
        for adapter in self._arrivals(requests):
            chosen = self._choose_replica(adapter)
            is_hit = self.devices[chosen].use(adapter)
            hits += is_hit
            seconds = self.random.expovariate(1 / self.cluster.request_s) + (0.0 if is_hit else self.cluster.load_s)
            self._change_load(chosen, 1, self.now)
            heapq.heappush(self._ends, (self.now + seconds, next(self._numbers), chosen))
        for device in self.devices.values():
            device.change_load(0, self.now)
        loads = [device.load_seconds for device in self.devices.values()]
        return Outcome(hits / requests, max(loads) * len(loads) / sum(loads))

    def remove_replicas(self, share: float) -> list[str]:
        """Remove a share of the replicas. Return their names."""
        gone = self.random.sample(sorted(self.devices), round(share * len(self.devices)))
        for name in gone:
            del self.devices[name]
        self._ends = [end for end in self._ends if end[2] in self.devices]
        heapq.heapify(self._ends)
        self.placement.set_replicas(self.devices)
        return gone

    def owners(self) -> dict[int, str]:
        """Return the preferred replica of every adapter."""
        return {name: self.placement.rank(name)[0] for name in self._names}

    def _arrivals(self, requests: int) -> Iterator[int]:
        """Advance the time to each arrival and yield its adapter."""
        rate = self.cluster.replicas * self.cluster.in_flight / self.cluster.request_s
        next_report = self.now
        for _ in range(requests):
            self.now += self.random.expovariate(rate)
            while self._ends and self._ends[0][0] <= self.now:
                at, _, name = heapq.heappop(self._ends)
                self._change_load(name, -1, at)
            if self.now >= next_report:
                self._report()
                next_report = self.now + REPORT_S
            yield self.random.choices(self._names, cum_weights=self._weights)[0]

    def _change_load(self, name: str, by: int, at: float) -> None:
        device = self.devices[name]
        device.change_load(by, at)
        self.placement.set_load(name, device.load)

    def _report(self) -> None:
        for name, device in self.devices.items():
            self.placement.set_report(
                name, ReplicaReport(device.adapters.keys(), is_full=len(device.adapters) == device.capacity), self.now
            )

    def _choose_replica(self, adapter: int) -> str:
        if self.is_random:
            return self.random.choice(list(self.devices))
        return self.placement.choose(RoutingKey(adapter), self.now)
