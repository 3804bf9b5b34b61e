"""Chooses the replica for a request. Ray's router and the cluster simulation share this code.

Every adapter ranks all replicas by rendezvous hashing: each pair of adapter and replica has a score, and the highest
score ranks first. So thousands of adapters spread without a table, every router computes the same ranking, and when a
replica leaves, only its own adapters move. Three things change the choice: where adapters are in memory, how many
requests each replica has, and the share of all requests that an adapter gets.
"""

import math
from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

# A replica is overloaded above these multiples of the mean load, plus a number of requests. The bound is higher for an
# adapter that is not hot: a replica computes a few more requests together in less time than a load may take.
HOT_LOAD_RATIO, HOT_EXTRA_REQUESTS = 1.05, 2
COLD_LOAD_RATIO, COLD_EXTRA_REQUESTS = 1.15, 6
HOT_SHARE = 0.1  # of one replica's fair load; an adapter with a larger share is hot
COPIES = 4  # replicas of a hot adapter for each replica that its requests alone would fill
WINDOW_REQUESTS = 20_000  # requests by which shares are measured
RECENT_S = 3.0  # until a replica's report contains an adapter that was sent there
MASK = 2**64 - 1


class RoutingKey(NamedTuple):
    """The parts of a request that determine its replica."""

    adapter: int = 0  # hash of the adapter name; 0 is the base model
    prefix: int = 0  # hash of the prompt prefix; 0 if the prompt is short


class Report(NamedTuple):
    """A replica's adapters by tier, as hashes of their names."""

    device: Set[int] = frozenset()
    host: Set[int] = frozenset()
    disk: Set[int] = frozenset()
    broken: Set[int] = frozenset()  # adapters that could not be loaded
    capacity: int | None = None  # adapters that fit on the device, if known
    is_draining: bool = False


@dataclass(eq=False)
class ReplicaView:
    """A replica as a router knows it."""

    name: str
    load: float = 0.0  # requests
    report: Report = field(default_factory=Report)
    device: set[int] = field(default_factory=set)  # adapters in the report, and adapters sent since
    sent: dict[int, float] = field(default_factory=dict)  # times at which adapters were sent

    def __post_init__(self) -> None:
        self.seed = hash_name(self.name)

    def score(self, number: int) -> int:
        """Scatter 64 bits by the replica's name (the finalizer of splitmix64)."""
        number ^= self.seed
        number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & MASK
        number = (number ^ number >> 27) * 0x94D049BB133111EB & MASK
        return number ^ number >> 31

    def distance(self, adapter: int) -> int:
        """Return a cost of moving an adapter to the device. A full device has to evict another adapter."""
        has_space = self.report.capacity is None or len(self.device) < self.report.capacity
        if adapter in self.report.host:
            return 0 if has_space else 1
        return (2 if adapter in self.report.disk else 3) if has_space else 4


def hash_name(name: str) -> int:
    """Return 64 bits that are the same in every process; never 0."""
    return int.from_bytes(blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest(), "little") or 1


class Shares:
    """Adapter shares of recent requests. Older requests count half, a quarter, and so on."""

    def __init__(self) -> None:
        self._counts: dict[int, float] = {}
        self._total = 0.0

    def count(self, adapter: int) -> None:
        self._counts[adapter] = self._counts.get(adapter, 0.0) + 1
        self._total += 1
        if self._total >= WINDOW_REQUESTS:
            self._counts = {adapter: count / 2 for adapter, count in self._counts.items() if count > 1}
            self._total = sum(self._counts.values())

    def of(self, adapter: int) -> float:
        return self._counts.get(adapter, 0.0) / self._total if self._total > 1 / HOT_SHARE else 0.0


