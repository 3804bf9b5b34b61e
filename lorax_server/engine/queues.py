"""The queues of sequences that do not run: they wait for news, then for their adapter, then for their turn."""

import math
from collections.abc import Callable

from lorax_server.engine.adapter_queue import AdapterQueue
from lorax_server.engine.adapters.table import AdapterTable
from lorax_server.engine.admission import Limits, find_token_problem
from lorax_server.engine.fair_queue import FairQueue
from lorax_server.engine.sequence import Sequence
from lorax_server.errors import LoraxError, SourceError


class Queues:
    """A sequence that has no row is in one of them."""

    def __init__(
        self,
        limits: Limits,
        adapters: AdapterTable,
        ready: FairQueue,
        fail: Callable[[Sequence, LoraxError], None],
        clock: Callable[[], float],
    ) -> None:
        """`fail` is called with a sequence that has left its queue."""
        self.ready = ready  # sequences that wait for nothing but their turn
        self._limits = limits
        self._adapters = adapters
        self._fail = fail
        self._clock = clock
        self._adapter_queue = AdapterQueue()
        self._held: set[Sequence] = set()  # wait for their structure, or for a token in flight when they were preempted

    @property
    def num_waiting_for_adapters(self) -> int:
        return len(self._adapter_queue)

    @property
    def deadline_s(self) -> float | None:
        """Seconds until `fail_late` has something to do."""
        deadline = self._adapter_queue.deadline
        return None if deadline is None else max(0.0, deadline - self._clock())

    def hold(self, sequence: Sequence) -> None:
        """Let a sequence wait for news of its own, until `let_go`."""
        self._held.add(sequence)

    def let_go(self, sequence: Sequence) -> None:
        """Let a held sequence go on, unless it has a token in flight; do nothing with any other."""
        if self._held and sequence in self._held and not sequence.num_in_flight:
            self._held.remove(sequence)
            self.wait(sequence)

    def wait(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn, or for its adapter first."""
        identity = sequence.request.adapter_identity
        if self._adapters.index_of(identity, sequence.has_begun) is not None:
            self._enqueue(sequence)
            return
        timeout_s = None if sequence.has_begun else self._limits.adapter_timeout_s
        sequence.adapter_wait_began = now = self._clock()
        self._adapter_queue.push(sequence, math.inf if timeout_s is None else now + timeout_s)
        self._adapters.bring(identity)

    def remove(self, sequence: Sequence) -> None:
        if sequence in self._held:
            self._held.remove(sequence)
        elif not self._adapter_queue.remove(sequence):
            self.ready.remove(sequence)

    def next(self) -> Sequence | None:
        """Return the next sequence that can run. Those whose adapter has left meanwhile wait for it again."""
        while (sequence := self.ready.peek()) is not None:
            if self._adapters.index_of(sequence.request.adapter_identity, sequence.has_begun) is not None:
                return sequence
            self.ready.remove(sequence)
            self.wait(sequence)
        return None

    def adapter_arrived(self, identity: str) -> None:
        for sequence in self._adapter_queue.pop_all(identity):
            self._enqueue(sequence)

    def adapter_failed(self, identity: str, error: LoraxError) -> None:
        for sequence in self._adapter_queue.pop_all(identity):
            self._fail(sequence, error)

    def fail_late(self) -> None:
        """Fail the sequences that have waited too long for their adapter."""
        while (sequence := self._adapter_queue.pop_late(self._clock())) is not None:
            limit_s = self._limits.adapter_timeout_s
            self._fail(sequence, SourceError(f"the adapter did not arrive within {limit_s:g} s; try again"))

    def _enqueue(self, sequence: Sequence) -> None:
        """Queue a sequence whose adapter is loaded, or fail it if its tokens do not fit the adapter's vocabulary."""
        problem = None
        if sequence.adapter_wait_began is not None:
            sequence.adapter_wait_s += self._clock() - sequence.adapter_wait_began
            sequence.adapter_wait_began = None
        if not sequence.has_begun:
            vocab_size = self._adapters.vocab_size(sequence.request.adapter_identity)
            problem = find_token_problem(sequence.request, vocab_size)
        if problem is None:
            self.ready.push(sequence)
        else:
            self._fail(sequence, problem)
