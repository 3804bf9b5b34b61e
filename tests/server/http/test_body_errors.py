"""Errors on OpenAI routes: message, field and error code."""

from typing import Any, Union, get_args, get_origin

import pytest
from pydantic import BaseModel

from lorax_server.errors import AdapterNotFoundError
from lorax_server.server.http.error_responses import EXPECTED_FORMS
from lorax_server.server.schemas.openai import ChatCompletionRequest, CompletionRequest, Message
from lorax_server.server.schemas.pooling import EmbeddingRequest, LabelRequest, RerankRequest, ScoreRequest
from lorax_server.server.schemas.responses import ResponsesRequest
from tests.server.fake_server import Reply, Routes, chat, complete, generate

NATIVE, CHAT, COMPLETIONS = "/generate", "/v1/chat/completions", "/v1/completions"


class Templated(Routes):
    """Routes with a chat template that repeats the messages."""

    def __init__(self) -> None:
        super().__init__(["poet"])
        self.resolutions["peot"] = AdapterNotFoundError("adapter 'peot': no such folder below the server's roots")
        self.service.tokenizers.render = self._render  # type: ignore[method-assign]

    async def _render(self, _: Any, messages: list[dict[str, Any]], tenant: str = "", /, **variables: Any) -> str:
        return "".join(str(message["content"]) for message in messages)


@pytest.fixture
def routes() -> Templated:
    return Templated()


def expected(reply: Reply) -> tuple[int, str, str]:
    error = reply.json["error"]
    return reply.status, error["param"], error["code"]


def make_chat(content: Any) -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": "a"}, {"role": "user", "content": content}])


