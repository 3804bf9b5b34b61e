"""Admission control, which rejects requests that can never run and requests that would wait too long."""

from dataclasses import dataclass

from lorax_server.errors import ContextLengthError, InputError, LoraxError, NotSupportedError, OverloadedError
from lorax_server.plan import Capabilities
from lorax_server.types import Request, SchedulerCounters

AVERAGE_DECAY = 0.98  # decay of the moving averages per step or completion


@dataclass(frozen=True)
class Limits(Capabilities):
    """The scheduler's limits, which depend on the executor's capabilities and the operator's settings.

    If `can_chunk` is False, each prompt is computed in one step, and sequences are never preempted.
    """

    max_prefill_chunk_tokens: int | None = (
        None  # maximum tokens per sequence and step; limits the delay for other prompts
    )
    max_waiting: int | None = None  # maximum number of waiting requests; more requests are rejected
    max_wait_s: float | None = None  # requests with a longer estimated wait are rejected
    adapter_timeout_s: float | None = None  # time limit for loading a request's adapter

    def __post_init__(self) -> None:
        assert self.max_prefill_chunk_tokens is None or self.max_prefill_chunk_tokens > 0, self.max_prefill_chunk_tokens
        assert self.max_step_tokens >= self.max_num_seqs > 0, "every running sequence needs one token per step"
        least = self.max_length + self.max_num_seqs
        # Sequences that generate no text run for one step, which may be larger if it has only one sequence.
        is_large_enough = self.can_chunk or self.task != "generate" or self.max_step_tokens >= least
        assert is_large_enough, "max_step_tokens is too small for one prompt"


def check_request(request: Request, max_length: int, task: str = "generate") -> None:
    """Raise if the prompt is empty, if the request exceeds the maximum length, or if the task cannot run it."""
    num_prompt, num_new = len(request.prompt_ids), request.stop.max_new_tokens
    if not num_prompt:
        raise InputError("`inputs` cannot be empty")
    if task != "generate" and num_new > 1:
        raise NotSupportedError(f"text generation is not supported: the model is served with task = {task}")
    if num_prompt + num_new > max_length:
        raise ContextLengthError(
            f"`inputs` tokens + `max_new_tokens` must be <= {max_length}. Given: {num_prompt} `inputs` "
            f"tokens and {num_new} `max_new_tokens`"
        )


def find_token_error(request: Request, vocab_size: int) -> InputError | None:
    """Return an error if a token ID is not in the vocabulary, because it would make every sequence in the step fail.

    Also return an error if all tokens are stop tokens and `min_new_tokens` is set. Call this after the adapter is
    loaded, because an adapter may change the vocabulary size.
    """
    if max(request.prompt_ids) >= vocab_size or min(request.prompt_ids) < 0:
        return InputError(f"`inputs` has tokens beyond the vocabulary of {vocab_size}")
    if max(request.sampling.logit_bias, default=0) >= vocab_size:
        return InputError(f"`logit_bias` has tokens beyond the vocabulary of {vocab_size}")
    if request.stop.min_new_tokens and request.stop.all_stop_token_ids.issuperset(range(vocab_size)):
        return InputError("`min_new_tokens` cannot be used because every token in the vocabulary is a stop token")
    return None


def make_nan_error(is_merged: bool) -> LoraxError:
    """Return the error for NaN logits. For merged adapters, it is an input error about the merge weights."""
    if is_merged:
        return InputError("the logits with these merged adapters are NaN; use smaller merge weights")
    return LoraxError("the model's logits are NaN (overflow in its dtype?)")


class Backlog:
    """Estimates the queueing time from the token counts of waiting requests.

    Throughput and completion length are exponential moving averages.
    """

    def __init__(self, limits: Limits, counters: SchedulerCounters) -> None:
        self.num_tokens = 0.0
        self._limits = limits
        self._counters = counters
        self._computed = 0.0  # decayed number of tokens that were computed in `_seconds`
        self._seconds = 0.0
        self._last_end = float("-inf")
        self._mean_generated: float | None = None

    def check_overload(self, num_waiting: int) -> None:
        """Raise `OverloadedError` if the queue is full or the estimated wait is too long."""
        limits, wait_s = self._limits, self.estimate_seconds(self.num_tokens)
        is_full = limits.max_waiting is not None and num_waiting >= limits.max_waiting
        is_late = limits.max_wait_s is not None and wait_s > limits.max_wait_s
        if is_full or is_late:
            self._counters.rejected += 1
            raise OverloadedError(
                f"{num_waiting} requests are waiting, about {wait_s:.0f} s of work; try again later",
                retry_after_s=max(1.0, wait_s - (limits.max_wait_s or 0.0)),
            )

    def estimate_tokens(self, request: Request) -> float:
        """Estimate a request's total number of prompt and completion tokens."""
        max_new_tokens = request.stop.max_new_tokens
        return len(request.prompt_ids) + (
            max_new_tokens if self._mean_generated is None else min(max_new_tokens, self._mean_generated)
        )

    def estimate_seconds(self, num_tokens: float) -> float:
        """Estimate the time to compute `num_tokens` tokens, in seconds. The estimate is 0 before the first step."""
        return num_tokens * self._seconds / self._computed if self._computed else 0.0

    def record_step(self, num_tokens: int, submitted: float, now: float) -> tuple[float, float]:
        """Record a finished step. Return its duration, and the time between the previous step and its submission, in
        seconds. Time that overlaps with the previous step is counted only once.
        """
        seconds, idle_s = now - max(submitted, self._last_end), max(0.0, submitted - self._last_end)
        self._last_end = now
        if num_tokens:
            self._computed = self._computed * AVERAGE_DECAY + num_tokens
            self._seconds = self._seconds * AVERAGE_DECAY + seconds
        return seconds, idle_s

    def record_completion(self, num_generated: int) -> None:
        """Record how many tokens a finished completion has."""
        mean = self._mean_generated
        self._mean_generated = (
            num_generated if mean is None else mean * AVERAGE_DECAY + num_generated * (1 - AVERAGE_DECAY)
        )
