"""What is known of one adapter: who needs it, and how far it has come."""

import math
from dataclasses import dataclass
from enum import Enum

from lorax_server.adapters.spec import AdapterSpec
from lorax_server.errors import LoraxError


class State(Enum):
    """How far an adapter has come."""

    DISK = "on disk"
    PREPARING = "being prepared"
    HOST = "in host memory"
    LOADING = "being loaded"
    DEVICE = "on the device"
    FAILED = "failed"


@dataclass(eq=False, slots=True)
class AdapterEntry:
    """One adapter. The table counts who needs it; each tier notes what it holds of it."""

    spec: AdapterSpec
    num_requests: int = 0  # that need it, waiting or running
    num_uses: int = 0  # requests so far
    num_begun: int = 0  # of these: have had a place on the device, and must not lose it for good
    num_running: int = 0  # of these: have it now
    is_wanted: bool = False  # somebody waits for it to be on the device, since `waits_since`
    is_asked_for: bool = False  # to be there, whether requests wait for it or not
    is_dismissed: bool = False  # to leave as soon as nobody needs it
    waits_since: float = 0.0
    error: LoraxError | None = None
    retry_at: float = 0.0

    # Of the host tier.
    is_preparing: bool = False
    spec_in_work: AdapterSpec | None = None  # what is, or was last, prepared
    is_prepared: bool = False  # in host memory
    num_bytes: int = 0  # there, or as many as it may take
    units: int = 0
    vocab_size: int = 0

    # Of the device tier.
    index: int | None = None
    is_loaded: bool = False
    is_pinned: bool = False
    fresh_until: float = -math.inf  # loaded for somebody who has not run yet, and for that one stays till then
    is_draining: bool = False  # lets nobody in, since another one has waited for too long

    @property
    def identity(self) -> str:
        return self.spec.identity

    @property
    def state(self) -> State:
        if self.index is not None:
            return State.DEVICE if self.is_loaded else State.LOADING
        if self.is_prepared:
            return State.HOST
        if self.error is not None:
            return State.FAILED
        return State.PREPARING if self.is_preparing else State.DISK
