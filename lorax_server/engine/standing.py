"""Who of those that run goes on before others, and who gives its row back to those that wait and have less.

A tenant keeps its part of the rows, and a call its first answer; only what is beyond that is taken back. So rows change
hands when requests come and end, and do not go to and fro in between.
"""

from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Rows

from lorax_server.engine.fair_queue import FairQueue
from lorax_server.engine.sequence import Rank, Sequence


def by_standing(running: Rows[Sequence], queue: FairQueue) -> list[Sequence]:
    """Order those that run, given by rank: by priority, then those within their tenant's part, then by rank.

    The first by rank is the first here too, so that it always goes on.
    """
    return [each[-1] for each in sorted(_standings(running, queue))] if queue.has_excess else list(running)


def find_spare(running: Rows[Sequence], queue: FairQueue, head: Sequence, num_free: int) -> list[Sequence]:
    """Those that give their rows back, the newest first, where `head` is next of those that wait."""
    num_due = queue.num_due if queue.is_shared else 0
    if num_due:
        return _beyond_their_part(running, queue, head)[: max(0, num_due - num_free)]
    return [] if num_free else _of_its_own(running, head)


def _beyond_their_part(running: Rows[Sequence], queue: FairQueue, head: Sequence) -> list[Sequence]:
    """Only those that matter no more than the one that waits."""
    standings = sorted(_standings(running, queue), reverse=True)
    return [sequence for priority, is_beyond, _, sequence in standings if is_beyond and priority >= head.rank[0]]


def _of_its_own(running: Rows[Sequence], head: Sequence) -> list[Sequence]:
    """The last of the same tenant, if that is a further answer to a call that has others, and the head is a first."""
    tenant = head.request.tenant
    last = next((each for each in reversed(running) if each.request.tenant == tenant), None)
    is_further = last is not None and last.request.choice > 0 and last.rank > head.rank
    return [last] if last is not None and is_further and head.request.choice == 0 else []


def _standings(running: Rows[Sequence], queue: FairQueue) -> Iterator[tuple[int, bool, Rank, Sequence]]:
    """For each that runs: its priority, whether it is beyond its tenant's part of the rows, its rank."""
    seen: Counter[str] = Counter()
    for sequence in running:
        tenant, rank = sequence.request.tenant, sequence.rank
        yield rank[0], seen[tenant] >= max(1, queue.part(tenant)), rank, sequence
        seen[tenant] += 1
