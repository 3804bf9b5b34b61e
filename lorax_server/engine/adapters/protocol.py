"""What the scheduler asks about adapters, and what it tells who moves them: `AdapterTable`, or a test's stand-in."""

from collections.abc import Iterable
from typing import Protocol

from lorax_server.plan import AdapterOp


class Adapters(Protocol):
    """Adapters by their identity. Each call of a request or sequence has its counterpart when that one goes."""

    def add_request(self, identity: str) -> None:
        """A request needs it; raises if it cannot be had."""

    def end_request(self, identity: str, has_begun: bool) -> None: ...

    def vocab_size(self, identity: str) -> int:
        """Of one that the workers have."""

    def is_merged(self, identity: str) -> bool:
        """Tell whether it is several in one, by weights that a request chose."""

    def index_of(self, identity: str, has_begun: bool) -> int | None:
        """Where the workers have it; None if a sequence cannot begin, or go on, with it now."""

    def bring(self, identity: str) -> None:
        """Somebody waits for it; `Scheduler.adapter_arrived` or `adapter_failed` is to be called then."""

    def begin(self, identity: str) -> None:
        """A sequence runs for the first time."""

    def hold(self, identity: str) -> None:
        """It must stay while a sequence runs that needs it."""

    def release(self, identity: str) -> None: ...

    @property
    def needs_step(self) -> bool:
        """Whether there is something to be told to the workers."""

    def submit(self) -> tuple[AdapterOp, ...]:
        """A step goes out, and this with it."""

    def completed(self, step: int, loaded: Iterable[int]) -> None: ...
