"""Chooses the replica for a request with adapter affinity. This module does not use Ray.

Replicas are ranked for each adapter by rendezvous hashing, so all routers compute the same ranking, and only
adapters on removed replicas move. Loaded adapters, replica load and adapter popularity modify the choice.
"""

import math
from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

# A replica is overloaded above RATIO * mean load + EXTRA_REQUESTS. The limit is higher for unpopular adapters,
# because loading an adapter elsewhere may take longer than a few more requests in a batch.
POPULAR_LOAD_RATIO, POPULAR_EXTRA_REQUESTS = 1.05, 2
UNPOPULAR_LOAD_RATIO, UNPOPULAR_EXTRA_REQUESTS = 1.15, 6
POPULAR_LOAD_SHARE = 0.1  # popular adapters cause at least this share of one replica's mean load
COPIES_PER_FILLED_REPLICA = 4  # copies of a popular adapter, per replica that its requests would fill
WINDOW_REQUESTS = 20_000  # requests over which adapter shares are measured
SENT_ADAPTER_EXPIRY_S = 3.0  # when the replica's report should include the adapter of a request
HASH_MASK = 2**64 - 1


class RoutingKey(NamedTuple):
    """Hashes that determine the replica for a request."""

    adapter: int = 0  # hash of the adapter name; 0 is the base model
    prefix: int = 0  # hash of the prompt prefix; 0 for short prompts


class ReplicaReport(NamedTuple):
    """A replica's adapters by tier, as name hashes, and its state."""

    device: Set[int] = frozenset()
    host: Set[int] = frozenset()
    disk: Set[int] = frozenset()
    broken: Set[int] = frozenset()  # adapters that could not be loaded
    is_full: bool = False  # True if an adapter must be evicted before another adapter is loaded to the device


@dataclass(eq=False)
class ReplicaView:
    """A router's copy of one replica's load and adapters."""

    name: str
    load: float = 0.0  # running and queued requests
    report: ReplicaReport = field(default_factory=ReplicaReport)
    device: set[int] = field(default_factory=set)  # adapters in the report, and adapters of recent requests
    sent: dict[int, float] = field(default_factory=dict)  # time of the last request for each adapter

    def __post_init__(self) -> None:
        self.seed = hash_name(self.name)

    def score(self, number: int) -> int:
        """Return this replica's rendezvous score for an adapter or prefix hash (splitmix64 finalizer)."""
        number ^= self.seed
        number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & HASH_MASK
        number = (number ^ number >> 27) * 0x94D049BB133111EB & HASH_MASK
        return number ^ number >> 31

    def load_cost(self, adapter: int) -> int:
        """Return the relative cost of loading an adapter to the device. A full device must evict another adapter."""
        if adapter in self.report.host:
            return int(self.report.is_full)
        return 4 if self.report.is_full else 2 if adapter in self.report.disk else 3


def hash_name(name: str) -> int:
    """Return a stable, nonzero 64-bit hash of a name."""
    return int.from_bytes(blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest(), "little") or 1


class AdapterShares:
    """The share of recent requests for each adapter, with exponentially decaying counts."""

    def __init__(self) -> None:
        self._counts: dict[int, float] = {}
        self._total = 0.0

    def count(self, adapter: int) -> None:
        self._counts[adapter] = self._counts.get(adapter, 0.0) + 1
        self._total += 1
        if self._total >= WINDOW_REQUESTS:
            self._counts = {adapter: count / 2 for adapter, count in self._counts.items() if count > 1}
            self._total = sum(self._counts.values())

    def share_of(self, adapter: int) -> float:
        return self._counts.get(adapter, 0.0) / self._total if self._total > 1 / POPULAR_LOAD_SHARE else 0.0


