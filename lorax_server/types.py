"""Requests, outputs and engine state, shared by the server, `LLM` and the engine."""

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
MAX_FLOAT = 3.4028234663852886e38  # largest float32, because models compute in float32
MAX_LOGIT_BIAS = 1e6  # larger than any logit, and far from overflow
REPETITION_PENALTY_RANGE = (1e-3, 1e3)
MERGE_STRATEGIES = ("linear", "ties", "dare_linear", "dare_ties")
SIGN_METHODS = ("total", "frequency")
MAX_MERGE_WEIGHT = 1000.0  # larger than is useful, and far from overflow


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters. The defaults select the most likely token (greedy)."""

    do_sample: bool = False
    temperature: float = 1.0  # 0 selects greedy decoding
    top_k: int = 0  # 0 disables top-k
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0  # applies to tokens in the prompt and completion
    frequency_penalty: float = 0.0  # applies to completion tokens, per occurrence
    presence_penalty: float = 0.0  # applies to completion tokens, once per token
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    watermark: bool = False
    seed: int = 0
    num_alternatives: int = 0  # number of most likely tokens to report for each position
    raw_logprobs: bool = False  # report log probabilities of the unmodified logits

    def __post_init__(self) -> None:
        if type(self.temperature) is float and self.temperature > MAX_FLOAT:
            raise InputError(f"`temperature` must be <= {MAX_FLOAT:g} (got {self.temperature})")
        _check(_is_finite(self.temperature) and self.temperature >= 0, "`temperature` must be non-negative")
        _check(_is_non_negative_int(self.top_k), "`top_k` must be strictly positive")
        _check(_is_finite(self.top_p) and 0 < self.top_p <= 1, "`top_p` must be > 0.0 and <= 1.0")
        _check(_is_finite(self.min_p) and 0 <= self.min_p <= 1, "`min_p` must be >= 0.0 and <= 1.0")
        _check(_is_finite(self.typical_p) and 0 < self.typical_p <= 1, "`typical_p` must be > 0.0 and <= 1.0")
        penalty = self.repetition_penalty
        _check(_is_finite(penalty) and penalty > 0, "`repetition_penalty` must be strictly positive")
        lowest, highest = REPETITION_PENALTY_RANGE
        _check(lowest <= penalty <= highest, f"`repetition_penalty` must be >= {lowest:g} and <= {highest:g}")
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            _check(_is_finite(value) and -2 <= value <= 2, f"`{name}` must be >= -2.0 and <= 2.0")
        _check(isinstance(self.logit_bias, Mapping), "`logit_bias` must be a mapping from token IDs to numbers")
        for token_id, bias in self.logit_bias.items():
            _check(_is_non_negative_int(token_id), f"`logit_bias` must be keyed by token IDs, not {token_id!r}")
            _check(
                _is_finite(bias) and abs(bias) <= MAX_LOGIT_BIAS,
                f"`logit_bias` of token {token_id} must be a number >= {-MAX_LOGIT_BIAS:g} and <= {MAX_LOGIT_BIAS:g}",
            )
        _check(_is_non_negative_int(self.seed) and self.seed <= MAX_SEED, "`seed` must be >= 0 and < 2**64")
        _check(_is_non_negative_int(self.num_alternatives), "`return_k_alternatives` must be strictly positive")
        for name in ("do_sample", "watermark", "raw_logprobs"):
            _check(isinstance(getattr(self, name), bool), f"`{name}` must be true or false")

    @property
    def is_greedy(self) -> bool:
        return not self.do_sample or self.temperature == 0


@dataclass(frozen=True)
class StopParams:
    """Stop conditions, and the handling of stop strings in the text."""

    max_new_tokens: int = 20
    min_new_tokens: int = 0  # ignore EOS, stop tokens and stop strings before this many tokens
    eos_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    include_stop: bool = True  # keep the stop string or token in the text

    def __post_init__(self) -> None:
        _check(
            _is_non_negative_int(self.max_new_tokens) and self.max_new_tokens > 0,
            "`max_new_tokens` must be strictly positive",
        )
        _check(_is_non_negative_int(self.min_new_tokens), "`min_new_tokens` must be non-negative")
        _check(
            self.min_new_tokens <= self.max_new_tokens,
            f"`min_new_tokens` ({self.min_new_tokens}) must be <= `max_new_tokens` ({self.max_new_tokens})",
        )
        for name in ("eos_token_ids", "stop_token_ids"):
            _check(_are_non_negative_ints(getattr(self, name)), f"`{name}` must be a set of token ids")
        _check(_are_strings(self.stop_strings), "`stop` must be a list of strings")
        _check(all(self.stop_strings), "`stop` must not contain empty strings")
        for name in ("ignore_eos", "include_stop"):
            _check(isinstance(getattr(self, name), bool), f"`{name}` must be true or false")

    @property
    def all_stop_token_ids(self) -> frozenset[int]:
        """The stop token IDs, including EOS unless EOS is ignored."""
        return self.stop_token_ids if self.ignore_eos else self.stop_token_ids | self.eos_token_ids


@dataclass(frozen=True)
class Structure:
    """The grammar that a completion must match."""

    grammar: str  # in llguidance's Lark dialect
    num_bytes: int = 0  # memory for the compiled grammar, measured by the trial compile


class TokenTable(NamedTuple):
    """A vocabulary's tokens as bytes, for structured output."""

    digest: str
    lengths: bytes  # token lengths in bytes, as int32
    content: bytes  # concatenated bytes of all tokens
    special_ids: list[int]
    special_tokens: list[bytes]  # bytes of the special tokens


