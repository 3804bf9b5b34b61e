"""A cluster of replicas in simulated time, with the router that Ray runs: `lorax_server.scale.placement`.

Requests come at random times, their adapters by Zipf's law. A replica answers all that it has at once; each takes a
random time, and longer if its adapter is not on the device, which holds a number of adapters and evicts the one that
was used longest ago. A router knows the load that it has caused itself, and a replica's adapters by a report each
second, as with Ray.
"""

import heapq
import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from lorax_server.scale.placement import ReplicaChooser, Report, RoutingKey, hash_name

REPORT_S = 1.0


@dataclass(frozen=True)
class Cluster:
    """Sizes of a simulation."""

    replicas: int = 100
    adapters: int = 100_000
    capacity: int = 1_200  # adapters on a device
    exponent: float = 1.0  # of Zipf's law
    in_flight: float = 20.0  # mean requests of a replica
    answer_s: float = 2.0
    load_s: float = 0.5
    seed: int = 0


@dataclass
class Device:
    """A replica: the adapters on its device, those used last at the end."""

    capacity: int
    adapters: OrderedDict[int, None] = field(default_factory=OrderedDict)
    load: int = 0
    served: int = 0
    area: float = 0.0  # load times seconds
    peak: int = 0
    since: float = 0.0

    def use(self, adapter: int) -> bool:
        """Use an adapter, and tell whether it was there."""
        is_there = adapter in self.adapters
        self.adapters[adapter] = None
        self.adapters.move_to_end(adapter)
        if len(self.adapters) > self.capacity:
            self.adapters.popitem(last=False)
        return is_there

    def change_load(self, by: int, now: float) -> None:
        self.area += self.load * (now - self.since)
        self.since = now
        self.load += by
        self.peak = max(self.peak, self.load)


class Outcome(NamedTuple):
    """Figures of a simulated run."""

    hits: float  # share of requests whose adapter was on the device
    served_spread: float  # most requests of a replica over the mean
    load_spread: float  # largest mean load of a replica over the mean of all
    answer_s: float


Chooser = Callable[[int, float], str]


class Simulation:
    """A cluster and its router in simulated time."""

    def __init__(self, cluster: Cluster, router: str = "ours") -> None:
        self.cluster = cluster
        self.random = random.Random(cluster.seed)
        self.devices = {f"replica-{index}": Device(cluster.capacity) for index in range(cluster.replicas)}
        self.placement = ReplicaChooser()
        self.placement.set_replicas(self.devices)
        self.now = 0.0
        self._ends: list[tuple[float, int, str]] = []
        self._numbers = itertools.count()
        self._choose: Chooser = {"ours": self._ask_router, "random": self._at_random, "two choices": self._of_two}[
            router
        ]
        self._is_ours = router == "ours"
        names = [hash_name(f"adapter-{index}") for index in range(cluster.adapters)]
        weights = itertools.accumulate(1 / rank**cluster.exponent for rank in range(1, cluster.adapters + 1))
        self._names, self._weights = names, list(weights)

    def warm_up(self) -> None:
        """Place every adapter once, so that no figure is one of a first time."""
        for name in self.random.sample(self._names, len(self._names)):
            chosen = self._choose(name, self.now)
            self.devices[chosen].use(name)
        self._report()

    def run(self, requests: int) -> Outcome:
        for device in self.devices.values():
            device.served, device.area, device.peak = 0, 0.0, 0
        begin, hits, seconds = self.now, 0, 0.0
        for adapter, now in self._arrivals(requests):
            chosen = self._choose(adapter, now)
            is_hit = self.devices[chosen].use(adapter)
            hits += is_hit
            took = self.random.expovariate(1 / self.cluster.answer_s) + (0.0 if is_hit else self.cluster.load_s)
            seconds += took
            self._begin(chosen, now + took)
        for device in self.devices.values():
            device.change_load(0, self.now)
        served = [device.served for device in self.devices.values()]
        areas = [device.area / (self.now - begin) for device in self.devices.values()]
        return Outcome(
            hits / requests, max(served) * len(served) / sum(served), max(areas) * len(areas) / sum(areas),
            seconds / requests,
        )  # fmt: skip

    def leave(self, share: float) -> list[str]:
        """Let a share of the replicas go, with all that they have."""
        gone = self.random.sample(sorted(self.devices), round(share * len(self.devices)))
        for name in gone:
            del self.devices[name]
        self._ends = [end for end in self._ends if end[2] in self.devices]
        heapq.heapify(self._ends)
        self.placement.set_replicas(self.devices)
        return gone

    def owners(self) -> dict[int, str]:
        """Return the first replica in the order of every adapter."""
        return {name: self.placement.rank(name)[0] for name in self._names}

    def _arrivals(self, requests: int) -> Iterator[tuple[int, float]]:
        rate = self.cluster.replicas * self.cluster.in_flight / self.cluster.answer_s
        next_report = self.now
        for _ in range(requests):
            self.now += self.random.expovariate(rate)
            while self._ends and self._ends[0][0] <= self.now:
                at, _, name = heapq.heappop(self._ends)
                self._change_load(name, -1, at)
            if self.now >= next_report:
                self._report()
                next_report = self.now + REPORT_S
            (adapter,) = self.random.choices(self._names, cum_weights=self._weights)
            yield adapter, self.now

    def _begin(self, name: str, end: float) -> None:
        self.devices[name].served += 1
        self._change_load(name, 1, self.now)
        heapq.heappush(self._ends, (end, next(self._numbers), name))

    def _change_load(self, name: str, by: int, at: float) -> None:
        device = self.devices[name]
        device.change_load(by, at)
        if self._is_ours:
            self.placement.set_load(name, device.load)

    def _report(self) -> None:
        if self._is_ours:
            for name, device in self.devices.items():
                self.placement.set_report(name, Report(device.adapters.keys(), capacity=device.capacity), self.now)

    def _ask_router(self, adapter: int, now: float) -> str:
        chosen = self.placement.choose(RoutingKey(adapter), now)
        assert chosen is not None
        return chosen

    def _at_random(self, adapter: int, now: float) -> str:
        return self.random.choice(list(self.devices))

    def _of_two(self, adapter: int, now: float) -> str:
        """Choose as Ray's default router: the less loaded one of two that chance has picked."""
        return min(self.random.sample(list(self.devices), 2), key=lambda name: self.devices[name].load)
