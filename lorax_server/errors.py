"""Errors that users cause or see, each with its HTTP status.

LoraxError                   500
├── ConfigError              500   a setting, or a field of a model's config, that cannot be honoured
│   └── UnsupportedModelError      a model that cannot be served, by its type or by its behaviour
├── WeightsError             500   a checkpoint that is missing, damaged or does not fit its config
├── AdapterError             424   an adapter that cannot be served; the message says which one and why
│   ├── AdapterNotFoundError 404   no adapter of this name
│   ├── AdapterAccessError   403   the caller's token may not read it
│   └── SourceError          503   a source of adapters that fails or cannot be reached; a retry may help
├── InputError               422   a request that the model cannot take
│   ├── TemplateError              messages that the chat template refuses, or a template that cannot be used
│   │   ├── MissingVariableError   a template that needs a variable which the request does not set
│   │   └── NoTemplateError        a model without a chat template
│   ├── ContextLengthError         a prompt that is too long, alone or with its answer
│   └── NotSupportedError          a feature that this server does not have yet
├── AuthenticationError      401   no API key, or an unknown one
├── ForbiddenError           403   a key without this permission
├── ConflictError            409   another operation is in the way; the message says which
├── DeadlineError            504   the request took longer than it, or the server, allows
├── OverloadedError          429   too many requests wait; the error says when to try again
├── BusyError                503   a resource is busy, starting or stopping; the error says when to try again
└── EngineError              500   the engine, or a rank of it, failed; it restarts by itself
"""


class LoraxError(Exception):
    """Base of every error that users see. Anything else that escapes is a bug of this server."""

    status = 500
    request_ids: tuple[int, ...] = ()  # the requests at fault, where several share a batch
    retry_after_s: float | None = None  # when a retry makes sense, if it does

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        # It may quote what is no text, such as a lone surrogate of a file; it has to be sent all the same.
        super().__init__(message.encode(errors="backslashreplace").decode())
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s

    def of(self, *request_ids: int) -> "LoraxError":
        """Return the same error, with the requests at fault in its message."""
        named = type(self)(f"request {', '.join(map(str, request_ids))}: {self}")
        named.request_ids = request_ids
        return named


class ConfigError(LoraxError):
    """A setting, or a field of a model's config, that cannot be honoured."""


class UnsupportedModelError(ConfigError):
    """A model of an unknown type, or one that does not behave as a server needs."""


class WeightsError(LoraxError):
    """A checkpoint that cannot be read, or whose tensors do not fit the model's config."""


class AdapterError(LoraxError):
    """An adapter that cannot be served."""

    status = 424


class AdapterNotFoundError(AdapterError):
    """No source has an adapter of this name."""

    status = 404


class AdapterAccessError(AdapterError):
    """The caller may not read this adapter."""

    status = 403


class SourceError(AdapterError):
    """A source of adapters that cannot be reached or fails; a retry may help."""

    status = 503


class InputError(LoraxError):
    """A request that the model cannot take."""

    status = 422


class ContextLengthError(InputError):
    """A prompt that does not fit, alone or together with its answer."""


class TemplateError(InputError):
    """Messages that cannot become a prompt."""


class MissingVariableError(TemplateError):
    """A chat template that needs a variable which the request does not set."""


class NoTemplateError(TemplateError):
    """A model without a chat template, whose adapter has none either."""


class NotSupportedError(InputError):
    """A feature that this server does not have yet."""


class AuthenticationError(LoraxError):
    """A caller without a valid key."""

    status = 401


class ForbiddenError(LoraxError):
    """A caller whose key lacks the permission."""

    status = 403


class ConflictError(LoraxError):
    """A request that conflicts with another operation, which the message names."""

    status = 409


class DeadlineError(LoraxError):
    """A request whose time is up."""

    status = 504


class OverloadedError(LoraxError):
    """More requests wait than the engine can serve in time."""

    status = 429


class BusyError(LoraxError):
    """A lack of something that a request needs now; the request is not to blame."""

    status = 503
    retry_after_s = 1.0


class EngineError(LoraxError):
    """The engine failed, and with it all that it was computing."""