class ReplicaChooser:
    """Chooses replicas for one router."""

    def __init__(self) -> None:
        self.views: dict[str, ReplicaView] = {}
        self._shares = Shares()

    def set_replicas(self, names: Iterable[str]) -> None:
        """Replace the set of replicas. Replicas that stay keep their state."""
        self.views = {name: self.views.get(name) or ReplicaView(name) for name in sorted(names)}

    def set_load(self, name: str, load: float) -> None:
        self.views[name].load = load

    def set_report(self, name: str, report: Report, now: float) -> None:
        """Store a replica's report, and add adapters that were sent to the replica since."""
        view = self.views[name]
        view.report = report
        view.sent = {adapter: at for adapter, at in view.sent.items() if now - at < RECENT_S}
        view.device = {*report.device, *view.sent} - report.broken

    def choose(self, key: RoutingKey, now: float, avoided: Collection[str] = ()) -> str | None:
        """Choose a replica, or return None if all replicas drain.

        `avoided` replicas have failed to serve this request. They are chosen only if no other replica is left.
        """
        available = [view for view in self.views.values() if not view.report.is_draining]
        if not available:
            return None
        candidates = [view for view in available if view.name not in avoided] or available
        mean = sum(view.load for view in available) / len(available)
        if not key.adapter:
            return _choose_by_prefix(key.prefix, candidates, mean).name
        self._shares.count(key.adapter)
        view = self._choose_by_adapter(key, candidates, mean)
        view.sent[key.adapter] = now
        view.device.add(key.adapter)
        return view.name

    def is_hot(self, adapter: int) -> bool:
        return self._fair_load(adapter) >= HOT_SHARE

    def rank(self, adapter: int) -> list[str]:
        """Rank the names of all replicas for an adapter."""
        return [view.name for view in _rank(self.views.values(), adapter)]

    def _fair_load(self, adapter: int) -> float:
        """Return the number of replicas that an adapter's requests would fill."""
        return self._shares.of(adapter) * len(self.views)

    def _choose_by_adapter(self, key: RoutingKey, candidates: list[ReplicaView], mean: float) -> ReplicaView:
        adapter = key.adapter
        holders = [view for view in candidates if adapter in view.device]
        bound = mean * HOT_LOAD_RATIO + HOT_EXTRA_REQUESTS
        if self.is_hot(adapter):
            if all(view.load > HOT_EXTRA_REQUESTS for view in holders):
                copies = _rank(candidates, adapter)[: math.ceil(self._fair_load(adapter) * COPIES)]
                holders += [view for view in copies if view not in holders and adapter not in view.report.broken]
            holders, holder_bound = _sort_by_load(holders, key.prefix), bound
        else:
            holders, holder_bound = _rank(holders, adapter), mean * COLD_LOAD_RATIO + COLD_EXTRA_REQUESTS
        for view in holders:
            if view.load <= holder_bound:
                return view
        ranked = _rank(candidates, adapter)
        able = [view for view in ranked if adapter not in view.report.broken] or ranked
        free = [view for view in able if view.load <= bound] or able
        return min(free, key=lambda view: view.distance(adapter))  # the first of equals ranks highest


def _rank(views: Iterable[ReplicaView], adapter: int) -> list[ReplicaView]:
    return sorted(views, key=lambda view: view.score(adapter), reverse=True)


def _sort_by_load(views: list[ReplicaView], prefix: int) -> list[ReplicaView]:
    """Sort the replicas of a hot adapter by load. Equal prompt prefixes sort replicas of about equal load alike."""
    if not prefix or not views:
        return sorted(views, key=lambda view: view.load)
    least = min(view.load for view in views)
    return sorted(views, key=lambda view: (max(0, view.load - least - HOT_EXTRA_REQUESTS), -view.score(prefix)))


def _choose_by_prefix(prefix: int, candidates: list[ReplicaView], mean: float) -> ReplicaView:
    """Choose the replica whose cache may hold the prompt prefix, or the least loaded replica without a prefix."""
    if not prefix:
        return min(candidates, key=lambda view: view.load)
    bound = mean * HOT_LOAD_RATIO + HOT_EXTRA_REQUESTS
    return max(candidates, key=lambda view: (view.load <= bound, view.score(prefix)))
