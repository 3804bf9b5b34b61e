"""The order of running sequences: which go on first, and which give their rows back to sequences with less.

A tenant keeps its share of the rows from other tenants, and a call keeps one row from other calls of its tenant. Only
rows beyond that are taken back. So rows change hands when requests come and end, and not in between.
"""

from collections import Counter
from collections.abc import Sequence as Rows

from lorax_server.engine.fair_queue import FairQueue
from lorax_server.engine.sequence import Sequence


def sort_running(running: Rows[Sequence], queue: FairQueue) -> list[Sequence]:
    """Put sequences within their tenant's share before others; `running` is sorted by order key.

    The first sequence stays the first, so that it always goes on.
    """
    if not queue.has_excess:
        return list(running)
    within, beyond = _split(running, queue)
    return within + beyond


def may_spare(running: Rows[Sequence], queue: FairQueue) -> bool:
    """Tell quickly whether any sequence could have a row to give back."""
    if not len(queue):
        return False
    return queue.has_excess or any(sequence.request.first_id is not None for sequence in running)


def find_spare(running: Rows[Sequence], queue: FairQueue, head: Sequence, num_free: int) -> list[Sequence]:
    """Return the sequences that give their rows back, the newest first; `head` is the next in the queue.

    Where shares are less than a row, return one sequence, for the head alone: no other tenant is sure to get the row.
    """
    num_due = 0
    if queue.has_excess:
        num_due = queue.num_due or int(queue.has_no_row(head.request.tenant))
    if num_due:
        _, beyond = _split(running, queue)
        return beyond[::-1][: max(0, num_due - num_free)]
    return [] if num_free else _find_further_answer(running, head)


def _find_further_answer(running: Rows[Sequence], head: Sequence) -> list[Sequence]:
    """Return the tenant's last further answer to a call with several rows, if the head is a first answer."""
    if head.request.first_id is not None:
        return []
    own = [sequence for sequence in running if sequence.request.tenant == head.request.tenant]
    rows = Counter(_call_id(sequence) for sequence in own)
    for sequence in reversed(own):
        if sequence.request.first_id is not None and rows[_call_id(sequence)] > 1:
            return [sequence] if sequence.order_key > head.order_key else []
    return []


def _call_id(sequence: Sequence) -> int:
    first_id = sequence.request.first_id
    return sequence.request.request_id if first_id is None else first_id


def _split(running: Rows[Sequence], queue: FairQueue) -> tuple[list[Sequence], list[Sequence]]:
    """Return the sequences within their tenant's share of the rows, and those beyond, in their order."""
    left: dict[str, int] = {}  # rows of each tenant's share
    within, beyond = list[Sequence](), list[Sequence]()
    for sequence in running:
        tenant = sequence.request.tenant
        if tenant not in left:
            left[tenant] = queue.kept_rows(tenant)
        left[tenant] -= 1
        (within if left[tenant] >= 0 else beyond).append(sequence)
    return within, beyond
