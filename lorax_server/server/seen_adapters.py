"""Names by which adapters were found, and what is known of them."""

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Set
from itertools import islice
from typing import NamedTuple

from cachetools import FIFOCache

from lorax_server.engine.adapters.entry import State
from lorax_server.errors import AdapterAccessError, AdapterError, AdapterNotFoundError, SourceError
from lorax_server.server.access.model_names import Named
from lorax_server.types import AdapterRef

MAX_SEEN = 10_000
MAX_MERGES = 1000
MAX_NAMES = 16  # of one adapter: copies of a folder have the same content
MAX_FAILED = 1000
MERGES = ""  # stands for the source of merged adapters
IN_MEMORY = frozenset({State.PREPARING.value, State.HOST.value, State.LOADING.value, State.DEVICE.value})


class SeenSnapshot(NamedTuple):
    """All that was seen, in an order that `SeenAdapters.restore` understands."""

    names: list[tuple[str, list[Named]]]  # by identity
    identities: list[tuple[Named, list[str]]]
    merges: list[str]
    pins: list[tuple[str, list[Named]]]
    errors: list[tuple[Named, str]]
    private: list[Named]


def blames_adapter(ref: AdapterRef, error: AdapterError) -> bool:
    """Tell whether an error says that an adapter cannot be served, for lists to tell.

    Errors that a caller's token has caused are not for others. A source that is down says nothing about an adapter.
    """
    return ref.token is None and not isinstance(error, AdapterAccessError | SourceError | AdapterNotFoundError)


