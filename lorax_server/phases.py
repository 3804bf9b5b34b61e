"""Seconds that a start takes, phase by phase."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Phases:
    """Measures phases, in the order in which they first begin. One that comes again is added to itself."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = time.monotonic()

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        self.seconds.setdefault(name, 0.0)
        try:
            yield
        finally:
            self.seconds[name] += time.monotonic() - began

    def __str__(self) -> str:
        """Describe all phases, and what passed between them, in one line."""
        total = time.monotonic() - self._began
        phases = {**self.seconds, "else": max(0.0, total - sum(self.seconds.values()))}
        return f"{total:.1f} s: " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in phases.items())
