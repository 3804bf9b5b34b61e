"""The adapters that an engine knows: all whose names were resolved, up to a limit."""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from lorax_server.adapters.spec import AdapterSpec
from lorax_server.errors import AdapterError, InputError, LoraxError
from lorax_server.types import AdapterStage, AdapterState

MAX_KNOWN = 100_000  # adapters that are remembered though they are nowhere but on disk
MAX_MERGES = 1000  # of these: merged by requests. A request that names one again gets it again, made of its parts
MAX_LISTED = 2000  # described at once: no step waits longer, however many adapters there are


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


class AdapterRegistry:
    """Entries by identity, in the order in which they were last named."""

    def __init__(self) -> None:
        self.entries: OrderedDict[str, AdapterEntry] = OrderedDict()
        self._merges: OrderedDict[str, AdapterEntry] = OrderedDict()  # of these: the merged ones

    def __getitem__(self, identity: str) -> AdapterEntry:
        return self.entries[identity]

    def get(self, identity: str) -> AdapterEntry | None:
        return self.entries.get(identity)

    def is_merged(self, identity: str) -> bool:
        return identity in self._merges

    def add(self, spec: AdapterSpec) -> tuple[AdapterEntry, list[str]]:
        """Add an adapter, or take note of where it lies now. Return its entry, and the identities forgotten for it."""
        entry, forgotten = self.entries.get(spec.identity), []
        if entry is None:
            entry = self.entries[spec.identity] = AdapterEntry(spec)
            if spec.merge is not None:
                self._merges[spec.identity] = entry
            forgotten = [*self._forget_some(self.entries, MAX_KNOWN), *self._forget_some(self._merges, MAX_MERGES)]
        if spec.parts != entry.spec.parts:  # the same content in another folder: the old one may be gone
            entry.spec, entry.error = spec, None
        self._touch(spec.identity)
        return entry, forgotten

    def find_usable(self, identity: str, now: float) -> AdapterEntry:
        """Return the entry of an adapter; raise if it is unknown or has just failed."""
        entry = self.entries.get(identity)
        if entry is None:
            raise AdapterError(f"adapter {identity[:64]!r} is not known here any more; name it again")
        if entry.error is not None and entry.state is AdapterStage.FAILED:
            if now < entry.retry_at:
                raise type(entry.error)(str(entry.error), entry.retry_at - now)
            entry.error = None
        self._touch(identity)
        return entry

    def describe(self, identities: Sequence[str], itemsize: int) -> list[AdapterState]:
        """Describe those of the adapters that are known."""
        if len(identities) > MAX_LISTED:
            raise InputError(f"at most {MAX_LISTED} adapters are described at once, not {len(identities)}")
        entries = (self.entries.get(identity) for identity in identities)
        return [_describe(entry, itemsize) for entry in entries if entry is not None]

    def _touch(self, identity: str) -> None:
        self.entries.move_to_end(identity)
        if identity in self._merges:
            self._merges.move_to_end(identity)

    def _forget_some(self, among: OrderedDict[str, AdapterEntry], limit: int) -> list[str]:
        """Forget adapters that are nowhere but on disk, those first that were not named for longest."""
        forgotten = []
        while len(among) > limit:
            identity, entry = next(iter(among.items()))
            if entry.num_requests or entry.is_asked_for or entry.state not in (AdapterStage.DISK, AdapterStage.FAILED):
                among.move_to_end(identity)
                break
            del self.entries[identity]
            self._merges.pop(identity, None)
            forgotten.append(identity)
        return forgotten


def _describe(entry: AdapterEntry, itemsize: int) -> AdapterState:
    return AdapterState(
        entry.identity,
        entry.spec.name,
        entry.state.value,
        entry.num_bytes or entry.spec.num_elements * itemsize,
        entry.is_pinned,
        entry.num_requests,
        entry.num_uses,
        str(entry.error) if entry.error is not None and entry.state is AdapterStage.FAILED else None,
    )
