"""Who is next: the higher priority, then who has fewer rows than its part, then who was served least or came first."""

import heapq
from collections import Counter
from collections.abc import Mapping

from lorax_server.engine.sequence import Rank, Sequence

MAX_TENANTS = 10_000  # that are remembered though they wait for nothing
ROUNDING = 1e-6  # a part of a row that sums of weights may be off by


class FairQueue:
    """Waiting sequences of several tenants, and how many rows each tenant has.

    Rows are divided among the tenants that run or wait, by their weights. Who has fewer than its part comes first. All
    others share by the tokens that they were served, divided by their weights. A tenant that had nothing waiting does
    not save up its share: when it comes back, it is on a par with the least served of the others. Nor do those that
    wait fall behind for good because new tenants never end to come: where these begin moves on with every token.
    """

    def __init__(self, weights: Mapping[str, float] | None = None, num_rows: int = 1) -> None:
        self._weights = weights or {}
        self._num_rows = num_rows
        self._served: dict[str, float] = {}  # of tenants that are waiting or were served while others were
        self._waiting: dict[str, list[tuple[Rank, Sequence]]] = {}  # heaps, by tenant
        self._count = 0
        self._rows: Counter[str] = Counter()
        self._here: Counter[str] = Counter()  # sequences that wait or have a row
        self._weight_here = 0.0
        self._start = 0.0  # what a tenant that comes now counts as served

    def __len__(self) -> int:
        return self._count

    @property
    def is_shared(self) -> bool:
        """Whether there is more than one tenant."""
        return len(self._here) > 1

    def part(self, tenant: str) -> int:
        """Whole rows that are the tenant's by its weight."""
        return int(self._num_rows * self._weight(tenant) / self._weight_here + ROUNDING)

    @property
    def num_due(self) -> int:
        """Rows that tenants wait for and that are theirs."""
        return sum(
            min(len(heap), max(0, self.part(tenant) - self._rows[tenant])) for tenant, heap in self._waiting.items()
        )

    def push(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        if tenant not in self._waiting:
            others = [self._served[other] for other in self._waiting]
            self._served[tenant] = max(self._served.get(tenant, 0.0), self._start, min(others, default=0.0))
            self._waiting[tenant] = []
        heapq.heappush(self._waiting[tenant], (sequence.rank, sequence))
        self._count += 1
        self._come(tenant)

    def peek(self) -> Sequence | None:
        """The next one; None if nobody waits."""
        best = min(self._heads(), default=None)
        return None if best is None else best[-1]

    def remove(self, sequence: Sequence) -> None:
        """The next one in no time, any other in the time of those of its tenant."""
        tenant = sequence.request.tenant
        heap = self._waiting[tenant]
        if heap[0][1] is sequence:
            heapq.heappop(heap)
        else:
            heap.remove((sequence.rank, sequence))
            heapq.heapify(heap)
        if not heap:
            del self._waiting[tenant]
        self._count -= 1
        self._go(tenant)

    def take_row(self, tenant: str) -> None:
        self._rows[tenant] += 1
        self._come(tenant)

    def give_row(self, tenant: str) -> None:
        self._rows[tenant] -= 1
        if not self._rows[tenant]:
            del self._rows[tenant]
        self._go(tenant)

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Tokens of a tenant that has a row."""
        self._served[tenant] = self._served.get(tenant, 0.0) + num_tokens / self._weight(tenant)
        self._start += num_tokens / self._weight_here
        if len(self._served) > MAX_TENANTS + len(self._waiting):
            self._served = {other: self._served[other] for other in (*self._waiting, tenant)}

    def _heads(self) -> list[tuple[int, bool, float, Rank, Sequence]]:
        """The first of each tenant, by what decides."""
        return [
            (heap[0][0][0], self._rows[tenant] >= self.part(tenant), self._served[tenant], *heap[0])
            for tenant, heap in self._waiting.items()
        ]

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def _come(self, tenant: str) -> None:
        self._here[tenant] += 1
        if self._here[tenant] == 1:
            self._weight_here += self._weight(tenant)

    def _go(self, tenant: str) -> None:
        self._here[tenant] -= 1
        if not self._here[tenant]:
            del self._here[tenant]
            self._weight_here = self._weight_here - self._weight(tenant) if self._here else 0.0
