"""The record of one HTTP request for an answer, which is logged, counted and traced when the request has ended."""

from dataclasses import dataclass, field


@dataclass
class RequestRecord:
    """Filled in as the request goes on. Times are seconds; those that never began stay None or 0."""

    request_id: str
    route: str  # the path as it is routed, such as "/generate"
    key: str = ""  # the name of the caller's key; "" if the server has no keys
    adapter_id: str | None = None  # as the request names it; several are joined by ","; "" is the base model
    is_known: bool = False  # the server knew the name before, so that it may be a label of metrics whatever happens
    source: str = ""  # of the adapter
    identity: str = ""  # of the adapter
    is_streamed: bool = False
    num_choices: int = 1
    status: int = 200  # of HTTP, 0 if the client left before it; an error within a stream is in `error_type` only
    error_type: str = ""  # as in the body: "validation", "overloaded", ...; "" if all went well
    error: str = ""
    is_dropped: bool = False  # the client left
    finish_reasons: list[str] = field(default_factory=list)  # "length", "eos_token" or "stop_sequence", by choice
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of these: found in the prefix cache
    generated_tokens: int = 0
    max_new_tokens: int = 0
    total_s: float = 0.0
    validation_s: float = 0.0  # until the engine has it; includes finding the adapter and tokenizing
    adapter_s: float = 0.0  # waiting for the adapter's weights to be on the device
    queue_s: float = 0.0  # from there until its first step; includes adapter_s
    first_token_s: float | None = None  # from its first step until its first token
    inference_s: float = 0.0  # from its first step to the end
    prompt: str | None = None  # only if the operator wants it in the log
    text: str | None = None
    trace_parent: str | None = None  # W3C `traceparent` of the request, if it had one
    started_at: float = 0.0  # time.time()
    address: str = ""  # of the client, or of the proxy before it, for the audit log
