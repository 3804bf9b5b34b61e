"""Admission: what the engine can hold, and which requests it refuses: those that could never run, and those that would
wait for too long."""

from dataclasses import dataclass, field

from lorax_server.engine.counters import SchedulerCounters
from lorax_server.engine.throughput import Throughput
from lorax_server.errors import ContextLengthError, InputError, NotSupportedError, OverloadedError
from lorax_server.plan import RopeRule
from lorax_server.types import Request, Task


@dataclass(frozen=True)
class Limits:
    """What the scheduler keeps to."""

    max_step_tokens: int  # that are computed in a step
    max_rows: int  # sequences that run at once
    max_length: int  # tokens of a sequence
    max_chunk: int | None = None  # tokens of one sequence in a step, so that others can begin beside a long prompt
    can_chunk: bool = (
        True  # else a sequence is computed in one step up to its last token, and never gives way for lack of blocks
    )
    can_reuse: bool = True  # blocks of one sequence can serve another
    rope: RopeRule = field(default_factory=RopeRule)
    max_waiting: int | None = None  # requests; more are refused
    max_wait_s: float | None = None  # requests that would probably wait for longer are refused
    adapter_timeout_s: float | None = None  # how long a request waits for its adapter to come

    def __post_init__(self) -> None:
        assert self.max_chunk is None or self.max_chunk > 0, self.max_chunk
        assert self.max_step_tokens >= self.max_rows > 0, "every running sequence needs a token of each step"
        least = self.max_length + self.max_rows
        assert self.can_chunk or self.max_step_tokens >= least, "a prompt must fit into a step beside all that run"


def check_task(request: Request) -> None:
    if request.task is not Task.GENERATE:
        raise NotSupportedError(f"task {request.task.value!r} is not supported yet; this server only generates text")


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

    def __init__(self, limits: Limits, throughput: Throughput, counters: SchedulerCounters) -> None:
        self.num_tokens = 0.0
        self._limits = limits
        self._throughput = throughput
        self._counters = counters

    def refuse_overload(self, num_waiting: int) -> None:
        """Raise if one more would wait for too long behind these."""
        limits, wait_s = self._limits, self._throughput.seconds_for(self.num_tokens)
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
        expected = self._throughput.expect(request)
        self.num_tokens += expected
        return expected

    def remove(self, num_tokens: float) -> None:
        self.num_tokens -= num_tokens
