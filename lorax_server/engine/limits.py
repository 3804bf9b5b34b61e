"""What a step and the workers can hold, and how long requests may wait."""

from dataclasses import dataclass, field

from lorax_server.plan import RopeRule


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
