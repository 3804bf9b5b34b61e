"""What can go wrong because of what a user gave us, each with the HTTP status it becomes.

LoraxError                   500
├── ConfigError              500   a setting, or a field of a model's config, that cannot be honoured
│   └── UnsupportedModelError      a model that cannot be served, by its type or by what it does
├── WeightsError             500   a checkpoint that is missing, damaged or does not fit its config
├── AdapterError             424   an adapter that cannot be served; the message says which, what and why
│   ├── AdapterNotFoundError 404   no adapter of this name
│   ├── AdapterAccessError   403   the caller's token may not read it
│   └── SourceError          503   where adapters come from cannot be reached or fails; trying again may help
├── InputError               422   a request the model cannot take
│   ├── TemplateError              messages that the chat template refuses, or a template that cannot be used
│   │   ├── MissingVariableError   a template that needs something which the request does not say
│   │   └── NoTemplateError        a model that has no chat template
│   ├── ContextLengthError         a prompt that is too long, alone or with what is to come
│   └── NotSupportedError          what this server cannot do yet, and would do wrong if it tried
├── AuthenticationError      401   no API key, or one that is not known
├── ForbiddenError           403   a key that may not do this
├── ConflictError            409   something else holds what was to be changed; the message says what
├── DeadlineError            504   it took longer than the request, or the server, allows
├── OverloadedError          429   too much is waiting already; the error says when to try again
├── BusyError                503   what a request needs is busy, starting or stopping; the error says when to try again
└── EngineError              500   the engine, or a rank of it, failed; it starts again by itself
"""


class LoraxError(Exception):
    """Base of every error that is shown to a user; anything else that escapes is a bug of ours."""

    status = 500
    request_ids: tuple[int, ...] = ()  # whose fault it is, where several requests were at stake
    retry_after_s: float | None = None  # when it makes sense to try again, if it does

    def of(self, *request_ids: int) -> "LoraxError":
        """The same error, of these requests."""
        named = type(self)(f"request {', '.join(map(str, request_ids))}: {self}")
        named.request_ids = request_ids
        return named


class ConfigError(LoraxError):
    """A setting or a field of a model's config that we cannot honour."""


class UnsupportedModelError(ConfigError):
    """A model whose type is not known, or that does not do what it would have to."""


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
    """A source that cannot be reached, or that failed in the middle; trying again may help."""

    status = 503


class InputError(LoraxError):
    """A request that the model cannot take."""

    status = 422


class ContextLengthError(InputError):
    """A prompt that does not fit, alone or together with the answer that is wanted."""


class TemplateError(InputError):
    """Messages that cannot be made into a prompt."""


class MissingVariableError(TemplateError):
    """A chat template that needs something which the request does not say."""


class NoTemplateError(TemplateError):
    """A model that has no chat template, nor has its adapter."""


class NotSupportedError(InputError):
    """Something that other servers can do and this one cannot yet."""


class AuthenticationError(LoraxError):
    """The caller is not known."""

    status = 401


class ForbiddenError(LoraxError):
    """The caller is known, and may not do this."""

    status = 403


class ConflictError(LoraxError):
    """A request that cannot be done now, because of something else that the message names."""

    status = 409


class DeadlineError(LoraxError):
    """A request that was not answered in the time it had."""

    status = 504


class OverloadedError(LoraxError):
    """More is waiting than can be served in time."""

    status = 429

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BusyError(LoraxError):
    """A lack of something that a request needs now; the request is not to blame."""

    status = 503

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineError(LoraxError):
    """The engine failed, and with it all that it was computing."""