class SeenAdapters:
    """Remembers the names of adapters, which the engine knows by identity only; the oldest are forgotten.

    A name may mean several adapters, one after the other, and several names may mean the same adapter. Pinned adapters
    are kept: an operator unloads them by name.
    """

    def __init__(self) -> None:
        self._names: OrderedDict[str, dict[Named, None]] = OrderedDict()  # by identity
        self._identities: dict[Named, dict[str, None]] = {}  # by name, the latest last
        self._sorted: list[str] = []  # identities
        self._merges: OrderedDict[str, None] = OrderedDict()  # identities
        self._pins: dict[str, set[Named]] = {}  # by identity: the names by which it was pinned
        self._errors: FIFOCache[Named, str] = FIFOCache(MAX_FAILED)  # of names whose files cannot be served now
        self._private: set[Named] = set()  # names that were only found with tokens of callers

    def note(self, identity: str, name: Named, needs_token: bool = False) -> None:
        """Note that a name means an adapter from now on. It is private if no caller has found it without a token."""
        if not needs_token:
            self._private.discard(name)
        elif name not in self._identities:
            self._private.add(name)
        if identity not in self._names:
            insort(self._sorted, identity)
        names = self._names.setdefault(identity, {})
        if name != next(iter(names), None):  # the first name stays first: the adapter is shown by it
            names.pop(name, None)
            names[name] = None
        self._names.move_to_end(identity)
        identities = self._identities.setdefault(name, {})
        identities.pop(identity, None)
        identities[identity] = None
        self._errors.pop(name, None)
        if len(names) > MAX_NAMES:
            self._forget_oldest_name(identity)
        if name.source == MERGES:
            self._merges[identity] = None
            self._merges.move_to_end(identity)
        if len(self._merges) > MAX_MERGES:
            self.forget(next(iter(self._merges)))
        if len(self._names) > MAX_SEEN:
            self._forget_oldest()

    def knows(self, identity: str, name: Named, needs_token: bool = False) -> bool:
        """Tell whether to note this again would tell nothing new."""
        is_same = self.latest(name) == identity and (needs_token or name not in self._private)
        return is_same and name in self.names(identity) and name not in self._errors

    def is_private(self, name: Named) -> bool:
        """Return True if the adapter source gave this adapter only to callers with a token."""
        return name in self._private

    def first_name(self, identity: str) -> Named | None:
        return next(iter(self._names.get(identity, ())), None)

    def names(self, identity: str) -> Iterable[Named]:
        """Return the first name of an adapter and its latest ones."""
        return self._names.get(identity, ())

    def newest(self, count: int) -> list[str]:
        """List the adapters that were found last, the newest first."""
        return list(islice(reversed(self._names), count))

    def identities_after(self, identity: str) -> Iterator[str]:
        """Iterate over the identities behind one in their order."""
        for index in range(bisect_right(self._sorted, identity), len(self._sorted)):
            yield self._sorted[index]

    def identities(self, name: Named) -> list[str]:
        """List all that a name has meant, the latest last."""
        return list(self._identities.get(name, ()))

    def latest(self, name: Named) -> str:
        """Return the identity that a name means; "" if it was never resolved."""
        return next(reversed(self._identities.get(name, {})), "")

    def forget(self, identity: str) -> None:
        """Forget an adapter and all of its names, if it is known."""
        for name in list(self._names.get(identity, ())):
            self._forget_name(identity, name)

    def forget_name(self, identity: str, name: Named) -> None:
        """Forget that a name has meant an adapter."""
        if name in self._names.get(identity, ()):
            self._forget_name(identity, name)

    # --- Pins and errors ----------------------------------------------------------------------------------------------

    def pin(self, identity: str, name: Named) -> None:
        """Note the name by which an adapter was pinned."""
        self._pins.setdefault(identity, set()).add(name)

    def unpin(self, identity: str) -> None:
        """Note that an adapter is pinned by no name."""
        self._pins.pop(identity, None)

    def pinned_by(self, identity: str) -> Set[Named]:
        return self._pins.get(identity, frozenset())

    def set_error(self, name: Named, error: str) -> None:
        """Note why a name cannot be served, until it can."""
        self._errors[name] = error

    def error(self, name: Named | None) -> str | None:
        """Return the reason why a name could not be served the last time."""
        return None if name is None else self._errors.get(name)

    def failed_names(self) -> list[Named]:
        """List the names that could not be served the last time."""
        return list(self._errors)

    # --- Copies in other processes ------------------------------------------------------------------------------------

    def snapshot(self) -> SeenSnapshot:
        return SeenSnapshot(
            [(identity, list(names)) for identity, names in self._names.items()],
            [(name, list(identities)) for name, identities in self._identities.items()],
            list(self._merges),
            [(identity, list(names)) for identity, names in self._pins.items()],
            list(self._errors.items()),
            list(self._private),
        )

    def restore(self, snapshot: SeenSnapshot) -> None:
        """Become a copy of the adapters that another process has seen."""
        self._names = OrderedDict((identity, dict.fromkeys(names)) for identity, names in snapshot.names)
        self._identities = {name: dict.fromkeys(identities) for name, identities in snapshot.identities}
        self._sorted = sorted(self._names)
        self._merges = OrderedDict.fromkeys(snapshot.merges)
        self._pins = {identity: set(names) for identity, names in snapshot.pins}
        self._errors = FIFOCache(MAX_FAILED)
        self._errors.update(snapshot.errors)
        self._private = set(snapshot.private)

    # --- Forgetting ---------------------------------------------------------------------------------------------------

    def _forget_oldest(self) -> None:
        """Forget the adapter that was found longest ago and is not pinned."""
        for _ in range(len(self._names)):
            identity = next(iter(self._names))
            if identity not in self._pins:
                self.forget(identity)
                return
            self._names.move_to_end(identity)

    def _forget_oldest_name(self, identity: str) -> None:
        """Forget a name that is neither the first, nor the latest, nor pinned, if there is one."""
        names, pinned = self._names[identity], self._pins.get(identity, ())
        oldest = next((name for name in islice(names, 1, len(names) - 1) if name not in pinned), None)
        if oldest is not None:
            self._forget_name(identity, oldest)

    def _forget_name(self, identity: str, name: Named) -> None:
        names, identities = self._names[identity], self._identities[name]
        del names[name], identities[identity]
        if not identities:
            del self._identities[name]
            self._private.discard(name)
        if not names:
            del self._names[identity], self._sorted[bisect_left(self._sorted, identity)]
            self._merges.pop(identity, None)
            self._pins.pop(identity, None)
