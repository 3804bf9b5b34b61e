"""The record for a generation request. When the request finishes, the server logs, counts and traces the record."""

from dataclasses import dataclass, field


@dataclass
class RequestRecord:
    """A request's parameters, outcome and durations in seconds. Stages that never started stay None or 0."""

    request_id: str
    route: str  # the path, for example "/generate"
    key: str = ""  # name of the API key, or "" without one
    adapter_id: str | None = None  # as requested; merged adapters are joined by ","; "" is the base model
    has_several_adapters: bool = False  # one prompt was sent to several adapters
    is_known_adapter: bool = False  # the name was known before the request, so it may become a metrics label
    source: str = ""  # adapter source
    identity: str = ""  # adapter identity
    is_streamed: bool = False
    num_choices: int = 1
    status: int = 200  # HTTP status; 0 if the client disconnected first; stream errors set only `error_type`
    error_type: str = ""  # as in the response body ("validation", "overloaded", ...), "" on success
    error: str = ""
    is_dropped: bool = False  # the client disconnected
    finish_reasons: list[str] = field(default_factory=list)  # "length", "eos_token" or "stop_sequence" per choice
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    generated_tokens: int = 0
    drafted_tokens: int = 0  # draft tokens that were verified
    skipped_tokens: int = 0  # generated tokens that were accepted from a draft, so they needed no additional step
    max_new_tokens: int = 0
    total_s: float = 0.0
    validation_s: float = 0.0  # until submission to the engine; includes adapter resolution and tokenization
    adapter_s: float = 0.0  # time waiting for the adapter to be loaded to the device
    queue_s: float = 0.0  # from submission to the first step; includes adapter_s
    first_token_s: float | None = None  # from the first step to the first token
    inference_s: float = 0.0  # from the first step to the end
    prompt: str | None = None  # only with --log-prompts
    text: str | None = None
    trace_parent: str | None = None  # W3C `traceparent` header
    started_at: float = 0.0  # Unix time
    address: str = ""  # client or proxy address, for the audit log
