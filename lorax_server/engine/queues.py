"""The queues of sequences that do not run: they wait for news, then for their adapter, then for their turn."""

from collections import OrderedDict
from collections.abc import Callable

from lorax_server.engine.adapters.table import AdapterTable
from lorax_server.engine.admission import Limits, find_token_problem
from lorax_server.engine.fair_queue import FairQueue
from lorax_server.engine.sequence import Sequence
from lorax_server.errors import LoraxError, SourceError


class Queues:
    """A sequence that has no slot is in one of them."""

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
        self._for_adapter: dict[str, dict[Sequence, None]] = {}  # by adapter identity, in order of arrival
        # Adapter timeouts, in order, since all sequences with a timeout wait equally long.
        self._deadlines: OrderedDict[Sequence, float] = OrderedDict()
        self._held: set[Sequence] = set()  # wait for their structure, or for a token in flight when they were preempted

    @property
    def num_waiting_for_adapters(self) -> int:
        return sum(map(len, self._for_adapter.values()))

    @property
    def deadline_s(self) -> float | None:
        """Seconds until `fail_late` has something to do."""
        deadline = next(iter(self._deadlines.values()), None)
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
        self._for_adapter.setdefault(identity, {})[sequence] = None
        if timeout_s is not None:
            self._deadlines[sequence] = now + timeout_s
        self._adapters.bring(identity)

    def remove(self, sequence: Sequence) -> None:
        identity = sequence.request.adapter_identity
        if sequence in self._held:
            self._held.remove(sequence)
        elif sequence in self._for_adapter.get(identity, ()):
            del self._for_adapter[identity][sequence]
            if not self._for_adapter[identity]:
                del self._for_adapter[identity]
            self._deadlines.pop(sequence, None)
        else:
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
        for sequence in self._pop_all(identity):
            self._enqueue(sequence)

    def adapter_failed(self, identity: str, error: LoraxError) -> None:
        for sequence in self._pop_all(identity):
            self._fail(sequence, error)

    def fail_late(self) -> None:
        """Fail the sequences that have waited too long for their adapter."""
        now, limit_s = self._clock(), self._limits.adapter_timeout_s
        while self._deadlines and next(iter(self._deadlines.values())) <= now:
            sequence = next(iter(self._deadlines))
            self.remove(sequence)
            self._fail(sequence, SourceError(f"the adapter did not arrive within {limit_s:g} s; try again"))

    def _pop_all(self, identity: str) -> list[Sequence]:
        """Remove and return the sequences that wait for an adapter."""
        sequences = list(self._for_adapter.pop(identity, ()))
        for sequence in sequences:
            self._deadlines.pop(sequence, None)
        return sequences

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