@dataclass(frozen=True)
class Request:
    """A request for one completion, as the engine receives it."""

    request_id: int
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    stop: StopParams
    adapter_identity: str = ""  # hash of the adapter; empty for the base model
    tenant: str = ""  # the unit of fairness
    salt: str = ""  # prompts share KV blocks only if their salts are equal
    prompt_logprobs: bool = False  # report log probabilities of the prompt tokens
    structure: Structure | None = None
    vocabulary: TokenTable | None = None  # set with `structure` if the adapter changes the vocabulary
    second_start: int = 0  # first token of the second text in a pair, for models with token types; 0 for one text
    speculation: bool = True  # verify draft tokens, and use the completion for later drafts


class FinishReason(IntEnum):
    """The reason why a completion stopped. The values match `generate.proto`."""

    LENGTH = 0
    EOS_TOKEN = 1
    STOP_SEQUENCE = 2


class Alternatives(NamedTuple):
    """The most likely tokens at one position, best first."""

    token_ids: list[int]
    logprobs: list[float]


class Failure(NamedTuple):
    """A `LoraxError` in serializable form."""

    kind: str  # class name in `errors`
    status: int
    message: str
    retry_after_s: float | None = None

    @classmethod
    def from_error(cls, error: LoraxError) -> "Failure":
        return cls(type(error).__name__, error.status, str(error), error.retry_after_s)

    def to_error(self) -> LoraxError:
        """Return the error, with its original class."""
        kind = getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, LoraxError)):
            kind = LoraxError
        error: LoraxError = kind(self.message, self.retry_after_s)
        error.status = self.status
        return error


class StartInfo(NamedTuple):
    """Waiting times and cache hits before a request's first step."""

    queue_s: float  # total queueing time, including `adapter_s`
    adapter_s: float  # time spent waiting until the adapter was on the device
    cached_tokens: int  # prompt tokens found in the prefix cache


class SampledToken(NamedTuple):
    """A sampled or forced token."""

    token_id: int
    logprob: float
    alternatives: Alternatives | None = None  # set if the request asks for alternatives


class Pooled(NamedTuple):
    """A pooled result: an embedding, or logits of a sequence or of its tokens."""

    data: bytes  # float32
    shape: tuple[int, ...]


class Output(NamedTuple):
    """A step's result for one request: new tokens, or a failure."""

    request_id: int
    tokens: tuple[SampledToken, ...] = ()  # empty for a failure; several tokens if tokens are forced
    finish_reason: FinishReason | None = None  # set with the last token
    failure: Failure | None = None
    start_info: StartInfo | None = None  # set with the first token, like the next two fields
    prompt_logprobs: list[float] | None = None  # from the second prompt token on
    prompt_alternatives: list[Alternatives] | None = None  # at the same positions
    pooled: Pooled | None = None  # the whole result of a model without text generation
    num_drafted: int = 0  # draft tokens that the step verified
    num_accepted: int = 0  # draft tokens that were right; the first tokens are these, and one more

    @classmethod
    def failed(cls, request_id: int, error: LoraxError) -> "Output":
        return cls(request_id, failure=Failure.from_error(error))


class AdapterRef(NamedTuple):
    """An adapter as a request names it, with its source, name and access token."""

    source: str
    name: str
    token: str | None = None  # the caller's access token for the source


MAX_MERGED_ADAPTERS = 32  # per merge


