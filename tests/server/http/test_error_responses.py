import json
import math
from http import HTTPStatus

import pytest

from lorax_server import errors
from lorax_server.errors import (
    AdapterAccessError,
    AdapterError,
    AdapterNotFoundError,
    AuthenticationError,
    BusyError,
    ConfigError,
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
    SourceError,
    TemplateError,
    WeightsError,
)
from lorax_server.server.http.error_responses import (
    GENERATION_FAILED_PREFIX,
    json_response,
    make_error_response,
    make_http_error,
    make_validation_error,
)
from lorax_server.server.telemetry.metrics import FAILURE_BY_ERROR_TYPE

NATIVE, OPENAI = "/generate", "/v1/completions"
ALL = sorted(
    (
        each
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, LoraxError) and each is not LoraxError
    ),
    key=lambda each: each.__name__,
)


@pytest.mark.parametrize(
    ("error", "status", "kind", "message"),
    [
        (InputError("no"), 422, "validation", "Input validation error: no"),
        (NotSupportedError("no"), 422, "validation", "Input validation error: no"),
        (TemplateError("no"), 422, "template_error", "Failed applying chat template to inputs: no"),
        (MissingVariableError("no"), 422, "missing_template_variable", "no"),
        (NoTemplateError("no"), 422, "no_chat_template", "Failed applying chat template to inputs: no"),
        (OverloadedError("Model is overloaded"), 429, "overloaded", "Model is overloaded"),
        (OverloadedError("wait"), 429, "overloaded", "Model is overloaded: wait"),
        (BusyError("wait"), 503, "overloaded", "Model is overloaded: wait"),
        (AdapterError("no"), 424, "generation", f"{GENERATION_FAILED_PREFIX}no"),
        (AdapterNotFoundError("no"), 424, "generation", f"{GENERATION_FAILED_PREFIX}no"),
        (AdapterAccessError("no"), 424, "generation", f"{GENERATION_FAILED_PREFIX}no"),
        (SourceError("no"), 424, "generation", f"{GENERATION_FAILED_PREFIX}no"),
        (EngineError("no"), 500, "generation", f"{GENERATION_FAILED_PREFIX}no"),
        (WeightsError("no"), 500, "generation", f"{GENERATION_FAILED_PREFIX}no"),
        (AuthenticationError("no"), 401, "authentication", "no"),
        (ForbiddenError("no"), 403, "permission", "no"),
        (DeadlineError("no"), 504, "timeout", "no"),
        (KeyError("secret"), 500, "internal", "Internal server error"),
    ],
)
def test_lorax_status_and_error_type_per_error(error: Exception, status: int, kind: str, message: str) -> None:
    response = make_error_response(error, NATIVE).to_response(NATIVE)
    assert response.status_code == status
    assert json.loads(bytes(response.body)) == {"error": message, "error_type": kind}
    assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (InputError("no"), 400, "invalid_request_error", "invalid_value"),
        (ContextLengthError("no"), 400, "invalid_request_error", "context_length_exceeded"),
        (NotSupportedError("no"), 400, "invalid_request_error", "unsupported_parameter"),
        (MissingVariableError("no"), 400, "invalid_request_error", "missing_template_variable"),
        (OverloadedError("no"), 429, "rate_limit_error", "rate_limit_exceeded"),
        (BusyError("no"), 503, "server_error", None),
        (AdapterError("no"), 400, "invalid_request_error", "invalid_adapter"),
        (AdapterNotFoundError("no"), 404, "not_found_error", "model_not_found"),
        (AdapterAccessError("no"), 403, "permission_error", "model_access_denied"),
        (SourceError("no"), 503, "server_error", None),
        (EngineError("no"), 500, "server_error", None),
        (AuthenticationError("no"), 401, "authentication_error", "invalid_api_key"),
        (ForbiddenError("no"), 403, "permission_error", "permission_denied"),
        (DeadlineError("no"), 504, "server_error", None),
    ],
)
def test_openai_status_and_code_per_error(error: LoraxError, status: int, kind: str, code: str | None) -> None:
    response = make_error_response(error, OPENAI).to_response(OPENAI)
    assert response.status_code == status
    body = json.loads(bytes(response.body))["error"]
    assert body == {"message": "no", "type": kind, "param": body["param"], "code": code}


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("path", [NATIVE, OPENAI, "/", "/v1/chat/completions", "/v1x"])
def test_every_error_class_has_response(kind: type[LoraxError], path: str) -> None:
    reason = 'a "quoted"\nreason \x00 ü'
    problem = make_error_response(kind(reason), path)
    assert 400 <= problem.status < 600
    assert problem.error_type in FAILURE_BY_ERROR_TYPE  # metrics know it
    body = json.loads(bytes(problem.to_response(path).body))["error"]
    assert isinstance(body, dict) == path.startswith("/v1/")
    assert reason in (body["message"] if isinstance(body, dict) else body)


