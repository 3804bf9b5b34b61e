"""What a running server is made of."""

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from lorax_server.config import ServerConfig
from lorax_server.engine.client import EngineClient
from lorax_server.generation_defaults import GenerationDefaults
from lorax_server.server.gate import Gate
from lorax_server.server.keys import KeyRing
from lorax_server.server.metrics import Metrics
from lorax_server.server.names import Named, Names
from lorax_server.server.tokenizers import Tokenizers
from lorax_server.server.tracing import Tracer

MAX_SEEN = 10_000
MAX_SPELLINGS = 16  # names of one adapter, of which a folder's has any number: `poet`, `./poet`, `poet/.`


class Seen:
    """Which names adapters were found by, whom the engine knows by their hash only; those that were found last.

    One name may have meant several, one after the other, and several names may mean the same.
    """

    def __init__(self) -> None:
        self._names: OrderedDict[str, dict[Named, None]] = OrderedDict()  # by hash
        self._hashes: dict[Named, dict[str, None]] = {}  # by name, the latest last
        self._sorted: list[str] = []  # hashes

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
        if len(names) > MAX_SPELLINGS:
            self._forget_name(identity, next(islice(names, 1, None)))
        if len(self._names) > MAX_SEEN:
            self._forget()

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

    def is_meant_by_others(self, identity: str, name: Named) -> bool:
        """Whether another name means it now."""
        others = (other for other in self._names.get(identity, ()) if other != name)
        return any(self.identities(other)[-1] == identity for other in others)

    def _forget(self) -> None:
        identity = next(iter(self._names))
        for name in list(self._names[identity]):
            self._forget_name(identity, name)
        del self._names[identity]
        del self._sorted[bisect_left(self._sorted, identity)]

    def _forget_name(self, identity: str, name: Named) -> None:
        del self._names[identity][name]
        del self._hashes[name][identity]
        if not self._hashes[name]:
            del self._hashes[name]


@dataclass(frozen=True)
class Parts:
    config: ServerConfig
    engine: EngineClient
    keys: KeyRing
    names: Names
    gate: Gate
    tokenizers: Tokenizers
    defaults: GenerationDefaults
    metrics: Metrics
    tracer: Tracer
    max_total_tokens: int
    max_input_length: int
    seen: Seen = field(default_factory=Seen)
