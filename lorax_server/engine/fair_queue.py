"""A fair queue of waiting sequences.

Tenants below their share of slots come first, then tenants in the order of served tokens and arrival. Within a tenant,
the adapter with the fewest served tokens comes first.
"""

import heapq
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Sequences

from lorax_server.engine.sequence import Sequence

MAX_IDLE_NAMES = 10_000  # counts to keep for names without waiting sequences
SHARE_TOLERANCE = 1e-6  # maximum rounding error of a share, in slots


class _ServedTokens:
    """Counts served tokens per name (tenant or adapter).

    Idle names accumulate no credit: when a name starts to wait again, its count is raised to the lowest count of all
    waiting names. Each served token also raises the initial count of new names, so that a stream of new names cannot
    starve waiting names.
    """

    def __init__(self) -> None:
        self.served: dict[str, float] = {}
        self._start = 0.0  # initial count of a new name

    def enter(self, name: str, waiting: Collection[str]) -> None:
        least = min([self.served[other] for other in waiting], default=0.0)
        self.served[name] = max(self.served.get(name, 0.0), self._start, least)

    def charge(self, name: str, amount: float, start_increment: float, waiting: Collection[str]) -> None:
        """Add `amount` to a name's count, and `start_increment` to the initial count of new names."""
        self._start += start_increment
        if name in self.served:
            self.served[name] += amount
            return
        self.served[name] = amount
        if len(self.served) > MAX_IDLE_NAMES + len(waiting):
            self.served = {other: self.served[other] for other in {*waiting, name}}


class _ArrivalHeap:
    """A heap of sequences in the order of arrival.

    Removed sequences stay in the heap until they are the head or more than half of the heap, so that removing all
    sequences in any order takes O(n log n).
    """

    def __init__(self) -> None:
        self._entries: list[tuple[int, Sequence]] = []
        self._removed: set[Sequence] = set()

    @property
    def head(self) -> tuple[int, Sequence]:
        return self._entries[0]

    @property
    def is_empty(self) -> bool:
        return not self._entries

    def push(self, sequence: Sequence) -> None:
        if sequence in self._removed:
            self._removed.remove(sequence)
        else:
            heapq.heappush(self._entries, (sequence.arrival, sequence))

    def remove(self, sequence: Sequence) -> None:
        self._removed.add(sequence)
        while self._entries and self._entries[0][1] in self._removed:
            self._removed.remove(heapq.heappop(self._entries)[1])
        if 2 * len(self._removed) > len(self._entries):
            self._entries = [entry for entry in self._entries if entry[1] not in self._removed]
            heapq.heapify(self._entries)
            self._removed.clear()


class _Tenant:
    """A tenant's slot count and waiting sequences. The tenant's adapters have equal priority."""

    def __init__(self) -> None:
        self._heaps: dict[str, _ArrivalHeap] = {}  # by adapter identity
        self._served_tokens = _ServedTokens()
        self.num_waiting = 0
        self.num_slots = 0

    @property
    def head(self) -> tuple[float, int, Sequence]:
        served = self._served_tokens.served
        return min((served[identity], *heap.head) for identity, heap in self._heaps.items())

    def push(self, sequence: Sequence) -> None:
        identity = sequence.request.adapter_identity
        if identity not in self._heaps:
            self._served_tokens.enter(identity, self._heaps)
            self._heaps[identity] = _ArrivalHeap()
        self._heaps[identity].push(sequence)
        self.num_waiting += 1

    def remove(self, sequence: Sequence) -> None:
        identity = sequence.request.adapter_identity
        self._heaps[identity].remove(sequence)
        if self._heaps[identity].is_empty:
            del self._heaps[identity]
        self.num_waiting -= 1

    def charge(self, identity: str, num_tokens: int) -> None:
        self._served_tokens.charge(identity, num_tokens, num_tokens / (1 + len(self._heaps)), self._heaps)


