"""Decides which replica answers a request. Ray's router and the simulation of a large cluster share it.

Every adapter has an order of all replicas, by rendezvous hashing: each pair of adapter and replica has a score, and the
highest is first. So a thousand adapters spread without a table, every router finds the same order, and when a replica
goes only its own adapters move. Three things change the choice: where adapters are in memory, how much each replica has
to do, and how much of all requests an adapter gets.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

SPREAD = 1.05  # a hot adapter goes to one more replica where its own have so many times the mean load
SLACK = 2  # requests above that bound, so that a few requests are not spread for nothing
TOLERANCE = 1.15  # other adapters do not: a load for few requests costs more than it gains
PATIENCE = 6  # requests above that bound: a replica computes so many together, while a load may take seconds
HOT = 0.1  # share of one replica's fair load from which an adapter is hot
COPIES = 4  # replicas of a hot adapter for each replica that its requests alone would fill
WINDOW = 20_000  # requests by which shares are measured
RECENT_S = 3.0  # until a replica's report has an adapter that was sent there
MAX_ORDERS = 200_000  # adapters whose order is remembered
MASK = 2**64 - 1


class Wanted(NamedTuple):
    """A request as far as it matters to the choice."""

    adapter: int = 0  # the hash of its name; 0 is the base model
    prefix: int = 0  # the hash of the beginning of its prompt; 0 is none


@dataclass(eq=False)
class ReplicaView:
    """A replica as a router sees it."""

    name: str
    load: float = 0.0  # requests that it has
    capacity: int | None = None  # adapters that its device holds, if that is known
    device: set[int] = field(default_factory=set)
    host: frozenset[int] = frozenset()
    disk: frozenset[int] = frozenset()
    broken: frozenset[int] = frozenset()  # adapters that it could not load
    is_draining: bool = False
    sent: dict[int, float] = field(default_factory=dict)  # adapters sent there of late, and when

    def __post_init__(self) -> None:
        self.seed = hash_name(self.name)

    @property
    def has_room(self) -> bool:
        return self.capacity is None or len(self.device) < self.capacity


class Report(NamedTuple):
    """The adapters of a replica, as it tells of them."""

    device: Collection[int] = ()
    host: Collection[int] = ()
    disk: Collection[int] = ()
    broken: Collection[int] = ()
    capacity: int | None = None
    is_draining: bool = False


def hash_name(name: str) -> int:
    """Return 64 bits that are the same in every process; never 0."""
    return int.from_bytes(blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest(), "little") or 1


def mix(number: int) -> int:
    """Scatter 64 bits (the finalizer of splitmix64)."""
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & MASK
    number = (number ^ number >> 27) * 0x94D049BB133111EB & MASK
    return number ^ number >> 31


class Shares:
    """Shares of adapters in the latest requests; older requests count half, a quarter, and so on."""

    def __init__(self) -> None:
        self._counts: dict[int, float] = {}
        self._total = 0.0

    def count(self, adapter: int) -> None:
        self._counts[adapter] = self._counts.get(adapter, 0.0) + 1
        self._total += 1
        if self._total >= WINDOW:
            self._counts = {adapter: count / 2 for adapter, count in self._counts.items() if count > 1}
            self._total = sum(self._counts.values())

    def of(self, adapter: int) -> float:
        return self._counts.get(adapter, 0.0) / self._total if self._total > 1 / HOT else 0.0


class ReplicaChooser:
    """Chooses replicas. It belongs to one router, and is told of all that changes."""

    def __init__(self) -> None:
        self._views: dict[str, ReplicaView] = {}
        self._holders: dict[int, set[str]] = {}  # by adapter: the replicas that have it on the device
        self._orders: dict[int, list[ReplicaView]] = {}
        self._open: list[ReplicaView] = []  # those that do not drain
        self._total_load = 0.0  # of those
        self._shares = Shares()

    @property
    def views(self) -> Mapping[str, ReplicaView]:
        return self._views

    # --- Replicas that come, go and report ----------------------------------------------------------------------------

    def set_replicas(self, names: Iterable[str]) -> None:
        """Replace the set of replicas; those that stay keep what is known of them."""
        names = set(names)
        if names == self._views.keys():
            return
        for name in self._views.keys() - names:
            self._set_device(self._views.pop(name), set())
        for name in sorted(names - self._views.keys()):
            self._views[name] = ReplicaView(name)
        self._orders.clear()
        self._find_open()

    def set_load(self, name: str, load: float) -> None:
        view = self._views[name]
        if not view.is_draining:
            self._total_load += load - view.load
        view.load = load

    def set_report(self, name: str, report: Report, now: float) -> None:
        """Take over a replica's report, and add what was sent there since it was written."""
        view = self._views[name]
        view.sent = {adapter: at for adapter, at in view.sent.items() if now - at < RECENT_S}
        view.broken, view.capacity = frozenset(report.broken), report.capacity
        view.host, view.disk = frozenset(report.host), frozenset(report.disk)
        self._set_device(view, {*report.device, *view.sent} - view.broken)
        if view.is_draining != report.is_draining:
            view.is_draining = report.is_draining
            self._find_open()

    def _set_device(self, view: ReplicaView, adapters: set[int]) -> None:
        for adapter in view.device - adapters:
            holders = self._holders[adapter]
            holders.discard(view.name)
            if not holders:
                del self._holders[adapter]
        for adapter in adapters - view.device:
            self._holders.setdefault(adapter, set()).add(view.name)
        view.device = adapters

    def _find_open(self) -> None:
        self._open = [view for view in self._views.values() if not view.is_draining]
        self._total_load = sum(view.load for view in self._open)

    # --- Requests -----------------------------------------------------------------------------------------------------

    def choose(self, wanted: Wanted, now: float, avoided: Collection[str] = ()) -> str | None:
        """Choose a replica, and note that the adapter will be there; None if no replica takes requests.

        `avoided` have failed to answer this request. They are taken only if no other is left.
        """
        candidates = [view for view in self._open if view.name not in avoided] if avoided else self._open
        candidates = candidates or self._open
        if not candidates:
            return None
        mean = self._total_load / len(self._open)
        if wanted.adapter:
            self._shares.count(wanted.adapter)
            view = self._choose_for_adapter(wanted, candidates, mean)
            self._note_sent(view, wanted.adapter, now)
        else:
            view = self._choose_for_prefix(wanted.prefix, candidates, mean)
        return view.name

    def is_hot(self, adapter: int) -> bool:
        return self._shares.of(adapter) * len(self._views) >= HOT

    def owners(self, adapter: int) -> list[str]:
        """List all replicas in the order of an adapter."""
        return [view.name for view in self._order(adapter)]

    def _choose_for_adapter(self, wanted: Wanted, candidates: list[ReplicaView], mean: float) -> ReplicaView:
        adapter = wanted.adapter
        holding = [self._views[name] for name in self._holders.get(adapter, ())]
        holding = [view for view in holding if view in candidates]
        fair = self._shares.of(adapter) * len(self._views)  # of one replica's load
        if fair < HOT:
            holding.sort(key=lambda view: mix(view.seed ^ adapter), reverse=True)
            bound = mean * TOLERANCE + PATIENCE
        else:
            bound = mean * SPREAD + SLACK
            holding = _by_load(holding, wanted.prefix)
            if not holding or holding[0].load > SLACK:
                own = self._order(adapter)[: math.ceil(fair * COPIES)]
                more = [view for view in own if view not in holding and view in candidates]
                holding = _by_load([*holding, *(view for view in more if adapter not in view.broken)], wanted.prefix)
        found = next((view for view in holding if view.load <= bound), None)
        if found is not None:
            return found
        allowed = {view.name for view in candidates}
        order = [view for view in self._order(adapter) if view.name in allowed]
        able = [view for view in order if adapter not in view.broken] or order
        free = [view for view in able if view.load <= mean * SPREAD + SLACK] or able
        return min(free, key=lambda view: _distance(view, adapter))  # of equals the first in the adapter's order

    def _choose_for_prefix(self, prefix: int, candidates: list[ReplicaView], mean: float) -> ReplicaView:
        """Choose by the beginning of the prompt, whose keys and values may still be there, or else by load."""
        if prefix:
            bound = mean * SPREAD + SLACK
            return max(candidates, key=lambda view: (view.load <= bound, mix(view.seed ^ prefix)))
        return min(candidates, key=lambda view: view.load)

    def _order(self, adapter: int) -> list[ReplicaView]:
        order = self._orders.get(adapter)
        if order is None:
            if len(self._orders) >= MAX_ORDERS:
                self._orders.clear()
            order = sorted(self._views.values(), key=lambda view: mix(view.seed ^ adapter), reverse=True)
            self._orders[adapter] = order
        return order

    def _note_sent(self, view: ReplicaView, adapter: int, now: float) -> None:
        view.sent[adapter] = now
        view.device.add(adapter)
        self._holders.setdefault(adapter, set()).add(view.name)


def _by_load(views: list[ReplicaView], prefix: int) -> list[ReplicaView]:
    """Sort replicas of a hot adapter by load. Of those with about the least, prompts that begin alike choose one."""
    if not prefix or not views:
        return sorted(views, key=lambda view: view.load)
    least = min(view.load for view in views)
    return sorted(views, key=lambda view: (max(0, view.load - least - SLACK), -mix(view.seed ^ prefix)))


def _distance(view: ReplicaView, adapter: int) -> int:
    """Return how far an adapter is from the device of a replica. A full device has to evict another."""
    if adapter in view.host:
        return 0 if view.has_room else 1
    return (2 if adapter in view.disk else 3) if view.has_room else 4
