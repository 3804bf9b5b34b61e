"""Queues of sequences without a slot, which are blocked, waiting for an adapter, or ready to run."""

from collections import OrderedDict
from collections.abc import Callable

from lorax_server.engine.adapters.table import AdapterTable
from lorax_server.engine.admission import Limits, find_token_error
from lorax_server.engine.fair_queue import FairQueue
from lorax_server.engine.sequence import Sequence
from lorax_server.errors import LoraxError, SourceError


class Queues:
    """The queues of sequences without a slot. Each of these sequences is in exactly one queue."""

    def __init__(
        self,
        limits: Limits,
        adapters: AdapterTable,
        ready: FairQueue,
        fail: Callable[[Sequence, LoraxError], None],
        clock: Callable[[], float],
    ) -> None:
        """Create the queues. `fail` is called after a failed sequence has been removed from its queue."""
        self.ready = ready  # ready to run
        self._limits = limits
        self._adapters = adapters
        self._fail = fail
        self._clock = clock
        self._waiting_for_adapter: dict[str, dict[Sequence, None]] = {}  # by adapter identity, in order of arrival
        # Adapter timeouts in chronological order, since all sequences have the same timeout.
        self._deadlines: OrderedDict[Sequence, float] = OrderedDict()
        self._blocked: set[Sequence] = set()  # waiting for a grammar, or for a token in flight after preemption

    @property
    def num_waiting_for_adapters(self) -> int:
        return sum(map(len, self._waiting_for_adapter.values()))

    @property
    def deadline_s(self) -> float | None:
        """Return the seconds until the next adapter timeout, or None if no sequence has a timeout."""
        deadline = next(iter(self._deadlines.values()), None)
        return None if deadline is None else max(0.0, deadline - self._clock())

    def block(self, sequence: Sequence) -> None:
        """Keep a sequence out of the ready queue until `unblock` is called."""
        self._blocked.add(sequence)

    def is_blocked(self, sequence: Sequence) -> bool:
        return sequence in self._blocked

    def unblock(self, sequence: Sequence) -> None:
        """Move a blocked sequence to another queue, unless it has a token in flight. Ignore sequences that are not
        blocked.
        """
        if self._blocked and sequence in self._blocked and not sequence.num_in_flight:
            self._blocked.remove(sequence)
            self.enqueue(sequence)

    def enqueue(self, sequence: Sequence) -> None:
        """Queue a sequence as ready, or request its adapter if the adapter is not loaded."""
        identity = sequence.request.adapter_identity
        if self._adapters.index_of(identity, sequence.has_started) is not None:
            self._make_ready(sequence)
            return
        timeout_s = None if sequence.has_started else self._limits.adapter_timeout_s
        sequence.adapter_wait_start = now = self._clock()
        self._waiting_for_adapter.setdefault(identity, {})[sequence] = None
        if timeout_s is not None:
            self._deadlines[sequence] = now + timeout_s
        self._adapters.ensure_loaded(identity)

    def remove(self, sequence: Sequence) -> None:
        identity = sequence.request.adapter_identity
        if sequence in self._blocked:
            self._blocked.remove(sequence)
        elif sequence in self._waiting_for_adapter.get(identity, ()):
            del self._waiting_for_adapter[identity][sequence]
            if not self._waiting_for_adapter[identity]:
                del self._waiting_for_adapter[identity]
            self._deadlines.pop(sequence, None)
        else:
            self.ready.remove(sequence)

    def peek_ready(self) -> Sequence | None:
        """Return the next ready sequence, or None. Sequences whose adapter was evicted wait for their adapter again."""
        while (sequence := self.ready.peek()) is not None:
            if self._adapters.index_of(sequence.request.adapter_identity, sequence.has_started) is not None:
                return sequence
            self.ready.remove(sequence)
            self.enqueue(sequence)
        return None

    def adapter_loaded(self, identity: str) -> None:
        for sequence in self._pop_all(identity):
            self._make_ready(sequence)

    def adapter_failed(self, identity: str, error: LoraxError) -> None:
        for sequence in self._pop_all(identity):
            self._fail(sequence, error)

    def fail_timed_out(self) -> None:
        """Fail the sequences whose adapter timeout has expired."""
        now, limit_s = self._clock(), self._limits.adapter_timeout_s
        while self._deadlines and next(iter(self._deadlines.values())) <= now:
            sequence = next(iter(self._deadlines))
            self.remove(sequence)
            self._fail(sequence, SourceError(f"the adapter was not loaded within {limit_s:g} s; try again"))

    def _pop_all(self, identity: str) -> list[Sequence]:
        """Remove and return all sequences that wait for this adapter."""
        sequences = list(self._waiting_for_adapter.pop(identity, ()))
        for sequence in sequences:
            self._deadlines.pop(sequence, None)
        return sequences

    def _make_ready(self, sequence: Sequence) -> None:
        """Queue a sequence whose adapter is loaded, or fail it if its token IDs are not in the adapter's vocabulary."""
        problem = None
        if sequence.adapter_wait_start is not None:
            sequence.adapter_wait_s += self._clock() - sequence.adapter_wait_start
            sequence.adapter_wait_start = None
        if not sequence.has_started and not sequence.is_checked:
            vocab_size = self._adapters.vocab_size(sequence.request.adapter_identity)
            problem = find_token_error(sequence.request, vocab_size)
            if problem is None:
                identity, prompt_ids = sequence.request.adapter_identity, sequence.request.prompt_ids
                sequence.adapter_start, sequence.kv_adapter_start = self._adapters.find_starts(identity, prompt_ids)
                sequence.is_checked = True
        if problem is None:
            self.ready.push(sequence)
        else:
            self._fail(sequence, problem)
