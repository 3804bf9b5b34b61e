"""The order of waiting sequences.

First come tenants with fewer slots than their share, then the tenant that was served least or came first. Within a
tenant the adapter that was served least comes first.
"""

import heapq
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Sequences

from lorax_server.engine.sequence import Sequence

MAX_NAMES = 10_000  # remembered in a ledger though nothing waits for them
ROUNDING = 1e-6  # the part of a slot by which sums of weights may be off


class _Ledger:
    """The tokens served to each of several names.

    A name without waiting requests saves nothing up: when it comes back, it is level with the least served of the
    others. Nor do waiting names fall behind because new ones keep coming: every token raises the level of newcomers.
    """

    def __init__(self) -> None:
        self.served: dict[str, float] = {}
        self._start = 0.0  # the level of a newcomer

    def enter(self, name: str, waiting: Collection[str]) -> None:
        least = min([self.served[other] for other in waiting], default=0.0)
        self.served[name] = max(self.served.get(name, 0.0), self._start, least)

    def charge(self, name: str, amount: float, rise: float, waiting: Collection[str]) -> None:
        """Charge an amount to a name, and raise the level of newcomers."""
        self._start += rise
        if name in self.served:
            self.served[name] += amount
            return
        self.served[name] = amount
        if len(self.served) > MAX_NAMES + len(waiting):
            self.served = {other: self.served[other] for other in {*waiting, name}}


class _Tenant:
    """The slots and the waiting sequences of one tenant: a heap for each adapter. Adapters share equally."""

    def __init__(self) -> None:
        self._heaps: dict[str, list[tuple[int, Sequence]]] = {}  # by adapter identity, ordered by arrival
        self._ledger = _Ledger()
        self.num_waiting = 0
        self.num_slots = 0

    @property
    def head(self) -> tuple[float, int, Sequence]:
        served = self._ledger.served
        return min((served[identity], *heap[0]) for identity, heap in self._heaps.items())

    def push(self, sequence: Sequence) -> None:
        identity = sequence.request.adapter_identity
        if identity not in self._heaps:
            self._ledger.enter(identity, self._heaps)
        heapq.heappush(self._heaps.setdefault(identity, []), (sequence.arrival, sequence))
        self.num_waiting += 1

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence: the first of its adapter at once, any other in the time of all of its adapter."""
        identity = sequence.request.adapter_identity
        heap = self._heaps[identity]
        if heap[0][1] is sequence:
            heapq.heappop(heap)
        else:
            heap.remove((sequence.arrival, sequence))
            heapq.heapify(heap)
        if not heap:
            del self._heaps[identity]
        self.num_waiting -= 1

    def charge(self, identity: str, num_tokens: int) -> None:
        self._ledger.charge(identity, num_tokens, num_tokens / (1 + len(self._heaps)), self._heaps)


class FairQueue:
    """Waiting sequences of several tenants, and the number of slots of each tenant.

    Slots are divided among the tenants with running or waiting sequences, by weight. Tenants below their share come
    first. The other tenants follow in the order of served tokens divided by weight.
    """

    def __init__(self, weights: Mapping[str, float] | None = None, num_slots: int = 1) -> None:
        self._weights = weights or {}
        self._most_weight = max([1.0, *self._weights.values()])
        self._num_slots = num_slots
        self._ledger = _Ledger()
        self._present: dict[str, _Tenant] = {}  # tenants that run or wait
        self._waiting: dict[str, _Tenant] = {}  # of these: tenants that wait
        self._total_weight = 0.0  # of present tenants
        self._count = 0
        self.version = 0  # of the slots of tenants, and of their shares

    def __len__(self) -> int:
        return self._count

    @property
    def is_shared(self) -> bool:
        """Tell whether there is more than one tenant."""
        return len(self._present) > 1

    def share_of(self, tenant: str) -> int:
        """Return the tenant's whole slots by its weight: none where there are too many tenants, or heavier ones."""
        return int(self._num_slots * self._weight(tenant) / self._total_weight + ROUNDING)

    def guaranteed_slots(self, tenant: str) -> int:
        """Return the slots that are never taken from the tenant: its share, and one at least."""
        return max(1, self.share_of(tenant))

    @property
    def has_excess(self) -> bool:
        """Tell whether a tenant has more slots than it keeps."""
        tenants = self._present.items()
        return any(tenant.num_slots > self.guaranteed_slots(name) for name, tenant in tenants if tenant.num_slots > 1)

    @property
    def has_due(self) -> bool:
        """Tell whether a tenant waits that has fewer slots than it could keep."""
        return any(tenant.num_slots < self.guaranteed_slots(name) for name, tenant in self._waiting.items())

    @property
    def num_due(self) -> int:
        """Return the slots that waiting tenants lack of their shares."""
        if self._num_slots * self._most_weight < self._total_weight:
            return 0  # so many tenants that no share is a slot
        return sum(
            min(tenant.num_waiting, max(0, self.share_of(name) - tenant.num_slots))
            for name, tenant in self._waiting.items()
        )

    def sort_running(self, running: Sequences[Sequence]) -> list[Sequence]:
        """Put sequences within their tenant's share before others; `running` is sorted by arrival.

        The first sequence stays the first, so that it always makes progress.
        """
        if not self.has_excess:
            return list(running)
        within, beyond = self._split(running)
        return within + beyond

    def find_spare(self, running: Sequences[Sequence], head: Sequence, num_free: int) -> list[Sequence]:
        """Return the sequences to preempt, the newest first; `head` is the next in the queue.

        A tenant keeps its share of the slots. Only slots beyond it are taken back, so slots change hands only when
        requests arrive and finish. Where shares are less than a slot, return one sequence, for the head alone: no other
        tenant is sure to get the slot.
        """
        num_due = self.num_due or int(self._waiting[head.request.tenant].num_slots == 0)
        return self._split(running)[1][::-1][: max(0, num_due - num_free)]

    def _split(self, running: Sequences[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Return the sequences within their tenant's share of the slots, and the sequences beyond, in their order."""
        left: dict[str, int] = {}  # slots of each tenant's share
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
        tenant = self._enter(name)
        if not tenant.num_waiting:
            self._ledger.enter(name, self._waiting)
            self._waiting[name] = tenant
        tenant.push(sequence)
        self._count += 1

    def peek(self) -> Sequence | None:
        """Return the next sequence; None if none waits."""
        heads = (
            (tenant.num_slots >= self.share_of(name), self._ledger.served[name], *tenant.head[1:])
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
        self._leave(name)

    def acquire_slot(self, tenant: str) -> None:
        self._enter(tenant).num_slots += 1
        self.version += 1

    def release_slot(self, tenant: str) -> None:
        self._present[tenant].num_slots -= 1
        self.version += 1
        self._leave(tenant)

    def charge(self, num_tokens: Mapping[tuple[str, str], int]) -> None:
        """Charge tokens to tenants that have slots, and to their adapters."""
        for (tenant, identity), count in num_tokens.items():
            self._present[tenant].charge(identity, count)
            rise = count / self._total_weight
            self._ledger.charge(tenant, count / self._weight(tenant), rise, self._waiting)

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def _enter(self, name: str) -> _Tenant:
        if name not in self._present:
            self._present[name] = _Tenant()
            self._total_weight += self._weight(name)
            self.version += 1
        return self._present[name]

    def _leave(self, name: str) -> None:
        tenant = self._present[name]
        if not tenant.num_waiting and not tenant.num_slots:
            del self._present[name]
            self.version += 1
            self._total_weight = self._total_weight - self._weight(name) if self._present else 0.0
