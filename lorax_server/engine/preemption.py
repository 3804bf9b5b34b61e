"""The order of running sequences: which go on first, and which give their rows back to sequences with less.

A tenant keeps its share of the rows. Only rows beyond it are taken back, for other tenants. So rows change hands when
requests arrive and finish, and not in between.
"""

from collections.abc import Sequence as Rows

from lorax_server.engine.fair_queue import FairQueue
from lorax_server.engine.sequence import Sequence


def sort_running(running: Rows[Sequence], queue: FairQueue) -> list[Sequence]:
    """Put sequences within their tenant's share before others; `running` is sorted by arrival.

    The first sequence stays the first, so that it always goes on.
    """
    if not queue.has_excess:
        return list(running)
    within, beyond = _split(running, queue)
    return within + beyond


def find_spare(running: Rows[Sequence], queue: FairQueue, head: Sequence, num_free: int) -> list[Sequence]:
    """Return the sequences that give their rows back, the newest first; `head` is the next in the queue.

    Where shares are less than a row, return one sequence, for the head alone: no other tenant is sure to get the row.
    """
    num_due = queue.num_due or int(queue.has_no_row(head.request.tenant))
    _, beyond = _split(running, queue)
    return beyond[::-1][: max(0, num_due - num_free)]


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