WRONG: dict[str, tuple[str, dict[str, Any], str, str, str]] = {
    "too long": (CHAT, make_chat("x y " * 60), "messages", "context_length_exceeded", "`messages` tokens"),
    "a long prompt": (
        COMPLETIONS,
        complete(prompt="x y " * 60),
        "prompt",
        "context_length_exceeded",
        "`prompt` tokens",
    ),
    "too much": (CHAT, chat(max_tokens=1000), "messages", "context_length_exceeded", "`max_completion_tokens`"),
    "a value": (CHAT, chat(temperature=5), "temperature", "invalid_value", "`temperature` must be"),
    "a type": (CHAT, chat(temperature="hot"), "temperature", "invalid_type", "temperature: Input should be a valid"),
    "too few": (CHAT, chat(n=0), "n", "invalid_value", "n: Input should be greater"),
    "too many": (CHAT, chat(n=1000), "n", "invalid_value", "at most 128 completions"),
    "nothing": (CHAT, {"model": ""}, "messages", "missing_required_parameter", "messages: Field required"),
    "no prompt": (COMPLETIONS, {"model": ""}, "prompt", "missing_required_parameter", "prompt: Field required"),
    "within": (
        CHAT,
        {"model": "", "messages": [{"content": "a"}]},
        "messages[0].role",
        "missing_required_parameter",
        "",
    ),
    "fractions": (
        COMPLETIONS,
        complete(prompt=[1.5]),
        "prompt",
        "invalid_type",
        "prompt: Input should be a string, a li",
    ),
    "mixed prompts": (COMPLETIONS, complete(prompt=["a", 1]), "prompt", "invalid_type", "a list of token ids, or"),
    "no models": (COMPLETIONS, complete(models=[]), "models", "invalid_value", "should have at least 1 item"),
    "2049 prompts": (COMPLETIONS, complete(prompt=["a"] * 2049), "prompt", "invalid_value", "at most 2048 items"),
    "a stop": (CHAT, chat(stop=[1]), "stop", "invalid_type", "stop: Input should be a string or a list of strings"),
    "a number said": (
        CHAT,
        make_chat(5),
        "messages[1].content",
        "invalid_type",
        "should be a string or a list of parts",
    ),
    "no text": (
        CHAT,
        make_chat([{"type": "text"}]),
        "messages[1].content[0]",
        "invalid_value",
        "`text` must be a string",
    ),
    "an image": (
        *(CHAT, make_chat([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}])),
        *("messages[1].content[1]", "unsupported_parameter", "content of type 'image_url' is not supported yet"),
    ),
    "half a character": (CHAT, make_chat("a\ud800"), "messages", "invalid_value", "lone surrogate (\\ud800"),
    "half a prompt": (
        COMPLETIONS,
        complete(prompt="\udc00"),
        "prompt",
        "invalid_value",
        "`prompt` contains a lone surrogate",
    ),
    "half a salt": (CHAT, chat(cache_salt="\ud800"), "cache_salt", "invalid_value", "lone surrogate (\\ud800"),
    "half a stop string": (CHAT, chat(stop=["a", "\ud800"]), "stop", "invalid_value", "lone surrogate (\\ud800"),
    "a number": (
        "/v1/responses",
        {"input": 5},
        "input",
        "invalid_type",
        "input: Input should be a string or a list of",
    ),
    "no such token": (COMPLETIONS, complete(prompt=[10**6]), "prompt", "invalid_value", "beyond the vocabulary"),
    "a format": (
        *(CHAT, chat(response_format={"type": "xml"})),
        *(
            "response_format.type",
            "unsupported_parameter",
            "`response_format.type` must be 'text', 'json_object' or 'json_schema' (got 'xml')",
        ),
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_invalid_request_returns_field_and_code(what: str, routes: Templated) -> None:
    path, body, param, code, message = WRONG[what]
    refused = routes.post(path, body)
    assert expected(refused) == (400, param, code)
    assert message in refused.message
    assert "inputs" not in refused.message
    assert "new_tokens" not in refused.message
    assert refused.json["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, complete("peot")), (CHAT, chat("peot"))])
def test_unknown_model_returns_model_not_found(path: str, body: dict[str, Any], routes: Templated) -> None:
    refused = routes.post(path, body)
    assert expected(refused) == (404, "model", "model_not_found")
    sentence = "the model 'peot' does not exist; /v1/models lists the available models; did you mean 'poet'?"
    assert refused.message == sentence
    assert "no such folder" in routes.post(NATIVE, generate(adapter_id="peot")).message  # where folders are known


def test_lorax_routes_keep_statuses_and_messages(routes: Templated) -> None:
    for parameters in ({"temperature": -1}, {"temperature": "hot"}, {"max_new_tokens": 1000}, {"grammar": "x"}):
        refused = routes.post(NATIVE, generate(**parameters))
        assert (refused.status, refused.json["error_type"]) == (422, "validation")
        assert refused.message.startswith("Input validation error: ")
    assert "lone surrogate" in routes.post(NATIVE, {"inputs": "\ud800"}).message
    assert "lone surrogate" in routes.post("/tokenize", {"inputs": "\ud800"}).message
    wrong = routes.post(NATIVE, generate(stop=["a", 1]))
    assert wrong.message == "Input validation error: parameters.stop.1: Input should be a valid string"


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "PUT"])
@pytest.mark.parametrize("path", ["/v1/responses/resp_1", "/v1/responses/resp_1/cancel"])
def test_stored_responses_return_404(method: str, path: str, routes: Templated) -> None:
    refused = routes.send(method, path, {} if method == "POST" else None)
    assert refused.status == 404
    assert "not stored" in refused.message


def test_405_response_lists_allowed_methods_once(routes: Templated) -> None:
    refused = routes.send("GET", CHAT)
    assert refused.status == 405
    assert refused.header_names.count("allow") == 1
    assert refused.headers["allow"] == "POST"


def test_models_route_accepts_trailing_slash(routes: Templated) -> None:
    first, second = routes.get("/v1/models"), routes.get("/v1/models/")
    assert first.status == second.status == 200
    assert [each["id"] for each in first.json["data"]] == [each["id"] for each in second.json["data"]]


def test_every_union_field_has_error_description() -> None:
    """Without a description, the error would expose internal type names."""
    schemas: tuple[type[BaseModel], ...] = (
        *(ChatCompletionRequest, CompletionRequest, Message, ResponsesRequest),
        *(EmbeddingRequest, LabelRequest, RerankRequest, ScoreRequest),
    )
    for schema in schemas:
        for name, field in schema.model_fields.items():
            kinds = [each for each in get_args(field.annotation) if each is not type(None)]
            is_union = get_origin(field.annotation) in (Union, type(int | str)) and len(kinds) > 1
            assert not is_union or name in EXPECTED_FORMS, name
