"""LoRAX's base classes and step results (see docs/seed-contract.md)."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lorax_server.generation.stopping import FinishReason

if TYPE_CHECKING:
    from lorax_server.pb import generate_pb2


def message_types() -> Any:
    """Return the module with protobuf message types. Imported lazily, because only some callers need protobuf."""
    from lorax_server.pb import generate_pb2  # noqa: PLC0415

    return generate_pb2


class Batch(ABC):
    """A batch of requests that run in the same steps."""

    @classmethod
    @abstractmethod
    def from_pb(cls, pb: "generate_pb2.Batch", *args: Any, **kwargs: Any) -> "Batch": ...

    @abstractmethod
    def to_pb(self) -> "generate_pb2.CachedBatch": ...

    @abstractmethod
    def filter(self, request_ids: list[int]) -> "Batch | None":
        """Keep only these requests, in this order."""

    @classmethod
    @abstractmethod
    def concatenate(cls, batches: Sequence[Any]) -> "Batch": ...

    @abstractmethod
    def __len__(self) -> int: ...


class Model(ABC):
    """A model that generates tokens for batches of requests."""

    @property
    @abstractmethod
    def batch_type(self) -> type[Batch]: ...

    @abstractmethod
    def generate_token(self, batch: Any) -> "tuple[list[Generation], Batch | None]":
        """Run one step. Return the new tokens and the batch for the next step, or None if all requests finished."""


class TokenizerManager:
    """Adapter-specific tokenizers, keyed by adapter index."""

    def __init__(self) -> None:
        self._tokenizers: dict[int, Any] = {}

    def add_tokenizer(self, adapter_index: int, tokenizer: Any) -> None:
        self._tokenizers[adapter_index] = tokenizer

    def get_tokenizer(self, adapter_index: int, default: Any) -> Any:
        return self._tokenizers.get(adapter_index, default)


@dataclass
class GeneratedText:
    """The completion of a finished request."""

    text: str
    generated_tokens: int
    skipped_tokens: int
    finish_reason: FinishReason
    seed: int | None  # None for greedy decoding

    def to_pb(self) -> Any:
        fields = {**vars(self), "finish_reason": int(self.finish_reason)}
        return message_types().GeneratedText(**fields)


@dataclass
class AlternativeTokens:
    """The most likely tokens at one position, in descending order."""

    token_ids: list[int]
    logprobs: list[float]
    texts: list[str]

    def to_pb(self) -> Any:
        return message_types().AlternativeTokens(ids=self.token_ids, logprobs=self.logprobs, texts=self.texts)


@dataclass
class NextTokens:
    """Generated or prompt tokens. The completion is the concatenated text of all non-special tokens."""

    token_ids: list[int]
    logprobs: list[float]
    texts: list[str]
    is_special: list[bool]
    alternative_tokens: list[AlternativeTokens] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.token_ids)

    def to_pb(self) -> Any:
        return message_types().NextTokens(
            ids=self.token_ids,
            logprobs=self.logprobs,
            texts=self.texts,
            is_special=self.is_special,
            alternative_tokens=[alternatives.to_pb() for alternatives in self.alternative_tokens],
        )


@dataclass
class Generation:
    """The result of one step for one request."""

    request_id: int
    prefill_tokens: NextTokens | None  # set in the first step, if requested
    prefill_tokens_length: int  # 0 after the first step
    next_tokens: NextTokens
    generated_text: GeneratedText | None  # set with the last token

    def to_pb(self) -> Any:
        return message_types().Generation(
            request_id=self.request_id,
            prefill_tokens=self.prefill_tokens and self.prefill_tokens.to_pb(),
            prefill_tokens_length=self.prefill_tokens_length,
            next_tokens=self.next_tokens.to_pb(),
            generated_text=self.generated_text and self.generated_text.to_pb(),
        )
