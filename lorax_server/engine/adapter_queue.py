"""Who waits for an adapter, and until when."""

import math
from collections import deque

from lorax_server.engine.sequence import Sequence


class AdapterQueue:
    """Waiting sequences by the adapter they need. Who leaves the queue for a while waits anew when it comes back."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[Sequence, None]] = {}  # by the identity of their adapter, in order
        # By time, since all that may give up wait for equally long. Some have left already, or wait anew.
        self._deadlines: deque[tuple[float, Sequence]] = deque()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def deadline(self) -> float | None:
        """When to look for those that are late."""
        return self._deadlines[0][0] if self._deadlines else None

    def push(self, sequence: Sequence, until: float = math.inf) -> None:
        self._waiting.setdefault(sequence.request.adapter_identity, {})[sequence] = None
        sequence.cold_until = until
        if until < math.inf:
            self._deadlines.append((until, sequence))

    def pop_all(self, identity: str) -> list[Sequence]:
        """Those that need this adapter, which wait for it no more."""
        return list(self._waiting.pop(identity, ()))

    def remove(self, sequence: Sequence) -> bool:
        """Whether it was here."""
        identity = sequence.request.adapter_identity
        waiting = self._waiting.get(identity, {})
        if sequence not in waiting:
            return False
        del waiting[sequence]
        if not waiting:
            del self._waiting[identity]
        return True

    def pop_late(self, now: float) -> Sequence | None:
        """One that has waited for too long; None if nobody has."""
        while self._deadlines:
            until, sequence = self._deadlines[0]
            is_current = until == sequence.cold_until and sequence in self._waiting.get(
                sequence.request.adapter_identity, ()
            )
            if is_current and until > now:
                return None
            self._deadlines.popleft()
            if is_current:
                self.remove(sequence)
                return sequence
        return None
