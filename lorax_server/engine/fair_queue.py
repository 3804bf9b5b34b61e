"""The next one to run: the higher priority, then tenants with fewer rows than their part, then the tenant that was
served least or came first; and of a tenant, the adapter that was served least."""

import heapq
from collections import Counter
from collections.abc import Collection, Mapping

from lorax_server.engine.sequence import OrderKey, Sequence

MAX_NAMES = 10_000  # that are remembered though they wait for nothing
ROUNDING = 1e-6  # a part of a row that sums of weights may be off by


class _Ledger:
    """The tokens that each of several was served.

    Who had nothing waiting does not save up its share: when it comes back, it is on a par with the least served of the
    others. Nor do those that wait fall behind for good because new ones never end to come: where these begin moves on
    with every token.
    """

    def __init__(self) -> None:
        self.served: dict[str, float] = {}
        self._start = 0.0  # what one that comes now counts as served

    def come(self, name: str, waiting: Collection[str]) -> None:
        least = min([self.served[other] for other in waiting], default=0.0)
        self.served[name] = max(self.served.get(name, 0.0), self._start, least)

    def charge(self, name: str, amount: float, moved: float, waiting: Collection[str]) -> None:
        """Note tokens by the weight of who was served, and by that of all together."""
        self.served[name] = self.served.get(name, 0.0) + amount
        self._start += moved
        if len(self.served) > MAX_NAMES + len(waiting):
            self.served = {other: self.served[other] for other in {*waiting, name}}


class _Tenant:
    """The requests that one tenant waits for: heaps by adapter, which share equally."""

    def __init__(self) -> None:
        self._heaps: dict[str, list[tuple[OrderKey, Sequence]]] = {}
        self._ledger = _Ledger()
        self.num_waiting = 0
        self.num_rows = 0

    @property
    def head(self) -> tuple[int, float, OrderKey, Sequence]:
        served = self._ledger.served
        return min((heap[0][0][0], served[adapter], *heap[0]) for adapter, heap in self._heaps.items())

    def push(self, sequence: Sequence) -> None:
        adapter = sequence.request.adapter_identity
        if adapter not in self._heaps:
            self._ledger.come(adapter, self._heaps)
        heapq.heappush(self._heaps.setdefault(adapter, []), (sequence.order_key, sequence))
        self.num_waiting += 1

    def remove(self, sequence: Sequence) -> None:
        """The first of its adapter in no time, any other in the time of those of its adapter."""
        adapter = sequence.request.adapter_identity
        heap = self._heaps[adapter]
        if heap[0][1] is sequence:
            heapq.heappop(heap)
        else:
            heap.remove((sequence.order_key, sequence))
            heapq.heapify(heap)
        if not heap:
            del self._heaps[adapter]
        self.num_waiting -= 1

    def charge(self, adapter: str, num_tokens: int) -> None:
        self._ledger.charge(adapter, num_tokens, num_tokens / (1 + len(self._heaps)), self._heaps)


class FairQueue:
    """Waiting sequences of several tenants, and how many rows each tenant has.

    Rows are divided among the tenants that run or wait, by their weights. Who has fewer than its part comes first. All
    others share by the tokens that they were served, divided by their weights.
    """

    def __init__(self, weights: Mapping[str, float] | None = None, num_rows: int = 1) -> None:
        self._weights = weights or {}
        self._most_weight = max([1.0, *self._weights.values()])
        self._num_rows = num_rows
        self._ledger = _Ledger()
        self._here: dict[str, _Tenant] = {}  # those that run or wait
        self._waiting: dict[str, _Tenant] = {}  # of these: those that wait
        self._weight_here = 0.0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def is_shared(self) -> bool:
        """Tell whether there is more than one tenant."""
        return len(self._here) > 1

    @property
    def rows(self) -> Counter[str]:
        """By tenant."""
        return Counter({name: tenant.num_rows for name, tenant in self._here.items() if tenant.num_rows})

    def part(self, tenant: str) -> int:
        """Whole rows that are the tenant's by its weight; none where there are too many tenants, or heavier ones."""
        return int(self._num_rows * self._weight(tenant) / self._weight_here + ROUNDING)

    def kept(self, tenant: str) -> int:
        """Rows that nobody takes from the tenant: its part, and one at least."""
        return max(1, self.part(tenant))

    @property
    def has_excess(self) -> bool:
        """Tell whether a tenant has more rows than are kept for it."""
        return any(each.num_rows > self.kept(name) for name, each in self._here.items() if each.num_rows > 1)

    @property
    def has_due(self) -> bool:
        """Tell whether a tenant waits that has fewer rows than are kept for it."""
        return any(tenant.num_rows < self.kept(name) for name, tenant in self._waiting.items())

    @property
    def num_due(self) -> int:
        """Rows that tenants wait for and that are theirs."""
        if self._num_rows * self._most_weight < self._weight_here:
            return 0  # so many tenants that no part is a row
        return sum(
            min(tenant.num_waiting, max(0, self.part(name) - tenant.num_rows)) for name, tenant in self._waiting.items()
        )

    def has_none(self, tenant: str) -> bool:
        """Tell whether a tenant that waits has no row at all."""
        return self._waiting[tenant].num_rows == 0

    def push(self, sequence: Sequence) -> None:
        name = sequence.request.tenant
        tenant = self._come(name)
        if not tenant.num_waiting:
            self._ledger.come(name, self._waiting)
            self._waiting[name] = tenant
        tenant.push(sequence)
        self._count += 1

    def peek(self) -> Sequence | None:
        """The next one; None if nobody waits."""
        best = min(self._heads(), default=None)
        return None if best is None else best[-1]

    def remove(self, sequence: Sequence) -> None:
        name = sequence.request.tenant
        tenant = self._waiting[name]
        tenant.remove(sequence)
        if not tenant.num_waiting:
            del self._waiting[name]
        self._count -= 1
        self._go(name)

    def take_row(self, tenant: str) -> None:
        self._come(tenant).num_rows += 1

    def give_row(self, tenant: str) -> None:
        self._here[tenant].num_rows -= 1
        self._go(tenant)

    def charge(self, tenant: str, adapter: str, num_tokens: int) -> None:
        """Tokens of a tenant that has a row."""
        self._here[tenant].charge(adapter, num_tokens)
        moved = num_tokens / self._weight_here
        self._ledger.charge(tenant, num_tokens / self._weight(tenant), moved, self._waiting)

    def _heads(self) -> list[tuple[int, bool, float, OrderKey, Sequence]]:
        """The first of each tenant, by what decides."""
        heads = []
        for name, tenant in self._waiting.items():
            priority, _, rank, sequence = tenant.head
            heads.append((priority, tenant.num_rows >= self.part(name), self._ledger.served[name], rank, sequence))
        return heads

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def _come(self, name: str) -> _Tenant:
        if name not in self._here:
            self._here[name] = _Tenant()
            self._weight_here += self._weight(name)
        return self._here[name]

    def _go(self, name: str) -> None:
        tenant = self._here[name]
        if not tenant.num_waiting and not tenant.num_rows:
            del self._here[name]
            self._weight_here = self._weight_here - self._weight(name) if self._here else 0.0
