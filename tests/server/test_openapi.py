"""The OpenAPI document is valid and usable by client generators."""

import json
from functools import cache
from typing import Any

import jsonschema
import openapi_spec_validator
import pytest

from lorax_server.server.app import make_app
from lorax_server.server.http.middleware import PUBLIC_PATHS
from lorax_server.server.openapi import EVENT_SCHEMA
from lorax_server.types import ResolvedAdapter
from tests.server.fake_server import Routes, chat, complete, generate
from tests.server.service_harness import ServiceHarness

STREAMS = {
    "/": "StreamResponse",
    "/invocations": "StreamResponse",
    "/generate_stream": "StreamResponse",
    "/v1/completions": "CompletionChunk",
    "/v1/chat/completions": "ChatCompletionChunk",
}


@cache
def document() -> Any:
    return Routes().get("/openapi.json").json


@pytest.fixture(scope="module")
def with_keys() -> Any:
    """The document for a server with API keys."""
    return make_app(ServiceHarness(api_keys=("secret",)).service).openapi()


@pytest.fixture(scope="module")
def with_admin() -> Any:
    """The document for a server that has only an admin key."""
    return make_app(ServiceHarness(admin_key="secret").service).openapi()


def operations(found: Any) -> dict[tuple[str, str], Any]:
    return {(method, path): each for path, methods in found["paths"].items() for method, each in methods.items()}


def test_openapi_document_is_valid(with_keys: Any) -> None:
    openapi_spec_validator.validate(document())
    openapi_spec_validator.validate(with_keys)
    assert document()["openapi"] == "3.1.0"
    assert "itemSchema" not in json.dumps(document())  # OpenAPI 3.2 only


def test_operation_ids_are_short_and_unique() -> None:
    names = [each["operationId"] for each in operations(document()).values()]
    assert len(names) == len(set(names))
    assert {"generate", "generate_stream", "chat", "complete", "list_models", "load_adapter", "tokenize"} <= set(names)
    assert max(map(len, names)) < 24


@pytest.mark.parametrize("path", STREAMS)
def test_openapi_describes_stream_events(path: str) -> None:
    content = document()["paths"][path]["post"]["responses"]["200"]["content"]
    stream = content["text/event-stream"]
    assert stream["schema"]["type"] == "string"
    names = [each["$ref"].rpartition("/")[2] for each in stream[EVENT_SCHEMA]["oneOf"]]
    assert names[0] == STREAMS[path]
    assert set(names) <= set(document()["components"]["schemas"])
    assert ("application/json" in content) == (path != "/generate_stream")


@pytest.mark.parametrize("path", ["/generate_stream", "/v1/completions", "/v1/chat/completions"])
def test_stream_events_match_schema(path: str) -> None:
    routes = Routes(["poet"])
    routes.resolutions["poet"] = ResolvedAdapter("hash", tier="host")

    async def render(*_: Any, **__: Any) -> str:
        return "ask"

    routes.service.tokenizers.render = render  # type: ignore[method-assign]
    details = {"details": True, "return_k_alternatives": 2}
    body = {
        "/generate_stream": generate(adapter_id="poet", **details),
        "/v1/completions": complete("poet", stream=True, logprobs=2),
        "/v1/chat/completions": chat("poet", stream=True, logprobs=True, stream_options={"include_usage": True}),
    }[path]
    events = routes.post(path, body).events
    schema = {"$ref": f"#/components/schemas/{STREAMS[path]}", "components": document()["components"]}
    assert len(events) >= 2
    for event in events:
        jsonschema.Draft202012Validator(schema).validate(event)


def test_text_responses_are_not_documented_as_json() -> None:
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert list(document()["paths"][path]["post"]["responses"]["200"]["content"]) == ["text/plain"]


def test_openapi_enums_contain_only_strings() -> None:
    """Client generators drop operations with enums that contain other values."""

    def check_enums(at: Any) -> None:
        if isinstance(at, dict):
            assert all(each is None or isinstance(each, str) for each in at.get("enum", ()))
            for each in at.values():
                check_enums(each)
        elif isinstance(at, list):
            for each in at:
                check_enums(each)

    check_enums(document())


def test_openai_routes_do_not_document_422() -> None:
    for (_, path), operation in operations(document()).items():
        assert ("422" in operation["responses"]) == (not path.startswith("/v1/") and path != "/metrics"), path
        assert "HTTPValidationError" not in json.dumps(operation)


def test_openapi_security_matches_key_requirements(with_keys: Any, with_admin: Any) -> None:
    for found, is_open, has_admin in ((document(), True, False), (with_admin, True, True), (with_keys, False, False)):
        assert found["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
        for (method, path), operation in operations(found).items():
            is_public = method == "get" and PUBLIC_PATHS.fullmatch(path)
            identifier = operation["operationId"]
            is_admin = "load" in identifier or identifier in ("update_adapter", "select_adapter_version")
            optional: list[Any] = [{}] if is_open and not (is_admin and has_admin) else []
            assert operation.get("security") == (None if is_public else [{"bearer": []}, *optional]), path
