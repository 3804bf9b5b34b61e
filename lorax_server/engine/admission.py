"""Admission: refuses requests that could never run, and those that would wait for too long."""

from dataclasses import dataclass

from lorax_server.errors import ContextLengthError, InputError, LoraxError, OverloadedError
from lorax_server.plan import Capabilities
from lorax_server.types import Request, SchedulerCounters

MEMORY = 0.98  # the weight of the past in the averages, at each new step or request


@dataclass(frozen=True)
class Limits(Capabilities):
    """Limits that the scheduler keeps: those of the executor, and the operator's.

    Without chunks a sequence is computed in one step up to its last token, and never gives way for lack of blocks.
    """

    max_chunk: int | None = None  # tokens of one sequence in a step, so that others can begin beside a long prompt
    max_waiting: int | None = None  # requests; more are refused
    max_wait_s: float | None = None  # requests that would probably wait longer are refused
    adapter_timeout_s: float | None = None  # how long a request waits for its adapter

    def __post_init__(self) -> None:
        assert self.max_chunk is None or self.max_chunk > 0, self.max_chunk
        assert self.max_step_tokens >= self.max_num_seqs > 0, "every running sequence needs a token of each step"
        least = self.max_length + self.max_num_seqs
        assert self.can_chunk or self.max_step_tokens >= least, "a prompt must fit into a step beside all that run"


def check_request(request: Request, max_length: int) -> None:
    """Reject an empty prompt, and a request that does not fit even alone."""
    num_prompt, num_new = len(request.prompt_ids), request.stop.max_new_tokens
    if not num_prompt:
        raise InputError("`inputs` cannot be empty")
    if num_prompt + num_new > max_length:
        raise ContextLengthError(
            f"`inputs` tokens + `max_new_tokens` must be <= {max_length}. Given: {num_prompt} `inputs` "
            f"tokens and {num_new} `max_new_tokens`"
        )


def find_token_problem(request: Request, vocab_size: int) -> InputError | None:
    """Return the error of a request whose token ids do not fit, which would fail all sequences of its step.

    Only an adapter that has been loaded can tell the size of its vocabulary.
    """
    if max(request.prompt_ids) >= vocab_size or min(request.prompt_ids) < 0:
        return InputError(f"`inputs` has tokens beyond the vocabulary of {vocab_size}")
    if max(request.sampling.logit_bias, default=0) >= vocab_size:
        return InputError(f"`logit_bias` has tokens beyond the vocabulary of {vocab_size}")
    if request.stop.min_new_tokens and request.stop.ending_token_ids.issuperset(range(vocab_size)):
        return InputError("`min_new_tokens`: every token of the vocabulary would end the request")
    return None


def make_nan_error(is_merged: bool) -> LoraxError:
    """Blame the request if it chose the weights of a merge, else the model."""
    if is_merged:
        return InputError("the scores of these merged adapters are not numbers; give them smaller weights")
    return LoraxError("the model's scores are not numbers (too large for its dtype?)")


class Backlog:
    """The tokens expected of requests that have not begun, and the time that they take.

    It measures throughput and the length of answers as averages in which the latest count most.
    """

    def __init__(self, limits: Limits, counters: SchedulerCounters) -> None:
        self.num_tokens = 0.0
        self._limits = limits
        self._counters = counters
        self._computed = 0.0  # tokens, and the seconds that they took
        self._seconds = 0.0
        self._last_end = float("-inf")
        self._mean_generated: float | None = None

    def refuse_overload(self, num_waiting: int) -> None:
        """Raise if one more request would wait too long behind these."""
        limits, wait_s = self._limits, self.seconds_for(self.num_tokens)
        is_full = limits.max_waiting is not None and num_waiting >= limits.max_waiting
        is_late = limits.max_wait_s is not None and wait_s > limits.max_wait_s
        if is_full or is_late:
            self._counters.refused += 1
            raise OverloadedError(
                f"{num_waiting} requests are waiting, about {wait_s:.0f} s of work; try again later",
                retry_after_s=max(1.0, wait_s - (limits.max_wait_s or 0.0)),
            )

    def expect_tokens(self, request: Request) -> float:
        """Return the number of tokens that a request will probably take."""
        most = request.stop.max_new_tokens
        return len(request.prompt_ids) + (most if self._mean_generated is None else min(most, self._mean_generated))

    def seconds_for(self, num_tokens: float) -> float:
        """Return the time that so many tokens take; 0 before the first step."""
        return num_tokens * self._seconds / self._computed if self._computed else 0.0

    def note_step(self, num_tokens: int, submitted: float, now: float) -> None:
        """Note a finished step. Of two that overlap, each counts the time after the end of the one before."""
        seconds = now - max(submitted, self._last_end)
        self._last_end = now
        if num_tokens:
            self._computed = self._computed * MEMORY + num_tokens
            self._seconds = self._seconds * MEMORY + seconds

    def note_answer(self, num_generated: int) -> None:
        """Note the length of a finished answer."""
        mean = self._mean_generated
        self._mean_generated = num_generated if mean is None else mean * MEMORY + num_generated * (1 - MEMORY)