class ReplicaChooser:
    """Chooses replicas and tracks their load and adapters."""

    def __init__(self) -> None:
        self.views: dict[str, ReplicaView] = {}
        self._shares = AdapterShares()

    def set_replicas(self, names: Iterable[str]) -> None:
        """Replace the list of replicas. Replicas that were in the old list keep their state."""
        self.views = {name: self.views.get(name) or ReplicaView(name) for name in sorted(names)}

    def set_load(self, name: str, load: float) -> None:
        self.views[name].load = load

    def set_report(self, name: str, report: ReplicaReport, now: float) -> None:
        """Store a replica's report, and add the adapters of recent requests, which may not be in the report yet."""
        view = self.views[name]
        view.report = report
        view.sent = {adapter: at for adapter, at in view.sent.items() if now - at < SENT_ADAPTER_EXPIRY_S}
        view.device = {*report.device, *view.sent} - report.broken

    def choose(self, key: RoutingKey, now: float, failed_replicas: Collection[str] = ()) -> str:
        """Return the name of the replica for a request.

        `failed_replicas` could not serve this request. They are chosen only if no other replica is left.
        """
        views = self.views.values()
        candidates = [view for view in views if view.name not in failed_replicas] or [*views]
        mean = sum(view.load for view in views) / len(views)
        if not key.adapter:
            return _choose_by_prefix(key.prefix, candidates, mean).name
        self._shares.count(key.adapter)
        view = self._choose_by_adapter(key, candidates, mean)
        view.sent[key.adapter] = now
        view.device.add(key.adapter)
        return view.name

    def is_popular(self, adapter: int) -> bool:
        return self._count_filled_replicas(adapter) >= POPULAR_LOAD_SHARE

    def rank(self, adapter: int) -> list[str]:
        """Return all replica names in order of preference for an adapter."""
        return [view.name for view in _rank(self.views.values(), adapter)]

    def _count_filled_replicas(self, adapter: int) -> float:
        """Return how many replicas the requests for an adapter would fill, if load is spread evenly."""
        return self._shares.share_of(adapter) * len(self.views)

    def _choose_by_adapter(self, key: RoutingKey, candidates: list[ReplicaView], mean: float) -> ReplicaView:
        adapter = key.adapter
        loaded = [view for view in candidates if adapter in view.device]
        bound = mean * POPULAR_LOAD_RATIO + POPULAR_EXTRA_REQUESTS
        if self.is_popular(adapter):
            if all(view.load > POPULAR_EXTRA_REQUESTS for view in loaded):
                copies = _rank(candidates, adapter)[
                    : math.ceil(self._count_filled_replicas(adapter) * COPIES_PER_FILLED_REPLICA)
                ]
                loaded += [view for view in copies if view not in loaded and adapter not in view.report.broken]
            loaded, max_load = _sort_by_load(loaded, key.prefix), bound
        else:
            loaded, max_load = _rank(loaded, adapter), mean * UNPOPULAR_LOAD_RATIO + UNPOPULAR_EXTRA_REQUESTS
        for view in loaded:
            if view.load <= max_load:
                return view
        ranked = _rank(candidates, adapter)
        able = [view for view in ranked if adapter not in view.report.broken] or ranked
        free = [view for view in able if view.load <= bound] or able
        return min(free, key=lambda view: view.load_cost(adapter))  # ties go to the highest rank


def _rank(views: Iterable[ReplicaView], adapter: int) -> list[ReplicaView]:
    return sorted(views, key=lambda view: view.score(adapter), reverse=True)


def _sort_by_load(views: list[ReplicaView], prefix: int) -> list[ReplicaView]:
    """Return replicas sorted by load. Replicas with similar load are ranked by prompt prefix, for prefix cache hits."""
    if not prefix or not views:
        return sorted(views, key=lambda view: view.load)
    least = min(view.load for view in views)
    return sorted(views, key=lambda view: (max(0, view.load - least - POPULAR_EXTRA_REQUESTS), -view.score(prefix)))


def _choose_by_prefix(prefix: int, candidates: list[ReplicaView], mean: float) -> ReplicaView:
    """Choose a replica by the prompt prefix, so that the prefix cache is used. For short prompts, choose the least
    loaded replica.
    """
    if not prefix:
        return min(candidates, key=lambda view: view.load)
    bound = mean * POPULAR_LOAD_RATIO + POPULAR_EXTRA_REQUESTS
    return max(candidates, key=lambda view: (view.load <= bound, view.score(prefix)))
