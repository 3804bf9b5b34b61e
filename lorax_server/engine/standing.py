"""The order of those that run: which goes on before others, and which gives its row back to those that have less.

A tenant keeps its part of the rows from other tenants, and a call one row from other calls of its tenant; only what is
beyond that is taken back. So rows change hands when requests come and end, and do not go to and fro in between.
"""

from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Rows

from lorax_server.engine.fair_queue import FairQueue
from lorax_server.engine.sequence import OrderKey, Sequence


def by_standing(running: Rows[Sequence], queue: FairQueue) -> list[Sequence]:
    """Order those that run, given by rank: by priority, then those within their tenant's part, then by rank.

    The first by rank is the first here too, so that it always goes on.
    """
    return [each[-1] for each in sorted(_standings(running, queue))] if queue.has_excess else list(running)


def may_spare(running: Rows[Sequence], queue: FairQueue) -> bool:
    """Tell whether anybody could have a row to give back, which is found out sooner than who waits for it."""
    is_further = any(sequence.request.first_id is not None for sequence in running)
    return len(queue) > 0 and (is_further or queue.has_excess)


def find_spare(running: Rows[Sequence], queue: FairQueue, head: Sequence, num_free: int) -> list[Sequence]:
    """Those that give their rows back, the newest first, where `head` is next of those that wait.

    Where parts are less than a row, that is one at a time and for the head alone, since nobody else is sure to get it.
    """
    num_due = 0
    if queue.has_excess:
        num_due = queue.num_due or int(queue.has_none(head.request.tenant))
    if num_due:
        return _beyond_their_part(running, queue, head)[: max(0, num_due - num_free)]
    return [] if num_free else _of_its_own(running, head)


def _beyond_their_part(running: Rows[Sequence], queue: FairQueue, head: Sequence) -> list[Sequence]:
    """Only those that matter no more than the one that waits."""
    standings = sorted(_standings(running, queue), reverse=True)
    return [sequence for priority, is_beyond, _, sequence in standings if is_beyond and priority >= head.order_key[0]]


def _of_its_own(running: Rows[Sequence], head: Sequence) -> list[Sequence]:
    """The last of the same tenant that is a further answer to a call with several rows, if the head is a first."""
    if head.request.first_id is not None:
        return []
    tenant = [each for each in running if each.request.tenant == head.request.tenant]
    rows = Counter(_call_of(each) for each in tenant)
    spare = (each for each in reversed(tenant) if each.request.first_id is not None and rows[_call_of(each)] > 1)
    last = next(spare, None)
    return [last] if last is not None and last.order_key > head.order_key else []


def _call_of(sequence: Sequence) -> int:
    first_id = sequence.request.first_id
    return sequence.request.request_id if first_id is None else first_id


def _standings(running: Rows[Sequence], queue: FairQueue) -> Iterator[tuple[int, bool, OrderKey, Sequence]]:
    """For each that runs: its priority, whether it is beyond its tenant's part of the rows, its rank."""
    seen: Counter[str] = Counter()
    for sequence in running:
        tenant, rank = sequence.request.tenant, sequence.order_key
        yield rank[0], seen[tenant] >= queue.kept(tenant), rank, sequence
        seen[tenant] += 1
