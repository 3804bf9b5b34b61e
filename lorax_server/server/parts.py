"""What a running server is made of."""

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field
from itertools import islice

from lorax_server.config import ServerConfig
from lorax_server.engine.adapters.entry import State
from lorax_server.engine.remote.client import EngineClient
from lorax_server.errors import AdapterAccessError, AdapterError, AdapterNotFoundError, SourceError
from lorax_server.server.access.keys import KeyRing
from lorax_server.server.access.model_names import ModelNames, Named
from lorax_server.server.access.rate_limits import RateLimits
from lorax_server.server.telemetry.metrics import Metrics
from lorax_server.server.telemetry.tracing import Tracer
from lorax_server.server.tokenizers import Tokenizers
from lorax_server.text.generation_defaults import GenerationDefaults
from lorax_server.types import AdapterRef

MAX_SEEN = 10_000
MAX_MERGES = 1000
MAX_PLACES = 16  # where one adapter was found: copies of a folder have the same content
MAX_FAILED = 1000
MAX_ASKED = 1000  # identities that the engine is asked about at once
MERGES = ""  # what stands for a source where several adapters are merged
IN_MEMORY = frozenset({State.PREPARING.value, State.HOST.value, State.LOADING.value, State.DEVICE.value})


class Seen:
    """The places where adapters were found, which the engine knows by their hash only; those that were found last.

    One place may have meant several, one after the other, and several places may mean the same. Those that are pinned
    are kept, since whoever unloads them names the place.
    """

    def __init__(self) -> None:
        self._names: OrderedDict[str, dict[Named, None]] = OrderedDict()  # by hash
        self._hashes: dict[Named, dict[str, None]] = {}  # by name, the latest last
        self._sorted: list[str] = []  # hashes
        self._merges: OrderedDict[str, None] = OrderedDict()  # hashes, of which the oldest are forgotten
        self._pins: dict[str, set[Named]] = {}  # by hash: the places by which it was pinned
        self._errors: OrderedDict[Named, str] = OrderedDict()  # of places whose files cannot be served now

    def note(self, identity: str, name: Named) -> None:
        if identity not in self._names:
            insort(self._sorted, identity)
        names = self._names.setdefault(identity, {})
        if name != next(iter(names), None):  # the first one keeps its place: the adapter is shown by it
            names.pop(name, None)
            names[name] = None
        self._names.move_to_end(identity)
        hashes = self._hashes.setdefault(name, {})
        hashes.pop(identity, None)
        hashes[identity] = None
        self._errors.pop(name, None)
        if len(names) > MAX_PLACES:
            pinned = self._pins.get(identity, ())
            oldest = next((each for each in islice(names, 1, len(names) - 1) if each not in pinned), None)
            if oldest is not None:  # as many as are pinned are kept: those an operator named
                self._forget_name(identity, oldest)
        if name.source == MERGES:
            self._merges[identity] = None
            self._merges.move_to_end(identity)
        if len(self._merges) > MAX_MERGES:
            self.forget(next(iter(self._merges)))
        if len(self._names) > MAX_SEEN:
            self._forget_oldest()

    def name(self, identity: str) -> Named | None:
        """The one that it was first found by."""
        return next(iter(self._names.get(identity, ())), None)

    def names(self, identity: str) -> Iterable[Named]:
        """Those that it was found by: the first one and the latest."""
        return self._names.get(identity, ())

    def after(self, identity: str) -> Iterator[str]:
        """The identities that come after one in their order."""
        for place in range(bisect_right(self._sorted, identity), len(self._sorted)):
            yield self._sorted[place]

    def identities(self, name: Named) -> list[str]:
        """All that a name has meant, the latest last."""
        return list(self._hashes.get(name, ()))

    def latest(self, name: Named) -> str:
        """The adapter that a name means; "" if it was never resolved."""
        return next(reversed(self._hashes.get(name, {})), "")

    def forget(self, identity: str) -> None:
        """Forget an adapter and all of its places."""
        for name in list(self._names[identity]):
            self._forget_name(identity, name)

    def forget_place(self, identity: str, name: Named) -> None:
        """Forget that a place has meant an adapter."""
        if name in self._names.get(identity, ()):
            self._forget_name(identity, name)

    # --- What holds an adapter, and what is wrong with a place --------------------------------------------------------

    def pin(self, identity: str, name: Named) -> None:
        """Note by which place an adapter was pinned."""
        self._pins.setdefault(identity, set()).add(name)

    def unpin(self, identity: str) -> None:
        """Note that an adapter is not pinned, by whichever place it was."""
        self._pins.pop(identity, None)

    def pinned_by(self, identity: str) -> Set[Named]:
        """The places by which an adapter was pinned."""
        return self._pins.get(identity, frozenset())

    def fail(self, name: Named, error: str) -> None:
        """Note why a place cannot be served, until it can."""
        self._errors[name] = error
        self._errors.move_to_end(name)
        if len(self._errors) > MAX_FAILED:
            self._errors.popitem(last=False)

    def error(self, name: Named | None) -> str | None:
        """The reason why a place could not be served when it was named last."""
        return None if name is None else self._errors.get(name)

    def _forget_oldest(self) -> None:
        """Of those that are not pinned, the one that was found longest ago."""
        for _ in range(len(self._names)):
            identity = next(iter(self._names))
            if identity not in self._pins:
                self.forget(identity)
                return
            self._names.move_to_end(identity)

    def _forget_name(self, identity: str, name: Named) -> None:
        names, hashes = self._names[identity], self._hashes[name]
        del names[name], hashes[identity]
        if not hashes:
            del self._hashes[name]
        if not names:
            del self._names[identity], self._sorted[bisect_left(self._sorted, identity)]
            self._merges.pop(identity, None)
            self._pins.pop(identity, None)


@dataclass(frozen=True)
class Parts:
    config: ServerConfig
    engine: EngineClient
    keys: KeyRing
    model_names: ModelNames
    rate_limits: RateLimits
    tokenizers: Tokenizers
    defaults: GenerationDefaults
    metrics: Metrics
    tracer: Tracer
    max_total_tokens: int
    max_input_length: int
    seen: Seen = field(default_factory=Seen)

    async def forget_unloaded(self, place: Named) -> None:
        """Forget what a place has meant and what is in memory no longer, be it that the place is gone."""
        identities = self.seen.identities(place)[-MAX_ASKED:]
        if identities:
            states = await self.engine.list_adapters(identities)
            in_memory = {state.identity for state in states if state.state in IN_MEMORY}
            for identity in identities:
                if identity not in in_memory:
                    self.seen.forget_place(identity, place)

    def note_failure(self, ref: AdapterRef, error: AdapterError) -> None:
        """Note that an adapter cannot be served, so that lists tell. What a caller's token was shown is not for all,
        and a source that is down says nothing about an adapter."""
        is_for_all = ref.token is None and not isinstance(error, AdapterAccessError | SourceError)
        if is_for_all and not isinstance(error, AdapterNotFoundError):
            self.seen.fail(Named(ref.source, ref.name), str(error))
