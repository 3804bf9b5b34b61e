"""Requests, their outputs, and the state of an engine: the nouns between the server, or a script, and the engine."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import astuple, dataclass, field
from enum import Enum, IntEnum
from typing import NamedTuple

from lorax_server import errors
from lorax_server.errors import InputError, LoraxError

MAX_SEED = 2**64 - 1
MAX_FLOAT = 3.4028234663852886e38  # of 32 bits, in which models compute
MAX_BIAS = 1e6  # more than any score, and far from overflow
PENALTIES = (1e-3, 1e3)
MERGE_STRATEGIES = ("linear", "ties", "dare_linear", "dare_ties")
SIGN_METHODS = ("total", "frequency")
MAX_MERGE_WEIGHT = 1000.0  # of an adapter in a merge: more than is useful, and far from overflow


@dataclass(frozen=True)
class SamplingParams:
    """The rules by which the next token is chosen. The defaults choose the likeliest token."""

    do_sample: bool = False
    temperature: float = 1.0  # 0 is always greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0  # of tokens in the prompt and generated
    frequency_penalty: float = 0.0  # of generated tokens, by how often
    presence_penalty: float = 0.0  # of generated tokens, once
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    watermark: bool = False
    seed: int = 0
    num_alternatives: int = 0  # of the likeliest tokens to report beside the chosen one
    raw_logprobs: bool = False  # report log probabilities of the model, before the rules above

    def __post_init__(self) -> None:
        if type(self.temperature) is float and self.temperature > MAX_FLOAT:
            raise InputError(f"`temperature` must be <= {MAX_FLOAT:g} (got {self.temperature})")
        _check(_is_finite(self.temperature) and self.temperature >= 0, "`temperature` must be non-negative")
        _check(_is_count(self.top_k), "`top_k` must be strictly positive")
        _check(_is_finite(self.top_p) and 0 < self.top_p <= 1, "`top_p` must be > 0.0 and <= 1.0")
        _check(_is_finite(self.min_p) and 0 <= self.min_p <= 1, "`min_p` must be >= 0.0 and <= 1.0")
        _check(_is_finite(self.typical_p) and 0 < self.typical_p <= 1, "`typical_p` must be > 0.0 and <= 1.0")
        penalty = self.repetition_penalty
        _check(_is_finite(penalty) and penalty > 0, "`repetition_penalty` must be strictly positive")
        least, most = PENALTIES
        _check(least <= penalty <= most, f"`repetition_penalty` must be >= {least:g} and <= {most:g}")
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            _check(_is_finite(value) and -2 <= value <= 2, f"`{name}` must be >= -2.0 and <= 2.0")
        _check(isinstance(self.logit_bias, Mapping), "`logit_bias` must be a mapping from token ids to numbers")
        for token_id, bias in self.logit_bias.items():
            _check(_is_count(token_id), f"`logit_bias` must be keyed by token ids, not {token_id!r}")
            _check(
                _is_finite(bias) and abs(bias) <= MAX_BIAS,
                f"`logit_bias` of token {token_id} must be a number >= {-MAX_BIAS:g} and <= {MAX_BIAS:g}",
            )
        _check(_is_count(self.seed) and self.seed <= MAX_SEED, "`seed` must be >= 0 and < 2**64")
        _check(_is_count(self.num_alternatives), "`return_k_alternatives` must be strictly positive")
        for name in ("do_sample", "watermark", "raw_logprobs"):
            _check(isinstance(getattr(self, name), bool), f"`{name}` must be true or false")

    @property
    def is_greedy(self) -> bool:
        return not self.do_sample or self.temperature == 0


@dataclass(frozen=True)
class StopParams:
    """The rules by which a request ends, and which of its last text is shown."""

    max_new_tokens: int = 20
    min_new_tokens: int = 0  # no eos, stop token or stop string ends the request earlier
    eos_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    include_stop: bool = True  # cut the text after the stop string or token, not before it

    def __post_init__(self) -> None:
        _check(_is_count(self.max_new_tokens) and self.max_new_tokens > 0, "`max_new_tokens` must be strictly positive")
        _check(_is_count(self.min_new_tokens), "`min_new_tokens` must be non-negative")
        _check(
            self.min_new_tokens <= self.max_new_tokens,
            f"`min_new_tokens` ({self.min_new_tokens}) must be <= `max_new_tokens` ({self.max_new_tokens})",
        )
        for name in ("eos_token_ids", "stop_token_ids"):
            _check(_are_counts(getattr(self, name)), f"`{name}` must be a set of token ids")
        _check(_are_strings(self.stop_strings), "`stop` must be a list of strings")
        _check(all(self.stop_strings), "`stop` must not hold empty strings")
        for name in ("ignore_eos", "include_stop"):
            _check(isinstance(getattr(self, name), bool), f"`{name}` must be true or false")

    @property
    def ending_token_ids(self) -> frozenset[int]:
        """The tokens that end a request by themselves."""
        return self.stop_token_ids if self.ignore_eos else self.stop_token_ids | self.eos_token_ids


@dataclass(frozen=True)
class Structure:
    """The grammar that the text of a completion must match."""

    grammar: str  # in llguidance's dialect of Lark
    num_bytes: int = 0  # memory that the compiled grammar takes, as its trial has measured it


class TokenTable(NamedTuple):
    """The tokens of a vocabulary as bytes, for structured output."""

    digest: str
    lengths: bytes  # int32 for each token
    content: bytes  # the bytes of all tokens, one after the other
    special_ids: list[int]
    special_tokens: list[bytes]  # the bytes of these


@dataclass(frozen=True)
class Request:
    """A prompt, and what the caller wants of it. The identity of its adapter always means the same content."""

    request_id: int
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    stop: StopParams
    adapter_identity: str = ""  # the hash of its content; empty: the base model
    tenant: str = ""  # tenants share the engine fairly
    salt: str = ""  # prompts share keys and values only with prompts of the same salt
    prompt_logprobs: bool = False  # report how likely each token of the prompt was
    structure: Structure | None = None
    vocabulary: TokenTable | None = None  # with a structure, if the adapter has a vocabulary of its own


class FinishReason(IntEnum):
    """The reason why a request ended, numbered as in `generate.proto`."""

    LENGTH = 0
    EOS_TOKEN = 1
    STOP_SEQUENCE = 2


class Alternatives(NamedTuple):
    """The likeliest tokens at one position, best first."""

    token_ids: list[int]
    logprobs: list[float]


class Failure(NamedTuple):
    """An error on its way to the caller."""

    kind: str  # the name of its class in `errors`
    status: int
    message: str
    retry_after_s: float | None = None

    @classmethod
    def of(cls, error: LoraxError) -> "Failure":
        return cls(type(error).__name__, error.status, str(error), error.retry_after_s)

    def to_error(self) -> LoraxError:
        """Return an error of the same class as the one that this failure was made of."""
        kind = getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, LoraxError)):
            kind = LoraxError
        error: LoraxError = kind(self.message, self.retry_after_s)
        error.status = self.status
        return error


class Started(NamedTuple):
    """The way of a request to its first step."""

    queue_s: float  # time in queues, also for its adapter
    adapter_s: float  # of this: time until its adapter was on the device
    cached_tokens: int  # tokens of its prompt that were found in the cache


class SampledToken(NamedTuple):
    """A token that was chosen for a request."""

    token_id: int
    logprob: float
    alternatives: Alternatives | None = None  # the likeliest tokens in its place, if the request asks for them


class Output(NamedTuple):
    """The result of one step for one request: its next tokens, or the failure that ends it."""

    request_id: int
    tokens: tuple[SampledToken, ...] = ()  # none with a failure; several where a structure forces them
    finish_reason: FinishReason | None = None  # of the last token, if it ends the request
    failure: Failure | None = None
    started: Started | None = None  # with the first token, as are the next two
    prompt_logprobs: list[float] | None = None  # of the prompt's tokens from the second on
    prompt_alternatives: list[Alternatives] | None = None  # of the same tokens

    @classmethod
    def failed(cls, request_id: int, error: LoraxError) -> "Output":
        return cls(request_id, failure=Failure.of(error))


class AdapterRef(NamedTuple):
    """An adapter as a request names it."""

    source: str
    name: str
    token: str | None = None  # decides what the caller may read


MAX_MERGED = 32  # adapters in one merge


@dataclass(frozen=True)
class Merge:
    """A merge of adapters, as a request describes it."""

    weights: tuple[float, ...]
    strategy: str = "linear"
    density: float = 1.0
    """The share of numbers that is kept; `linear` ignores it."""
    majority_sign_method: str = "total"
    seed: int = 0
    """Chooses which numbers `dare_linear` and `dare_ties` keep."""

    def __post_init__(self) -> None:
        if not self.weights or not all(math.isfinite(weight) for weight in self.weights):
            raise InputError(f"merged adapters need at least one weight, all of them finite, not {self.weights}")
        if not all(abs(weight) <= MAX_MERGE_WEIGHT for weight in self.weights):
            raise InputError(
                f"weights of merged adapters are at least {-MAX_MERGE_WEIGHT:g} and at most {MAX_MERGE_WEIGHT:g}, "
                f"not {', '.join(f'{weight:g}' for weight in self.weights)}"
            )
        if self.strategy not in MERGE_STRATEGIES:
            raise InputError(f"merge_strategy is one of {', '.join(MERGE_STRATEGIES)}, not {self.strategy[:64]!r}")
        if self.majority_sign_method not in SIGN_METHODS:
            raise InputError(
                f"majority_sign_method is one of {', '.join(SIGN_METHODS)}, not {self.majority_sign_method[:64]!r}"
            )
        if self.strategy != "linear" and not 0 < self.density <= 1:
            raise InputError(f"density is above 0, where nothing would be kept, and at most 1, not {self.density}")
        _check(_is_count(self.seed) and self.seed <= MAX_SEED, "`seed` must be >= 0 and < 2**64")

    def identity(self, identities: Sequence[str]) -> str:
        """Return the identity of the merged adapter, from those of its parts."""
        return hashlib.sha256(json.dumps(["lorax merge", 1, list(identities), astuple(self)]).encode()).hexdigest()


@dataclass(frozen=True)
class EngineInfo:
    """Facts about an engine that stay the same while it runs."""

    max_length: int  # tokens of a sequence
    vocab_size: int
    num_blocks: int
    block_size: int
    dtype: str
    device: str  # without its number


@dataclass
class SchedulerCounters:
    """The work of a scheduler so far."""

    steps: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    prefix_tokens: int = 0  # found in the cache instead of computed
    chunks: int = 0  # parts of prompts, or of recomputed sequences, that did not fit into one step
    preemptions: int = 0  # for lack of blocks
    fairness_preemptions: int = 0  # for tenants or calls with less than their share
    refused: int = 0  # requests, because of overload


@dataclass
class AdapterCounters:
    """The movements of adapters so far."""

    adapters_prepared: int = 0
    adapters_loaded: int = 0
    adapters_failed: int = 0
    adapters_evicted_from_host: int = 0
    adapters_evicted_from_device: int = 0
    adapter_moves: int = 0


@dataclass(kw_only=True)
class EngineStatus(SchedulerCounters, AdapterCounters):
    """The present state of an engine, and its history in numbers."""

    running: int
    waiting: int
    waiting_for_adapters: int
    free_blocks: int
    num_blocks: int
    cache_evictions: int  # blocks, so far
    adapters_fetching: int
    adapters_preparing: int
    adapters_on_host: int
    adapters_on_device: int
    idle_s: float = 0.0  # spent waiting for work so far, by an engine with a process of its own


class AdapterStage(Enum):
    """The stages of an adapter on its way to the device. The values are shown to users."""

    DISK = "on disk"
    PREPARING = "being prepared"
    HOST = "in host memory"
    LOADING = "being loaded"
    DEVICE = "on the device"
    FAILED = "failed"


class AdapterState(NamedTuple):
    """The state of an adapter in an engine."""

    identity: str
    name: str
    state: str
    num_bytes: int  # in host memory, or as many as it would take there
    is_pinned: bool
    num_requests: int  # waiting or running
    num_uses: int  # requests so far
    error: str | None = None


class Resolved(NamedTuple):
    """The adapter that a name means now, and the files of its tokenizer."""

    identity: str
    folder: str | None = None  # of the tokenizer's files
    tokenizer_files: tuple[str, ...] = ()
    tier: str = ""  # of its weights when it was named: device, host, disk, or fetched from its source just now
    tokenizer_stamps: tuple[tuple[int, ...], ...] = ()  # of those files when their source checked them
    stale: Failure | None = None  # the error of the present adapter, if this is the previous one


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise InputError(message)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_FLOAT


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_counts(values: object) -> bool:
    return isinstance(values, Set) and all(map(_is_count, values))


def _are_strings(values: object) -> bool:
    """Accept lists and tuples: a single string is a sequence of strings too, but its characters are not meant."""
    return isinstance(values, tuple | list) and all(isinstance(value, str) for value in values)
