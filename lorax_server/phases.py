"""Measures startup time by phase."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Phases:
    """Measures the duration of named phases. The durations of a repeated phase are added."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._started_at = time.monotonic()

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        self.seconds.setdefault(name, 0.0)
        try:
            yield
        finally:
            self.seconds[name] += time.monotonic() - began

    def __str__(self) -> str:
        """Return the total time and the time of each phase, including unmeasured time, as one line."""
        total = time.monotonic() - self._started_at
        phases = {**self.seconds, "other": max(0.0, total - sum(self.seconds.values()))}
        return f"{total:.1f} s: " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in phases.items())
