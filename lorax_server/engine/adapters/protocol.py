"""The adapters as the scheduler sees them: `AdapterTable`, or a test's stand-in."""

from collections.abc import Iterable
from typing import Protocol

from lorax_server.plan import AdapterOp


class Adapters(Protocol):
    """Adapters by their identity. Each call for a request or sequence has its counterpart when that one goes."""

    def add_request(self, identity: str) -> None:
        """Count a request; raise if the adapter is not known or has just failed."""

    def end_request(self, identity: str, has_begun: bool) -> None: ...

    def vocab_size(self, identity: str) -> int:
        """Return the size of a loaded adapter's vocabulary."""

    def is_merged(self, identity: str) -> bool:
        """Tell whether it is a merge, with weights that a request chose."""

    def index_of(self, identity: str, has_begun: bool) -> int | None:
        """Return the index that steps use; None if a sequence cannot begin, or go on, with the adapter now."""

    def bring(self, identity: str) -> None:
        """Bring an adapter to the device; `Scheduler.adapter_arrived` or `adapter_failed` is called then."""

    def begin(self, identity: str) -> None:
        """Count a request that runs for the first time: from now on the adapter stays on the device or the host."""

    def hold(self, identity: str) -> None:
        """Keep an adapter on the device while a sequence runs with it."""

    def release(self, identity: str) -> None: ...

    @property
    def needs_step(self) -> bool:
        """Tell whether the workers have operations to do, even if there is nothing to compute."""

    def submit(self) -> tuple[AdapterOp, ...]:
        """Return the operations for the workers before the step that goes out now."""

    def completed(self, step: int, loaded: Iterable[int]) -> None:
        """Note that a step has ended, and these loads have."""
