"""Errors as HTTP responses: a status, headers, and a body as LoRAX's or OpenAI's clients expect it."""

import math
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec
from starlette.responses import Response

from lorax_server import errors

RETRIED = (424, 429, 500, 503)  # where trying again may help
OPENAI_PREFIX = "/v1/"
OVERLOADED = "Model is overloaded"  # LoRAX's words for it
INVALID = "Input validation error: "
NO_PROMPT = "Failed applying chat template to {}: "
FAILED = "Request failed during generation: Server error: "
HTTP_TYPES = {404: "not_found", 405: "method_not_allowed", 408: "timeout", 503: "healthcheck"}  # else "validation"
# Names that OpenAI's routes have for fields. Errors of both kinds of routes are written with LoRAX's names.
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
RESPONSE_FIELDS = CHAT_FIELDS | {
    "inputs": "input",
    "messages": "input",
    "max_new_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}
FIELDS = {"/v1/responses": RESPONSE_FIELDS, "/v1/chat/completions": CHAT_FIELDS, "/v1/completions": COMPLETION_FIELDS}
FIELD = re.compile(r"`(\w+)`")
PARAM = re.compile(r"`([\w.\[\]]+)`")  # the first field that a message names is the one it is about
OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class Wording(NamedTuple):
    """The words of a kind of error."""

    error_type: str  # LoRAX's
    code: str | None = None  # OpenAI's
    prefix: str = ""  # of the message to LoRAX's clients


# Of several that an error is an instance of, the first counts.
WORDINGS: dict[type[errors.LoraxError], Wording] = {
    errors.MissingVariableError: Wording("missing_template_variable", "missing_template_variable"),
    errors.NoTemplateError: Wording("no_chat_template", "no_chat_template", NO_PROMPT),
    errors.TemplateError: Wording("template_error", "template_error", NO_PROMPT),
    errors.ContextLengthError: Wording("validation", "context_length_exceeded", INVALID),
    errors.NotSupportedError: Wording("validation", "unsupported_parameter", INVALID),
    errors.InputError: Wording("validation", "invalid_value", INVALID),
    errors.OverloadedError: Wording("overloaded", "rate_limit_exceeded", f"{OVERLOADED}: "),
    errors.BusyError: Wording("overloaded", None, f"{OVERLOADED}: "),
    errors.AdapterNotFoundError: Wording("generation", "model_not_found", FAILED),
    errors.AdapterAccessError: Wording("generation", "model_access_denied", FAILED),
    errors.AuthenticationError: Wording("authentication", "invalid_api_key"),
    errors.ForbiddenError: Wording("permission", "permission_denied"),
    errors.DeadlineError: Wording("timeout"),
    errors.LoraxError: Wording("generation", None, FAILED),
}


class Problem(NamedTuple):
    """An error as a client is to see it."""

    status: int
    error_type: str  # LoRAX's name for the kind of error, also in metrics and logs
    message: str
    code: str | None = None  # OpenAI's
    retry_after_s: float | None = None
    headers: dict[str, str] = {}  # noqa: RUF012 - never changed
    param: str | None = None  # the wrong field, for OpenAI's clients

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
    """Encode content as JSON. Numbers that JSON cannot write become null."""
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def http_problem(status: int, message: str = "", headers: dict[str, str] | None = None) -> Problem:
    """Describe an error of HTTP itself, such as a path without a route."""
    code = "unknown_url" if status == HTTPStatus.NOT_FOUND else None
    error_type = HTTP_TYPES.get(status, "validation")
    return Problem(status, error_type, message or HTTPStatus(status).phrase, code, headers=headers or {})


def describe(error: BaseException, path: str) -> Problem:
    """Describe an error of a route, in the words of the route's clients.

    LoRAX's have one status for everything that is wrong with an adapter. OpenAI's have 400 for everything that is wrong
    with a request, and are told the field.
    """
    if not isinstance(error, errors.LoraxError):
        return Problem(500, "internal", "Internal server error")
    is_openai = path.startswith(OPENAI_PREFIX)
    wording = next(wording for kind, wording in WORDINGS.items() if isinstance(error, kind))
    status, message, param = error.status, str(error), None
    # A template's message is its own, and what is not supported has the name that the route's clients use.
    if isinstance(error, errors.InputError) and not isinstance(error, errors.TemplateError | errors.NotSupportedError):
        names = FIELDS.get(path, {})
        message = FIELD.sub(lambda field: f"`{names.get(field[1], field[1])}`", message)
    if wording.prefix == NO_PROMPT:
        message = NO_PROMPT.format("messages" if is_openai else "inputs") + message
    elif not is_openai and message != OVERLOADED:
        message = wording.prefix + message
    match error:
        case errors.EngineError() if error.retry_after_s is not None:
            status = 503
        case errors.AdapterError() if not is_openai:
            status = 424
        case errors.AdapterError():
            param = "model"
        case errors.TemplateError() if is_openai:
            status, param = 400, "messages"
        case errors.InputError() if is_openai:
            field = PARAM.search(message)
            status, param = 400, field and field[1]
    return Problem(status, wording.error_type, message, wording.code, error.retry_after_s, param=param)


# --- Bodies of the wrong form -----------------------------------------------------------------------------------------


# Fields that may have several forms. If a value has none of them, pydantic reports an error for each.
FORMS = {
    "prompt": "a string, a list of strings, a list of token ids, or a list of such lists",
    "stop": "a string or a list of strings",
    "content": "a string or a list of parts",
    "tool_choice": "a string or an object",
    "guided_json": "an object, or a string that holds one",
}


def describe_shape(errors: Sequence[Any], path: str) -> Problem:
    """Describe the first field that is wrong."""
    is_openai = path.startswith(OPENAI_PREFIX)
    forms = FORMS if is_openai else {}
    location = _locate(errors[0], forms)
    errors = [error for error in errors if _locate(error, forms) == location]
    # A value may be of the right form and wrong in another way: too long, too large.
    error = next((error for error in errors if not _is_of_type(error)), errors[0])
    is_formless = _is_of_type(error) and location and location[-1] in forms
    message = f"Input should be {forms[location[-1]]}" if is_formless else error["msg"]
    if not is_openai:
        name = ".".join(map(str, location)) or "body"
        return Problem(422, "validation", f"{INVALID}{name}: {message}")
    name = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in location).lstrip(".")
    code = "invalid_type" if _is_of_type(error) else "invalid_value"
    if error["type"] == "missing":
        code = "missing_required_parameter"
    return Problem(400, "validation", f"{name or 'body'}: {message}", code, param=name or None)


def _locate(error: Mapping[str, Any], forms: Mapping[str, str]) -> list[Any]:
    """Return the path of a field, without the names of types that follow one with several forms."""
    location = list(error["loc"])
    if location and location[0] in ("body", "query", "path"):
        del location[0]
    end = next((index + 1 for index, step in enumerate(location) if step in forms), None)
    return location[:end]


def _is_of_type(error: Mapping[str, Any]) -> bool:
    return str(error["type"]).endswith("_type")
