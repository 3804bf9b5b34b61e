"""Which requests are refused: those that could never run, and those that would wait for too long."""

from lorax_server.engine.counters import SchedulerCounters
from lorax_server.engine.limits import Limits
from lorax_server.engine.pace import Pace
from lorax_server.errors import ContextLengthError, InputError, OverloadedError
from lorax_server.types import Request


def check_length(request: Request, most: int) -> None:
    """Refuse what does not fit even alone."""
    length = len(request.prompt_ids) + request.stop.max_new_tokens
    if not request.prompt_ids:
        raise InputError("`inputs` cannot be empty")
    if length > most:
        raise ContextLengthError(
            f"`inputs` tokens + `max_new_tokens` must be <= {most}. Given: {len(request.prompt_ids)} `inputs` "
            f"tokens and {request.stop.max_new_tokens} `max_new_tokens`"
        )


def find_token_problem(request: Request, vocab_size: int) -> InputError | None:
    """What fails in a step fails for all, so token ids are checked before. Only an adapter that is there can tell how
    many it knows."""
    if max(request.prompt_ids) >= vocab_size or min(request.prompt_ids) < 0:
        return InputError(f"`inputs` has tokens beyond the vocabulary of {vocab_size}")
    if max(request.sampling.logit_bias, default=0) >= vocab_size:
        return InputError(f"`logit_bias` has tokens beyond the vocabulary of {vocab_size}")
    if request.stop.min_new_tokens and request.stop.ending_token_ids.issuperset(range(vocab_size)):
        return InputError("`min_new_tokens`: every token of the vocabulary would end the request")
    return None


class Backlog:
    """The tokens that are expected of requests that have not begun, and with them how long a new one would wait."""

    def __init__(self, limits: Limits, pace: Pace, counters: SchedulerCounters) -> None:
        self.num_tokens = 0.0
        self._limits = limits
        self._pace = pace
        self._counters = counters

    def refuse_overload(self, num_waiting: int) -> None:
        """Raise if one more would wait for too long behind these."""
        limits, wait_s = self._limits, self._pace.seconds_for(self.num_tokens)
        is_full = limits.max_waiting is not None and num_waiting >= limits.max_waiting
        is_late = limits.max_wait_s is not None and wait_s > limits.max_wait_s
        if is_full or is_late:
            self._counters.refused += 1
            raise OverloadedError(
                f"{num_waiting} requests are waiting, about {wait_s:.0f} s of work; try again later",
                retry_after_s=max(1.0, wait_s - (limits.max_wait_s or 0.0)),
            )

    def add(self, request: Request) -> float:
        """A request was taken. How many tokens are expected of it: as many are to be removed when it begins or ends."""
        expected = self._pace.expect(request)
        self.num_tokens += expected
        return expected

    def remove(self, num_tokens: float) -> None:
        self.num_tokens -= num_tokens
