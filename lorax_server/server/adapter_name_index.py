"""The names by which adapters were found, and the identities, pins and errors of these names."""

from collections import OrderedDict
from collections.abc import Iterable, Set
from itertools import islice

from cachetools import FIFOCache

from lorax_server.errors import AdapterAccessError, AdapterError, AdapterNotFoundError, SourceError
from lorax_server.server.access.model_names import Named
from lorax_server.types import AdapterRef, AdapterStage

MAX_ADAPTERS = 10_000
MAX_MERGES = 1000
MAX_NAMES = 16  # per adapter: copies of a folder have the same identity
MAX_FAILED = 1000
MERGES = ""  # stands for the source of merged adapters
IN_MEMORY = frozenset(
    stage.value for stage in (AdapterStage.PREPARING, AdapterStage.HOST, AdapterStage.LOADING, AdapterStage.DEVICE)
)


def blames_adapter(ref: AdapterRef, error: AdapterError) -> bool:
    """Return True if the error says that the adapter cannot be served, so that listings show it.

    Errors that a caller's token has caused are not shown to others. An unreachable source is not an adapter's fault.
    """
    return ref.token is None and not isinstance(error, AdapterAccessError | SourceError | AdapterNotFoundError)


class AdapterNameIndex:
    """Maps names to adapter identities and back; the engine knows identities only. The oldest entries are evicted.

    A name may have meant several adapters over time, and several names may mean the same adapter. Pinned adapters are
    not evicted, since an operator unloads them by name.
    """

    def __init__(self) -> None:
        self._names: OrderedDict[str, dict[Named, None]] = OrderedDict()  # by identity
        self._identities: dict[Named, dict[str, None]] = {}  # by name, the latest last
        self._merges: OrderedDict[str, None] = OrderedDict()  # identities
        self._pins: dict[str, set[Named]] = {}  # by identity: the names by which it was pinned
        self._errors: FIFOCache[Named, str] = FIFOCache(MAX_FAILED)  # of names that cannot be served now
        self._private: set[Named] = set()  # names that were found only with callers' tokens

    def add(self, identity: str, name: Named, needs_token: bool = False) -> None:
        """Record that a name now means an adapter. The name is private if it was never found without a token."""
        if not needs_token:
            self._private.discard(name)
        elif name not in self._identities:
            self._private.add(name)
        names = self._names.setdefault(identity, {})
        if name != next(iter(names), None):  # the first name stays first: listings show it
            names.pop(name, None)
            names[name] = None
        self._names.move_to_end(identity)
        identities = self._identities.setdefault(name, {})
        identities.pop(identity, None)
        identities[identity] = None
        self._errors.pop(name, None)
        if len(names) > MAX_NAMES:
            self._evict_name(identity)
        if name.source == MERGES:
            self._merges[identity] = None
            self._merges.move_to_end(identity)
        if len(self._merges) > MAX_MERGES:
            self.remove(next(iter(self._merges)))
        if len(self._names) > MAX_ADAPTERS:
            self._evict_adapter()

    def is_private(self, name: Named) -> bool:
        """Return True if the adapter source gave this adapter only to callers with a token."""
        return name in self._private

    def first_name(self, identity: str) -> Named | None:
        return next(iter(self._names.get(identity, ())), None)

    def names(self, identity: str) -> Iterable[Named]:
        """Return the first name of an adapter and its latest ones."""
        return self._names.get(identity, ())

    def newest(self, count: int) -> list[str]:
        """Return the identities that were found last, the newest first."""
        return list(islice(reversed(self._names), count))

    def identities_after(self, identity: str) -> list[str]:
        """Return the sorted identities that follow one."""
        return sorted(each for each in self._names if each > identity)

    def identities(self, name: Named) -> list[str]:
        """Return all identities that a name has meant, the latest last."""
        return list(self._identities.get(name, ()))

    def latest(self, name: Named) -> str:
        """Return the identity that a name means, or "" if it was never resolved."""
        return next(reversed(self._identities.get(name, {})), "")

    def remove(self, identity: str, only: Named | None = None) -> None:
        """Remove an adapter with all of its names, or only one name of it."""
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

    def pin(self, identity: str, name: Named) -> None:
        """Record the name by which an adapter was pinned."""
        self._pins.setdefault(identity, set()).add(name)

    def unpin(self, identity: str) -> None:
        self._pins.pop(identity, None)

    def pinned_by(self, identity: str) -> Set[Named]:
        return self._pins.get(identity, frozenset())

    def set_error(self, name: Named, error: str) -> None:
        """Record why a name cannot be served, until it is resolved again."""
        self._errors[name] = error

    def error(self, name: Named | None) -> str | None:
        """Return the reason why a name could not be served the last time."""
        return None if name is None else self._errors.get(name)

    def failed_names(self) -> list[Named]:
        """Return the names that could not be served the last time."""
        return list(self._errors)

    # --- Eviction -----------------------------------------------------------------------------------------------------

    def _evict_adapter(self) -> None:
        """Remove the adapter that was found longest ago and is not pinned."""
        oldest = next((identity for identity in self._names if identity not in self._pins), None)
        if oldest is not None:
            self.remove(oldest)

    def _evict_name(self, identity: str) -> None:
        """Remove the oldest name that is neither the first, nor the latest, nor pinned."""
        names, pinned = self._names[identity], self._pins.get(identity, ())
        oldest = next((name for name in islice(names, 1, len(names) - 1) if name not in pinned), None)
        if oldest is not None:
            self.remove(identity, only=oldest)
