"""Who is next: the higher priority, then the tenant that was served least, then who came first."""

import heapq
from collections.abc import Mapping

from lorax_server.engine.sequence import Sequence

MAX_TENANTS = 10_000  # that are remembered though they wait for nothing


class FairQueue:
    """Waiting sequences of several tenants. A tenant's share is by the tokens it was served, divided by its weight.

    A tenant that had nothing waiting does not save up its share: when it comes back, it is on a par with the least
    served of the others.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = weights or {}
        self._served: dict[str, float] = {}  # of tenants that are waiting or were served while others were
        self._waiting: dict[str, list[tuple[tuple[int, int], Sequence]]] = {}  # heaps, by tenant
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        if tenant not in self._waiting:
            others = [self._served[other] for other in self._waiting]
            self._served[tenant] = max(self._served.get(tenant, 0.0), min(others, default=0.0))
            self._waiting[tenant] = []
        heapq.heappush(self._waiting[tenant], (sequence.rank, sequence))
        self._count += 1

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

    def charge(self, tenant: str, num_tokens: int) -> None:
        self._served[tenant] = self._served.get(tenant, 0.0) + num_tokens / self._weights.get(tenant, 1.0)
        if len(self._served) > MAX_TENANTS + len(self._waiting):
            self._served = {other: self._served[other] for other in (*self._waiting, tenant)}

    def _heads(self) -> list[tuple[int, float, int, Sequence]]:
        """The first of each tenant, by what decides."""
        return [
            (heap[0][0][0], self._served[tenant], heap[0][0][1], heap[0][1]) for tenant, heap in self._waiting.items()
        ]
