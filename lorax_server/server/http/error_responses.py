"""Converts errors to HTTP responses in the LoRAX or OpenAI format, depending on the route."""

import math
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
from starlette.responses import Response

from lorax_server import errors

ADAPTER_STATUS = 424  # on LoRAX routes
RETRYABLE_STATUSES = (ADAPTER_STATUS, 429, 500, 503)
OPENAI_PREFIX = "/v1/"
OVERLOADED_MESSAGE = "Model is overloaded"  # LoRAX's wording
INVALID_ADAPTER_CODE = "invalid_adapter"
INVALID_INPUT_PREFIX = "Input validation error: "
TEMPLATE_FAILED_PREFIX = "Failed applying chat template to {}: "
GENERATION_FAILED_PREFIX = "Request failed during generation: Server error: "
# "validation" for other statuses
ERROR_TYPE_BY_STATUS = {404: "not_found", 405: "method_not_allowed", 408: "timeout", 503: "healthcheck"}
# OpenAI field names by LoRAX field name. Errors are raised with LoRAX names and translated for OpenAI routes.
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
FIELD_NAMES_BY_PATH = {
    "/v1/responses": RESPONSE_FIELDS,
    "/v1/chat/completions": CHAT_FIELDS,
    "/v1/completions": COMPLETION_FIELDS,
    "/v1/embeddings": {"inputs": "input"},
    "/v1/classify": {"inputs": "input"},
    "/v1/rerank": {"inputs": "documents"},
    "/rerank": {"inputs": "documents"},
    "/v1/score": {"inputs": "text_2"},
}
FIELD_PATTERN = re.compile(r"`(\w+)`")
PARAM_PATTERN = re.compile(r"`([\w.\[\]]+)`")  # the first field in an error message is the invalid field
OPENAI_TYPE_BY_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ErrorFormat(NamedTuple):
    """The error type, code and message prefix for an error class."""

    error_type: str  # in LoRAX responses
    code: str | None = None  # in OpenAI responses
    prefix: str = ""  # message prefix in LoRAX responses


# Error formats by class. The first matching class is used, so subclasses come first.
ERROR_FORMATS: dict[type[errors.LoraxError], ErrorFormat] = {
    errors.MissingVariableError: ErrorFormat("missing_template_variable", "missing_template_variable"),
    errors.NoTemplateError: ErrorFormat("no_chat_template", "no_chat_template", TEMPLATE_FAILED_PREFIX),
    errors.TemplateError: ErrorFormat("template_error", "template_error", TEMPLATE_FAILED_PREFIX),
    errors.ContextLengthError: ErrorFormat("validation", "context_length_exceeded", INVALID_INPUT_PREFIX),
    errors.NotSupportedError: ErrorFormat("validation", "unsupported_parameter", INVALID_INPUT_PREFIX),
    errors.InputError: ErrorFormat("validation", "invalid_value", INVALID_INPUT_PREFIX),
    errors.OverloadedError: ErrorFormat("overloaded", "rate_limit_exceeded", f"{OVERLOADED_MESSAGE}: "),
    errors.BusyError: ErrorFormat("overloaded", None, f"{OVERLOADED_MESSAGE}: "),
    errors.AdapterNotFoundError: ErrorFormat("generation", "model_not_found", GENERATION_FAILED_PREFIX),
    errors.AdapterAccessError: ErrorFormat("generation", "model_access_denied", GENERATION_FAILED_PREFIX),
    errors.AuthenticationError: ErrorFormat("authentication", "invalid_api_key"),
    errors.ForbiddenError: ErrorFormat("permission", "permission_denied"),
    errors.DeadlineError: ErrorFormat("timeout"),
    errors.SourceError: ErrorFormat("generation", None, GENERATION_FAILED_PREFIX),
    errors.AdapterError: ErrorFormat("generation", INVALID_ADAPTER_CODE, GENERATION_FAILED_PREFIX),
    errors.LoraxError: ErrorFormat("generation", None, GENERATION_FAILED_PREFIX),
}