class FairQueue:
    """A queue of waiting sequences that divides slots fairly among tenants.

    Tenants with running or waiting sequences share the slots by weight. Tenants below their share come first. The
    other tenants follow in the order of served tokens divided by weight.
    """

    def __init__(self, weights: Mapping[str, float] | None = None, num_slots: int = 1) -> None:
        self._weights = weights or {}
        self._max_weight = max([1.0, *self._weights.values()])
        self._num_slots = num_slots
        self._served_tokens = _ServedTokens()
        self._active: dict[str, _Tenant] = {}  # tenants with running or waiting sequences
        self._waiting: dict[str, _Tenant] = {}  # active tenants with waiting sequences
        self._total_weight = 0.0  # total weight of active tenants
        self._count = 0
        self.version = 0  # incremented when slot counts or shares change

    def __len__(self) -> int:
        return self._count

    @property
    def has_several_tenants(self) -> bool:
        """Return True if more than one tenant is active."""
        return len(self._active) > 1

    def slot_share(self, tenant: str) -> int:
        """Return the tenant's share of slots by weight, rounded down. The share can be 0 if there are many tenants."""
        return int(self._num_slots * self._weight(tenant) / self._total_weight + SHARE_TOLERANCE)

    def guaranteed_slots(self, tenant: str) -> int:
        """Return the number of slots that the tenant cannot lose by preemption: its share, but at least 1."""
        return max(1, self.slot_share(tenant))

    @property
    def has_tenant_over_share(self) -> bool:
        """Return True if a tenant with at least two slots has more slots than its guaranteed number."""
        tenants = self._active.items()
        return any(tenant.num_slots > self.guaranteed_slots(name) for name, tenant in tenants if tenant.num_slots > 1)

    @property
    def has_tenant_under_share(self) -> bool:
        """Return True if a waiting tenant has fewer slots than its guaranteed number."""
        return any(tenant.num_slots < self.guaranteed_slots(name) for name, tenant in self._waiting.items())

    @property
    def num_missing_slots(self) -> int:
        """Return how many more slots the waiting tenants need to reach their shares."""
        if self._num_slots * self._max_weight < self._total_weight:
            return 0  # every share is less than one slot
        return sum(
            min(tenant.num_waiting, max(0, self.slot_share(name) - tenant.num_slots))
            for name, tenant in self._waiting.items()
        )

    def sort_running(self, running: Sequences[Sequence]) -> list[Sequence]:
        """Return the running sequences, with sequences within their tenant's share before all other sequences.

        `running` is sorted by arrival. Its first sequence stays first in the result, so it always makes progress.
        """
        if not self.has_tenant_over_share:
            return list(running)
        within, beyond = self._split_by_share(running)
        return within + beyond

    def select_preemptions(self, running: Sequences[Sequence], head: Sequence, num_free: int) -> list[Sequence]:
        """Return the sequences to preempt, newest first. `head` is the next sequence in the queue.

        Only sequences above their tenant's share are preempted, so slots change only when requests arrive or finish.
        If every share is less than one slot, return at most one sequence, to free a slot for `head`.
        """
        num_missing_slots = self.num_missing_slots or int(self._waiting[head.request.tenant].num_slots == 0)
        return self._split_by_share(running)[1][::-1][: max(0, num_missing_slots - num_free)]

    def _split_by_share(self, running: Sequences[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Return the sequences within their tenant's share, and the sequences above it. Both lists keep the order."""
        left: dict[str, int] = {}  # remaining guaranteed slots by tenant
        within, beyond = list[Sequence](), list[Sequence]()
        for sequence in running:
            tenant = sequence.request.tenant
            if tenant not in left:
                left[tenant] = self.guaranteed_slots(tenant)
            left[tenant] -= 1
            (within if left[tenant] >= 0 else beyond).append(sequence)
        return within, beyond

    def push(self, sequence: Sequence) -> None:
        name = sequence.request.tenant
        tenant = self._activate(name)
        if not tenant.num_waiting:
            self._served_tokens.enter(name, self._waiting)
            self._waiting[name] = tenant
        tenant.push(sequence)
        self._count += 1

    def peek(self) -> Sequence | None:
        """Return the next sequence, or None if the queue is empty."""
        heads = (
            (tenant.num_slots >= self.slot_share(name), self._served_tokens.served[name], *tenant.head[1:])
            for name, tenant in self._waiting.items()
        )
        best = min(heads, default=None)
        return None if best is None else best[-1]

    def remove(self, sequence: Sequence) -> None:
        name = sequence.request.tenant
        tenant = self._waiting[name]
        tenant.remove(sequence)
        if not tenant.num_waiting:
            del self._waiting[name]
        self._count -= 1
        self._deactivate_if_idle(name)

    def acquire_slot(self, tenant: str) -> None:
        self._activate(tenant).num_slots += 1
        self.version += 1

    def release_slot(self, tenant: str) -> None:
        self._active[tenant].num_slots -= 1
        self.version += 1
        self._deactivate_if_idle(tenant)

    def charge(self, num_tokens: Mapping[tuple[str, str], int]) -> None:
        """Charge computed tokens to their tenants and adapters. `num_tokens` is keyed by (tenant, adapter identity)."""
        for (tenant, identity), count in num_tokens.items():
            self._active[tenant].charge(identity, count)
            rise = count / self._total_weight
            self._served_tokens.charge(tenant, count / self._weight(tenant), rise, self._waiting)

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def _activate(self, name: str) -> _Tenant:
        if name not in self._active:
            self._active[name] = _Tenant()
            self._total_weight += self._weight(name)
            self.version += 1
        return self._active[name]

    def _deactivate_if_idle(self, name: str) -> None:
        tenant = self._active[name]
        if not tenant.num_waiting and not tenant.num_slots:
            del self._active[name]
            self.version += 1
            self._total_weight = self._total_weight - self._weight(name) if self._active else 0.0
