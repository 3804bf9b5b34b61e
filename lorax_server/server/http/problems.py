"""What went wrong, as it is told: a status, headers, and a body as LoRAX's or OpenAI's clients expect it."""

import math
import re
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec
from starlette.responses import Response

from lorax_server.errors import (
    AdapterAccessError,
    AdapterError,
    AdapterNotFoundError,
    AuthenticationError,
    BusyError,
    ContextLengthError,
    DeadlineError,
    EngineError,
    ForbiddenError,
    InputError,
    LoraxError,
    MissingVariableError,
    NoTemplateError,
    NotSupportedError,
    OverloadedError,
    TemplateError,
)

RETRIED = (424, 429, 500, 503)  # where trying again may help
OPENAI_PREFIX = "/v1/"
OVERLOADED = "Model is overloaded"  # how LoRAX begins what it says of that
NO_PROMPT = "Failed applying chat template to {}: "
FAILED = "Request failed during generation: Server error: "
HTTP_TYPES = {
    400: "validation",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    413: "validation",
    415: "validation",
    422: "validation",
    431: "validation",
    503: "healthcheck",
}
HTTP_CODES = {404: "unknown_url"}
# What OpenAI's routes call the fields that are named, in LoRAX's words, by what refuses a request of either.
CHAT_FIELDS = {
    "inputs": "messages",
    "adapters": "merged_adapters",
    "max_new_tokens": "max_completion_tokens",
    "min_new_tokens": "min_tokens",
    "return_k_alternatives": "top_logprobs",
    "best_of": "n",
    "decoder_input_details": "logprobs",
}
COMPLETION_FIELDS = CHAT_FIELDS | {
    "inputs": "prompt",
    "max_new_tokens": "max_tokens",
    "return_k_alternatives": "logprobs",
    "best_of": "best_of",
    "decoder_input_details": "echo",
}
FIELDS = {"/v1/chat/completions": CHAT_FIELDS, "/v1/completions": COMPLETION_FIELDS}
FIELD = re.compile(r"`(\w+)`")
PARAM = re.compile(r"`([\w.\[\]]+)`")  # the first of a message is what it is about
OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class Problem(NamedTuple):
    """An error on its way out."""

    status: int
    error_type: str  # LoRAX's word for it, which also metrics and logs use
    message: str
    code: str | None = None  # OpenAI's
    retry_after_s: float | None = None
    headers: dict[str, str] = {}  # noqa: RUF012 - never changed
    param: str | None = None  # the field that is wrong, for OpenAI's clients

    def body(self, path: str) -> dict[str, Any]:
        if not path.startswith(OPENAI_PREFIX):
            return {"error": self.message, "error_type": self.error_type}
        kind = OPENAI_TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, path: str) -> Response:
        headers = dict(self.headers)
        if self.retry_after_s is not None and self.status in RETRIED:
            headers["retry-after"] = str(max(1, math.ceil(min(self.retry_after_s, 3600))))
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["www-authenticate"] = "Bearer"
        return json_response(self.body(path), self.status, headers)


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Numbers that JSON cannot write become null."""
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def http_problem(status: int, message: str = "", headers: dict[str, str] | None = None) -> Problem:
    """Something that no route was asked to do."""
    kind, code = HTTP_TYPES.get(status, "validation"), HTTP_CODES.get(status)
    return Problem(status, kind, message or HTTPStatus(status).phrase, code, None, headers or {})


def wrong_field(path: str, param: str, message: str, code: str) -> Problem:
    """A field whose form is wrong."""
    if not path.startswith(OPENAI_PREFIX):
        return Problem(422, "validation", f"Input validation error: {param or 'body'}: {message}")
    return Problem(400, "validation", f"{param or 'body'}: {message}", code, param=param or None)


def describe(error: BaseException, path: str) -> Problem:
    """An error of a route."""
    if not isinstance(error, LoraxError):
        return Problem(500, "internal", "Internal server error")
    is_native = not path.startswith(OPENAI_PREFIX)
    problem = _describe(error, is_native)
    # What a template says is its own, and what is not supported is named as the route's callers know it.
    is_ours = isinstance(error, InputError) and not isinstance(error, TemplateError | NotSupportedError)
    message = _in_words_of(path, problem.message) if is_ours else problem.message
    problem = problem._replace(message=message, retry_after_s=error.retry_after_s)
    return problem if is_native else _for_openai(error, problem)


def _for_openai(error: LoraxError, problem: Problem) -> Problem:
    """The same with what OpenAI's clients look at: 400 for whatever a caller got wrong, the field, and a code."""
    match error:
        case TemplateError():
            return problem._replace(status=400, param="messages")
        case AdapterError():
            return problem._replace(param="model")
        case InputError():
            found = PARAM.search(problem.message)
            return problem._replace(status=400, param=found and found[1], code=_input_code(error))
    return problem


def _input_code(error: InputError) -> str:
    match error:
        case ContextLengthError():
            return "context_length_exceeded"
        case NotSupportedError():
            return "unsupported_parameter"
    return "invalid_value"


def _in_words_of(path: str, message: str) -> str:
    """The same message with the fields that the route's callers know."""
    names = FIELDS.get(path)
    return message if names is None else FIELD.sub(lambda found: f"`{names.get(found[1], found[1])}`", message)


def _describe(error: LoraxError, is_native: bool) -> Problem:
    """LoRAX puts words before the reason, and has one status for all that is wrong with an adapter."""
    reason = str(error)
    failed = FAILED + reason if is_native else reason
    no_prompt = NO_PROMPT.format("inputs" if is_native else "messages")
    problem = Problem(error.status, "generation", failed)
    match error:
        case MissingVariableError():
            problem = Problem(422, "missing_template_variable", reason, "missing_template_variable")
        case NoTemplateError():
            problem = Problem(422, "no_chat_template", no_prompt + reason, "no_chat_template")
        case TemplateError():
            problem = Problem(422, "template_error", no_prompt + reason, "template_error")
        case InputError():
            problem = Problem(422, "validation", f"Input validation error: {reason}" if is_native else reason)
        case OverloadedError():
            message = f"{OVERLOADED}: {reason}" if is_native and reason != OVERLOADED else reason
            problem = Problem(429, "overloaded", message, "rate_limit_exceeded")
        case BusyError():
            problem = Problem(503, "overloaded", f"{OVERLOADED}: {reason}" if is_native else reason)
        case AdapterError():
            problem = Problem(424 if is_native else error.status, "generation", failed, _code(error))
        case EngineError():
            problem = Problem(500 if error.retry_after_s is None else 503, "generation", failed)
        case AuthenticationError():
            problem = Problem(401, "authentication", reason, "invalid_api_key")
        case ForbiddenError():
            problem = Problem(403, "permission", reason, "permission_denied")
        case DeadlineError():
            problem = Problem(504, "timeout", reason)
    return problem


def _code(error: AdapterError) -> str | None:
    match error:
        case AdapterNotFoundError():
            return "model_not_found"
        case AdapterAccessError():
            return "model_access_denied"
    return None
