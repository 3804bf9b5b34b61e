"""One adapter: its requests, and where it is."""

import math
from dataclasses import dataclass

from lorax_server.adapters.spec import AdapterSpec
from lorax_server.errors import LoraxError
from lorax_server.types import AdapterStage


@dataclass(eq=False, slots=True)
class AdapterEntry:
    """One adapter. The table counts its requests; each tier notes what it holds of it."""

    spec: AdapterSpec
    num_requests: int = 0  # that need it, waiting or running
    num_uses: int = 0  # requests so far
    num_begun: int = 0  # of these: have run, and must be able to go on
    num_running: int = 0  # of these: run now
    is_wanted: bool = False  # requests, or a call to load it, wait for it since `waits_since`
    is_asked_for: bool = False  # by a call to load it
    is_dismissed: bool = False  # leaves as soon as no request needs it
    waits_since: float = 0.0
    error: LoraxError | None = None
    retry_at: float = 0.0

    # Of the host tier.
    is_preparing: bool = False
    spec_in_work: AdapterSpec | None = None  # of the preparation that runs, or ran last
    is_prepared: bool = False  # in host memory
    num_bytes: int = 0  # there, or as many as it may take
    units: int = 0
    vocab_size: int = 0

    # Of the device tier.
    index: int | None = None
    is_loaded: bool = False
    is_pinned: bool = False
    fresh_until: float = -math.inf  # until then it stays for the request that it was loaded for, which has not run yet
    is_draining: bool = False  # no new sequence begins with it, since another adapter has waited for too long

    @property
    def identity(self) -> str:
        return self.spec.identity

    @property
    def state(self) -> AdapterStage:
        if self.index is not None:
            return AdapterStage.DEVICE if self.is_loaded else AdapterStage.LOADING
        if self.is_prepared:
            return AdapterStage.HOST
        if self.error is not None:
            return AdapterStage.FAILED
        return AdapterStage.PREPARING if self.is_preparing else AdapterStage.DISK