class ErrorResponse(NamedTuple):
    """An HTTP error response, which can be encoded in LoRAX or OpenAI format."""

    status: int
    error_type: str  # LoRAX's error type, also used in metrics and logs
    message: str
    code: str | None = None  # OpenAI's error code
    retry_after_s: float | None = None
    headers: dict[str, str] = {}  # noqa: RUF012 - never mutated
    param: str | None = None  # the invalid field, in OpenAI responses

    def body(self, path: str) -> dict[str, Any]:
        if not path.startswith(OPENAI_PREFIX):
            return {"error": self.message, "error_type": self.error_type}
        kind = OPENAI_TYPE_BY_STATUS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def to_response(self, path: str) -> Response:
        headers = dict(self.headers)
        if self.retry_after_s is not None and self.status in RETRYABLE_STATUSES:
            headers["retry-after"] = str(max(1, math.ceil(min(self.retry_after_s, 3600))))
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["www-authenticate"] = "Bearer"
        return json_response(self.body(path), self.status, headers)


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON response. NaN and infinities become null."""
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def make_http_error(status: int, message: str = "", headers: dict[str, str] | None = None) -> ErrorResponse:
    """Return the response for an HTTP-level error, for example an unknown path."""
    code = "unknown_url" if status == HTTPStatus.NOT_FOUND else None
    error_type = ERROR_TYPE_BY_STATUS.get(status, "validation")
    return ErrorResponse(status, error_type, message or HTTPStatus(status).phrase, code, headers=headers or {})


def make_error_response(
    error: BaseException,
    path: str,
    adapter_field: str = "model",
    renamed_fields: Mapping[str, str] = MappingProxyType({}),
) -> ErrorResponse:
    """Return the response for an exception raised by a route.

    LoRAX routes return 424 for all adapter errors. OpenAI routes return 400 for invalid requests, and name the invalid
    field. `adapter_field` names the adapter in OpenAI requests. `renamed_fields` contains the names that the client
    used, by LoRAX field name.
    """
    if not isinstance(error, errors.LoraxError):
        return ErrorResponse(500, "internal", "Internal server error")
    is_openai = path.startswith(OPENAI_PREFIX)
    error_format = next(error_format for kind, error_format in ERROR_FORMATS.items() if isinstance(error, kind))
    status, message, param = error.status, str(error), None
    # TemplateError messages are kept as they are. NotSupportedError messages already use the route's field names.
    if isinstance(error, errors.InputError) and not isinstance(error, errors.TemplateError | errors.NotSupportedError):
        names = {**FIELD_NAMES_BY_PATH.get(path, {}), **renamed_fields}
        message = FIELD_PATTERN.sub(lambda field: f"`{names.get(field[1], field[1])}`", message)
    if error_format.prefix == TEMPLATE_FAILED_PREFIX:
        message = TEMPLATE_FAILED_PREFIX.format("messages" if is_openai else "inputs") + message
    elif not is_openai and message != OVERLOADED_MESSAGE:
        message = error_format.prefix + message
    match error:
        case errors.EngineError() if error.retry_after_s is not None:
            status = 503
        case errors.AdapterError() if not is_openai:
            status = ADAPTER_STATUS
        case errors.AdapterError():
            status, param = 400 if status == ADAPTER_STATUS else status, adapter_field
        case errors.TemplateError() if is_openai:
            status, param = 400, "messages"
        case errors.InputError() if is_openai:
            field = PARAM_PATTERN.search(message)
            status, param = 400, field and field[1]
    return ErrorResponse(status, error_format.error_type, message, error_format.code, error.retry_after_s, param=param)


# --- Validation errors ------------------------------------------------------------------------------------------------


# Descriptions for union fields. They replace pydantic's errors, which it reports for every alternative.
EXPECTED_FORMS = {
    "prompt": "a string, a list of strings, a list of token ids, or a list of such lists",
    "stop": "a string or a list of strings",
    "content": "a string or a list of parts",
    "tool_choice": "a string or an object",
    "guided_json": "an object, or a string that contains one",
    "input": "a string, a list of strings, a list of token ids, or a list of such lists",
    "documents": "a list of strings, or of objects with `text`",
    "text_1": "a string or a list of strings",
    "text_2": "a string or a list of strings",
}
RESPONSES_FORMS = EXPECTED_FORMS | {"input": "a string or a list of items"}


def make_validation_error(errors: Sequence[Any], path: str) -> ErrorResponse:
    """Return the response for pydantic validation errors. It reports only the first invalid field."""
    is_openai = path.startswith(OPENAI_PREFIX)
    forms = (RESPONSES_FORMS if path == "/v1/responses" else EXPECTED_FORMS) if is_openai else {}
    location = _find_field_path(errors[0], forms)
    errors = [error for error in errors if _find_field_path(error, forms) == location]
    # Prefer errors other than type errors: the value may match one alternative but be too long or too large.
    error = next((error for error in errors if not _is_type_error(error) and error["type"] != "missing"), errors[0])
    has_wrong_type = _is_type_error(error) and location and location[-1] in forms
    message = f"Input should be {forms[location[-1]]}" if has_wrong_type else _describe_error(error)
    if not is_openai:
        name = ".".join(map(str, location)) or "body"
        return ErrorResponse(422, "validation", f"{INVALID_INPUT_PREFIX}{name}: {message}")
    name = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in location).lstrip(".")
    code = "invalid_type" if _is_type_error(error) else "invalid_value"
    if error["type"] == "missing":
        code = "missing_required_parameter"
    return ErrorResponse(400, "validation", f"{name or 'body'}: {message}", code, param=name or None)


def _describe_error(error: Mapping[str, Any]) -> str:
    """Return pydantic's message, or a plain message for the length of a list or a text."""
    kind, context = error["type"], error.get("ctx", {})
    if kind in ("too_short", "string_too_short"):
        limit, bound = context["min_length"], "at least"
    elif kind in ("too_long", "string_too_long"):
        limit, bound = context["max_length"], "at most"
    else:
        return str(error["msg"])
    noun = "character" if kind.startswith("string") else "item"
    return f"Input should have {bound} {limit} {noun}{'s' if limit != 1 else ''}"


def _find_field_path(error: Mapping[str, Any], forms: Mapping[str, str]) -> list[Any]:
    """Return the path of the invalid field, without the alternative names that pydantic appends to union fields."""
    location = list(error["loc"])
    if location and location[0] in ("body", "query", "path"):
        del location[0]
    end = next((index + 1 for index, step in enumerate(location) if step in forms), None)
    return location[:end]


def _is_type_error(error: Mapping[str, Any]) -> bool:
    return str(error["type"]).endswith("_type")
