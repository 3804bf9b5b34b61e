"""An index of resolved adapter names, with their identities, pins and last errors."""

from collections import OrderedDict
from collections.abc import Iterable, Set
from itertools import islice

from cachetools import FIFOCache

from lorax_server.errors import AdapterAccessError, AdapterError, AdapterNotFoundError, SourceError
from lorax_server.server.access.model_names import AdapterKey
from lorax_server.types import AdapterRef, AdapterStage

MAX_ADAPTERS = 10_000
MAX_MERGES = 1000
MAX_NAMES_PER_ADAPTER = 16  # an adapter has several names if its folder is copied
MAX_FAILED_NAMES = 1000
MERGE_SOURCE = ""  # the source of merged adapters
IN_MEMORY_STAGES = frozenset(
    stage.value for stage in (AdapterStage.PREPARING, AdapterStage.HOST, AdapterStage.LOADING, AdapterStage.DEVICE)
)


def is_adapter_fault(ref: AdapterRef, error: AdapterError) -> bool:
    """Return True if the adapter itself caused the error, so that listings should show it.

    Errors from requests with a caller's token are excluded, because other callers must not see them.
    """
    return ref.token is None and not isinstance(error, AdapterAccessError | SourceError | AdapterNotFoundError)


class AdapterNameIndex:
    """Maps adapter names to identities and back. The engine uses only identities.

    A name can refer to different adapters over time, and several names can refer to the same adapter. The oldest
    entries are evicted, except for pinned adapters, which an operator must be able to unload by name.
    """

    def __init__(self) -> None:
        self._names: OrderedDict[str, dict[AdapterKey, None]] = OrderedDict()  # names by identity
        self._identities: dict[AdapterKey, dict[str, None]] = {}  # identities by name, the latest last
        self._merges: OrderedDict[str, None] = OrderedDict()  # identities of merged adapters
        self._pins: dict[str, set[AdapterKey]] = {}  # pinned names by identity
        self._errors: FIFOCache[AdapterKey, str] = FIFOCache(MAX_FAILED_NAMES)  # last errors by name
        self._warnings: FIFOCache[AdapterKey, str] = FIFOCache(MAX_ADAPTERS)
        self._private: set[AdapterKey] = set()  # names resolved only with a caller's token

    def add(self, identity: str, name: AdapterKey, needs_token: bool = False) -> None:
        """Record that a name resolved to an identity. Names that always needed a caller's token are private."""
        if not needs_token:
            self._private.discard(name)
        elif name not in self._identities:
            self._private.add(name)
        names = self._names.setdefault(identity, {})
        if name != next(iter(names), None):  # keep the first name in front, because listings show it
            names.pop(name, None)
            names[name] = None
        self._names.move_to_end(identity)
        identities = self._identities.setdefault(name, {})
        identities.pop(identity, None)
        identities[identity] = None
        self._errors.pop(name, None)
        if len(names) > MAX_NAMES_PER_ADAPTER:
            self._evict_name(identity)
        if name.source == MERGE_SOURCE:
            self._merges[identity] = None
            self._merges.move_to_end(identity)
        if len(self._merges) > MAX_MERGES:
            self.remove(next(iter(self._merges)))
        if len(self._names) > MAX_ADAPTERS:
            self._evict_adapter()

    def is_private(self, name: AdapterKey) -> bool:
        """Return True if this name was never resolved without a caller's token."""
        return name in self._private

    def first_name(self, identity: str) -> AdapterKey | None:
        return next(iter(self._names.get(identity, ())), None)

    def names_of(self, identity: str) -> Iterable[AdapterKey]:
        """Return the adapter's first name and its most recent names."""
        return self._names.get(identity, ())

    def newest_identities(self, count: int) -> list[str]:
        """Return the most recently resolved identities, newest first."""
        return list(islice(reversed(self._names), count))

    def identities_after(self, identity: str) -> list[str]:
        """Return all identities that sort after `identity`, in sorted order."""
        return sorted(each for each in self._names if each > identity)

    def identities_of(self, name: AdapterKey) -> list[str]:
        """Return the identities that a name has resolved to and that are still indexed, oldest first."""
        return list(self._identities.get(name, ()))

    def latest_identity(self, name: AdapterKey) -> str:
        """Return the identity that a name last resolved to, or "" if it was never resolved."""
        return next(reversed(self._identities.get(name, {})), "")

    def remove(self, identity: str, only: AdapterKey | None = None) -> None:
        """Remove an adapter and all its names. If `only` is set, remove only that name."""
        for name in [each for each in self._names.get(identity, ()) if only in (None, each)]:
            names, identities = self._names[identity], self._identities[name]
            del names[name], identities[identity]
            if not identities:
                del self._identities[name]
                self._private.discard(name)
            if not names:
                del self._names[identity]
                self._merges.pop(identity, None)
                self._pins.pop(identity, None)

    # --- Pins and errors ----------------------------------------------------------------------------------------------

    def pin(self, identity: str, name: AdapterKey) -> None:
        """Record that an adapter was pinned under this name."""
        self._pins.setdefault(identity, set()).add(name)

    def unpin(self, identity: str) -> None:
        self._pins.pop(identity, None)

    def pinning_names(self, identity: str) -> Set[AdapterKey]:
        return self._pins.get(identity, frozenset())

    def set_error(self, name: AdapterKey, error: str) -> None:
        """Record why a name cannot be served. Resolving the name again clears the error."""
        self._errors[name] = error

    def find_error(self, name: AdapterKey | None) -> str | None:
        """Return the last error for a name, or None."""
        return None if name is None else self._errors.get(name)

    def set_warning(self, name: AdapterKey, warning: str | None) -> bool:
        """Record a warning about a name, or remove it. Return True if it has changed."""
        has_changed = self._warnings.pop(name, None) != warning
        if warning is not None:
            self._warnings[name] = warning
        return has_changed

    def find_warning(self, name: AdapterKey | None) -> str | None:
        """Return the last warning about a name, or None."""
        return None if name is None else self._warnings.get(name)

    def failed_names(self) -> list[AdapterKey]:
        """Return the names whose last resolution failed."""
        return list(self._errors)

    # --- Eviction -----------------------------------------------------------------------------------------------------

    def _evict_adapter(self) -> None:
        """Remove the least recently resolved adapter that is not pinned."""
        oldest = next((identity for identity in self._names if identity not in self._pins), None)
        if oldest is not None:
            self.remove(oldest)

    def _evict_name(self, identity: str) -> None:
        """Remove the adapter's oldest name, except for the first, the latest and pinned names."""
        names, pinned = self._names[identity], self._pins.get(identity, ())
        oldest = next((name for name in islice(names, 1, len(names) - 1) if name not in pinned), None)
        if oldest is not None:
            self.remove(identity, only=oldest)
