"""How fast tokens are computed lately, and how many a request comes to: what waiting times are guessed from."""

from lorax_server.types import Request

MEMORY = 0.98  # how much of a step is remembered at the next one


class Throughput:
    """Averages in which the latest counts most."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._last_end = float("-inf")
        self._mean_generated: float | None = None

    def step(self, num_tokens: int, submitted: float, now: float) -> None:
        """A step has ended. Of two that overlap, each counts the time after the end of the one before."""
        seconds = now - max(submitted, self._last_end)
        self._last_end = now
        if num_tokens:
            self._tokens = self._tokens * MEMORY + num_tokens
            self._seconds = self._seconds * MEMORY + seconds

    def finish(self, num_generated: int) -> None:
        """A request has ended after so many tokens."""
        mean = self._mean_generated
        self._mean_generated = num_generated if mean is None else mean * MEMORY + num_generated * (1 - MEMORY)

    def expect(self, request: Request) -> float:
        """Tokens that will probably be computed for it."""
        most = request.stop.max_new_tokens
        return len(request.prompt_ids) + (most if self._mean_generated is None else min(most, self._mean_generated))

    def seconds_for(self, num_tokens: float) -> float:
        """How long so many take; 0 as long as nothing is known."""
        return num_tokens * self._seconds / self._tokens if self._tokens else 0.0
