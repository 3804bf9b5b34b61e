"""Errors that users cause or see, with their HTTP status codes.

LoraxError                   500
├── ConfigError              500   an invalid or unsupported setting or model config field
│   └── UnsupportedModelError      an unsupported model type or behavior
├── WeightsError             500   a checkpoint that is missing, damaged or does not match its config
├── AdapterError             424   an adapter that cannot be served
│   ├── AdapterNotFoundError 404   no adapter with this name
│   ├── AdapterAccessError   403   the caller's token has no access to the adapter
│   └── SourceError          503   an adapter source that fails or is unreachable; retry later
├── InputError               422   an invalid request
│   ├── TemplateError              messages that the chat template rejects, or an invalid template
│   │   ├── MissingVariableError   a template variable that the request does not set
│   │   └── NoTemplateError        a model without a chat template
│   ├── ContextLengthError         a prompt that is too long, alone or with the requested completion
│   └── NotSupportedError          a feature that is not implemented
├── AuthenticationError      401   a missing or unknown API key
├── ForbiddenError           403   an API key without the required permission
├── ConflictError            409   a conflict with another operation
├── DeadlineError            504   the request timeout expired
├── OverloadedError          429   too many waiting requests; retry after `retry_after_s`
├── BusyError                503   a resource is busy, starting or stopping; retry after `retry_after_s`
└── EngineError              500   the engine or one of its ranks failed; it restarts automatically
"""


class LoraxError(Exception):
    """Base class of all errors that users see. Any other exception is a bug."""

    status = 500
    request_ids: tuple[int, ...] = ()  # the requests at fault, if several share a batch
    retry_after_s: float | None = None  # seconds until a retry may succeed

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        # The message may contain text that cannot be encoded, such as a lone surrogate from a file.
        super().__init__(message.encode(errors="backslashreplace").decode())
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s

    def for_requests(self, *request_ids: int) -> "LoraxError":
        """Return a copy of the error for these requests, with the request IDs in its message."""
        error = type(self)(f"request {', '.join(map(str, request_ids))}: {self}")
        error.request_ids = request_ids
        return error


class ConfigError(LoraxError):
    """An invalid or unsupported setting or model config field."""


class UnsupportedModelError(ConfigError):
    """An unsupported model type, or a model that behaves in an unsupported way."""


class WeightsError(LoraxError):
    """A checkpoint that cannot be read or does not match the model config."""


class AdapterError(LoraxError):
    """An adapter that cannot be served."""

    status = 424


class AdapterNotFoundError(AdapterError):
    """No source has an adapter with this name."""

    status = 404


class AdapterAccessError(AdapterError):
    """The caller has no access to this adapter."""

    status = 403


class SourceError(AdapterError):
    """An adapter source that fails or is unreachable. A retry may succeed."""

    status = 503


class InputError(LoraxError):
    """An invalid request."""

    status = 422


class ContextLengthError(InputError):
    """A prompt that is too long, alone or with the requested completion."""


class TemplateError(InputError):
    """Chat messages that cannot be rendered as a prompt."""


class MissingVariableError(TemplateError):
    """The chat template needs a variable that the request does not set."""


class NoTemplateError(TemplateError):
    """Neither the model nor the adapter has a chat template."""


class NotSupportedError(InputError):
    """The request needs a feature that is not implemented."""


class AuthenticationError(LoraxError):
    """The API key is missing or invalid."""

    status = 401


class ForbiddenError(LoraxError):
    """The API key lacks the required permission."""

    status = 403


class ConflictError(LoraxError):
    """A request that conflicts with another operation."""

    status = 409


class DeadlineError(LoraxError):
    """The request timeout expired."""

    status = 504


class OverloadedError(LoraxError):
    """Too many requests are waiting."""

    status = 429


class BusyError(LoraxError):
    """A required resource is temporarily unavailable."""

    status = 503
    retry_after_s = 1.0


class EngineError(LoraxError):
    """The engine failed, and all its requests fail with it."""
