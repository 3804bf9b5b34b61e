"""Sequences that wait for their adapter."""

import math
from collections import deque

from lorax_server.engine.sequence import Sequence


class AdapterQueue:
    """Waiting sequences by the adapter they need, each with a deadline. A sequence that comes back waits anew."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[Sequence, None]] = {}  # by identity, in order of arrival
        # Sorted, since all sequences with a deadline wait equally long. Some have left already, or wait anew.
        self._deadlines: deque[tuple[float, Sequence]] = deque()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def deadline(self) -> float | None:
        """When to look for late sequences."""
        return self._deadlines[0][0] if self._deadlines else None

    def push(self, sequence: Sequence, deadline: float = math.inf) -> None:
        self._waiting.setdefault(sequence.request.adapter_identity, {})[sequence] = None
        sequence.adapter_deadline = deadline
        if deadline < math.inf:
            self._deadlines.append((deadline, sequence))

    def pop_all(self, identity: str) -> list[Sequence]:
        """Remove and return the sequences that wait for this adapter."""
        return list(self._waiting.pop(identity, ()))

    def remove(self, sequence: Sequence) -> bool:
        """Remove a sequence; False if it is not in the queue."""
        identity = sequence.request.adapter_identity
        waiting = self._waiting.get(identity, {})
        if sequence not in waiting:
            return False
        del waiting[sequence]
        if not waiting:
            del self._waiting[identity]
        return True

    def pop_late(self, now: float) -> Sequence | None:
        """Remove and return a sequence whose deadline has passed; None if there is none."""
        while self._deadlines:
            deadline, sequence = self._deadlines[0]
            waiting = self._waiting.get(sequence.request.adapter_identity, ())
            is_current = deadline == sequence.adapter_deadline and sequence in waiting
            if is_current and deadline > now:
                return None
            self._deadlines.popleft()
            if is_current:
                self.remove(sequence)
                return sequence
        return None
