"""What is known of one HTTP request for an answer when it has ended: what is logged, counted and traced."""

from dataclasses import dataclass, field


@dataclass
class RequestRecord:
    """Filled in as the request goes on. Times are seconds; what never came about stays None or 0."""

    request_id: str
    route: str  # the path as it is routed, such as "/generate"
    key: str = ""  # the name of the caller's key; "" where there are none
    adapter: str | None = None  # as the request names it; several are joined by ","; "" is the base model
    is_known: bool = False  # the server knew that name before, so that it may stand in a metric whatever happens
    source: str = ""  # where the adapter comes from
    adapter_hash: str = ""
    is_streamed: bool = False
    num_choices: int = 1
    status: int = 200  # of HTTP; what goes wrong within a stream is in `error_type` only
    error_type: str = ""  # as in the answer's body: "validation", "overloaded", ...; "" if all went well
    error: str = ""
    is_dropped: bool = False  # the client went away
    finish_reasons: list[str] = field(default_factory=list)  # "length", "eos_token" or "stop_sequence", by choice
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of them: whose keys and values were there already
    generated_tokens: int = 0
    max_new_tokens: int = 0
    total_s: float = 0.0
    validation_s: float = 0.0  # until it was handed to the engine; includes finding the adapter and making tokens
    adapter_s: float = 0.0  # it waited for its adapter's weights to be on the device
    queue_s: float = 0.0  # handed over until its first step; includes adapter_s
    first_token_s: float | None = None  # from its first step until its first token
    inference_s: float = 0.0  # from its first step to the end
    prompt: str | None = None  # only where the operator wants it in the log
    text: str | None = None
    trace_parent: str | None = None  # W3C `traceparent` of the request, if it had one
    started_at: float = 0.0  # time.time()
