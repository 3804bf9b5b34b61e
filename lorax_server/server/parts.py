"""What a running server is made of."""

from collections import OrderedDict
from dataclasses import dataclass, field

from lorax_server.config import ServerConfig
from lorax_server.engine.client import EngineClient
from lorax_server.server.gate import Gate
from lorax_server.server.keys import KeyRing
from lorax_server.server.metrics import Metrics
from lorax_server.server.names import Named, Names
from lorax_server.server.tokenizers import Tokenizers
from lorax_server.server.tracing import Tracer
from lorax_server.tokenizer import GenerationDefaults

MAX_SEEN = 10_000


class Seen:
    """Where adapters came from whom the engine knows by their hash only; those that were found last."""

    def __init__(self) -> None:
        self._places: OrderedDict[str, Named] = OrderedDict()

    def note(self, identity: str, place: Named) -> None:
        self._places[identity] = place
        self._places.move_to_end(identity)
        if len(self._places) > MAX_SEEN:
            self._places.popitem(last=False)

    def place(self, identity: str) -> Named | None:
        return self._places.get(identity)

    def identities(self, place: Named) -> list[str]:
        """All that a name has meant."""
        return [identity for identity, seen in self._places.items() if seen == place]


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