@dataclass(frozen=True)
class Merge:
    """A merge of several adapters, as specified in a request."""

    weights: tuple[float, ...]
    strategy: str = "linear"
    density: float = 1.0
    """Fraction of elements to keep. Ignored by `linear`."""
    majority_sign_method: str = "total"
    seed: int = 0
    """Random seed for the elements that `dare_linear` and `dare_ties` keep."""

    def __post_init__(self) -> None:
        if not self.weights or not all(math.isfinite(weight) for weight in self.weights):
            raise InputError(f"merge weights must be finite and not empty (got {self.weights})")
        if not all(abs(weight) <= MAX_MERGE_WEIGHT for weight in self.weights):
            raise InputError(
                f"merge weights must be >= {-MAX_MERGE_WEIGHT:g} and <= {MAX_MERGE_WEIGHT:g} "
                f"(got {', '.join(f'{weight:g}' for weight in self.weights)})"
            )
        if self.strategy not in MERGE_STRATEGIES:
            raise InputError(
                f"merge_strategy must be one of {', '.join(MERGE_STRATEGIES)} (got {self.strategy[:64]!r})"
            )
        if self.majority_sign_method not in SIGN_METHODS:
            raise InputError(
                f"majority_sign_method must be one of {', '.join(SIGN_METHODS)} "
                f"(got {self.majority_sign_method[:64]!r})"
            )
        if self.strategy != "linear" and not 0 < self.density <= 1:
            raise InputError(f"density must be > 0 and <= 1 (got {self.density})")
        _check(_is_non_negative_int(self.seed) and self.seed <= MAX_SEED, "`seed` must be >= 0 and < 2**64")

    def identity(self, identities: Sequence[str]) -> str:
        """Return the identity of the merged adapter, given the identities of its adapters."""
        return hashlib.sha256(json.dumps(["lorax merge", 1, list(identities), astuple(self)]).encode()).hexdigest()


@dataclass(frozen=True)
class EngineInfo:
    """Constant properties of an engine."""

    max_length: int  # maximum tokens per sequence
    vocab_size: int
    num_blocks: int
    block_size: int
    dtype: str
    device: str  # device type, for example cuda
    weight_format: str = ""  # how the weights are stored, such as bfloat16 or Q4_K; empty if unknown
    weight_bytes: int = 0  # on rank 0
    task: str = "generate"


@dataclass
class SchedulerCounters:
    """Cumulative scheduler counters."""

    steps: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    base_prefix_tokens: int = 0  # tokens found in the prefix cache, computed without an adapter
    adapter_prefix_tokens: int = 0  # tokens found in the prefix cache, computed with an adapter
    chunks: int = 0  # prefill chunks that did not complete a prompt
    preemptions: int = 0  # preemptions because of too few free KV blocks
    fairness_preemptions: int = 0  # preemptions for tenants below their share
    rejected: int = 0  # requests rejected because of overload
    drafted_tokens: int = 0  # draft tokens that were verified
    accepted_tokens: int = 0  # draft tokens that were equal to the sampled tokens

    @property
    def prefix_tokens(self) -> int:
        """The number of tokens found in the prefix cache."""
        return self.base_prefix_tokens + self.adapter_prefix_tokens


@dataclass
class AdapterCounters:
    """Cumulative adapter counters."""

    adapters_prepared: int = 0
    adapters_loaded: int = 0
    adapters_failed: int = 0
    adapters_evicted_from_host: int = 0
    adapters_evicted_from_device: int = 0
    adapter_moves: int = 0


@dataclass(kw_only=True)
class EngineStatus(SchedulerCounters, AdapterCounters):
    """Current engine state and cumulative counters."""

    running: int
    waiting: int
    waiting_for_adapters: int
    free_blocks: int
    num_blocks: int
    cache_evictions: int  # evicted blocks in the prefix cache
    adapters_fetching: int
    adapters_preparing: int
    adapters_on_host: int
    adapters_on_device: int
    expert_imbalance: float = 0.0  # tokens of the most used expert / mean over experts; 0 if not measured
    idle_s: float = 0.0  # total idle time of the engine process


class AdapterStage(Enum):
    """An adapter's loading stages. The values appear in API responses."""

    DISK = "on disk"
    PREPARING = "being prepared"
    HOST = "in host memory"
    LOADING = "being loaded"
    DEVICE = "on the device"
    FAILED = "failed"


class AdapterState(NamedTuple):
    """An adapter's state in an engine."""

    identity: str
    name: str
    state: str
    num_bytes: int  # host memory size, or an estimate if the adapter is not in memory
    is_pinned: bool
    num_requests: int  # waiting and running requests
    num_uses: int  # all requests so far
    error: str | None = None


class ResolvedAdapter(NamedTuple):
    """The result of resolving an adapter name: the adapter identity and its tokenizer files."""

    identity: str
    folder: str | None = None  # folder with the tokenizer files
    tokenizer_files: tuple[str, ...] = ()
    tier: str = ""  # weight location at resolution: device, host, disk or fetched
    tokenizer_stamps: tuple[tuple[int, ...], ...] = ()  # inode, size and timestamps when the files were checked
    stale: Failure | None = None  # error of the new version, if the previous version is served
    base_model_name: str | None = None  # the base model that the adapter's config names


def _check(is_valid: bool, message: str) -> None:
    if not is_valid:
        raise InputError(message)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_FLOAT


def _is_non_negative_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_non_negative_ints(values: object) -> bool:
    return isinstance(values, Set) and all(map(_is_non_negative_int, values))


def _are_strings(values: object) -> bool:
    """Return True if `values` is a list or tuple of strings, but not a single string."""
    return isinstance(values, tuple | list) and all(isinstance(value, str) for value in values)