def test_internal_error_hides_details() -> None:
    for path in (NATIVE, OPENAI):
        assert b"secret" not in make_error_response(RuntimeError("secret"), path).to_response(path).body
    assert ConfigError("which file").status == 500


# --- Headers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wait_s", "expected"), [(0.0, "1"), (0.2, "1"), (1.0, "1"), (7.1, "8"), (1e9, "3600")])
@pytest.mark.parametrize("path", [NATIVE, OPENAI])
def test_retry_after_header_is_rounded_and_bounded(wait_s: float, expected: str, path: str) -> None:
    response = make_error_response(OverloadedError("no", wait_s), path).to_response(path)
    assert response.headers["retry-after"] == expected
    assert "retry-after" not in make_error_response(OverloadedError("no"), path).to_response(path).headers


def test_restarting_engine_returns_503() -> None:
    error = EngineError("the engine is restarting")
    error.retry_after_s = 2.0
    for path in (NATIVE, OPENAI):
        response = make_error_response(error, path).to_response(path)
        assert (response.status_code, response.headers["retry-after"]) == (503, "2")


def test_401_has_www_authenticate_header() -> None:
    response = make_error_response(AuthenticationError("who"), OPENAI).to_response(OPENAI)
    assert response.headers["www-authenticate"] == "Bearer"
    assert "www-authenticate" not in make_error_response(ForbiddenError("you"), OPENAI).to_response(OPENAI).headers


# --- Requests that reach no route ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        (404, "not_found", "Not Found"),
        (405, "method_not_allowed", "Method Not Allowed"),
        (408, "timeout", "Request Timeout"),
        (418, "validation", HTTPStatus(418).phrase),
    ],
)
def test_http_errors_use_same_format(status: int, kind: str, message: str) -> None:
    problem = make_http_error(status, headers={"allow": "GET"})
    assert problem.body("/nowhere")["error_type"] == kind
    assert problem.body("/nowhere")["error"] == message
    assert problem.to_response("/nowhere").headers["allow"] == "GET"
    assert make_http_error(status, "because").message == "because"


def test_error_responses_do_not_share_headers() -> None:
    first = make_http_error(401)
    first.to_response("/").headers["x"] = "y"
    assert first.headers == {}
    assert make_http_error(404).headers == {}


def test_json_response_writes_nan_as_null() -> None:
    assert json_response([math.nan, math.inf, 1.5, "ü\n"]).body == '[null,null,1.5,"ü\\n"]'.encode()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/generate", "Input validation error: `inputs` + `max_new_tokens`, `min_new_tokens`, `stop`"),
        ("/v1/completions", "`prompt` + `max_tokens`, `min_tokens`, `stop`"),
        ("/v1/chat/completions", "`messages` + `max_completion_tokens`, `min_tokens`, `stop`"),
    ],
)
def test_messages_use_field_names_of_route(path: str, message: str) -> None:
    """Messages use LoRAX field names internally and are translated for OpenAI routes."""
    error = InputError("`inputs` + `max_new_tokens`, `min_new_tokens`, `stop`")
    assert make_error_response(error, path).message == message
    assert make_error_response(ForbiddenError("`inputs`"), path).message == "`inputs`"  # a name, such as an adapter's


@pytest.mark.parametrize(
    ("error", "code"), [(TemplateError("no"), "template_error"), (NoTemplateError("no"), "no_chat_template")]
)
def test_template_errors_have_distinct_codes(error: TemplateError, code: str) -> None:
    path = "/v1/chat/completions"
    assert (
        make_error_response(error, path).body(path)["error"]["code"]
        == make_error_response(error, path).error_type
        == code
    )


@pytest.mark.parametrize("kind", [TemplateError, MissingVariableError, NoTemplateError, NotSupportedError])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_template_messages_are_not_translated(kind: type[LoraxError], path: str) -> None:
    assert make_error_response(kind("'`inputs` and `best_of`'"), path).message.endswith("'`inputs` and `best_of`'")


def test_error_names_the_fields_of_the_request() -> None:
    error = InputError("`ignore_eos_token` cannot be combined with structured output")
    plain = make_error_response(error, OPENAI)
    assert plain.param == "ignore_eos_token"
    renamed = make_error_response(error, OPENAI, renamed_fields={"ignore_eos_token": "ignore_eos"})
    assert (renamed.param, renamed.message[:12]) == ("ignore_eos", "`ignore_eos`")
    assert make_error_response(AdapterError("no"), OPENAI, "models").param == "models"


@pytest.mark.parametrize(
    ("kind", "limits", "message"),
    [
        ("too_short", {"min_length": 1}, "models: Input should have at least 1 item"),
        ("too_long", {"max_length": 32}, "models: Input should have at most 32 items"),
        ("string_too_short", {"min_length": 2}, "models: Input should have at least 2 characters"),
        ("other", {}, "models: other message"),
    ],
)
def test_length_errors_are_plain(kind: str, limits: dict[str, int], message: str) -> None:
    error = {"type": kind, "loc": ("body", "models"), "msg": "other message", "ctx": limits}
    assert make_validation_error([error], OPENAI).message == message
