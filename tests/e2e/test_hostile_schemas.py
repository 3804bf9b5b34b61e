"""Schemas and tools are analyzed on a thread, for admitted requests only, in time and memory that are bounded.

The server runs in this process, so that a test can hold up the analysis.
"""

import asyncio
import json
import threading
import tracemalloc
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from lorax_server.text.tools.grammar import MAX_GRAMMAR_CHARACTERS
from tests.server.fake_server import Reply
from tests.server.tools.scripted_server import WEATHER, ScriptedServer

KEY = "hunter2-hunter2"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED = {"name": "a", "schema": SCHEMA}
FORMAT = {"type": "json_schema", "json_schema": NAMED}
LORAX = {"inputs": "ask", "parameters": {"response_format": {"type": "json_object", "schema": SCHEMA}}}
GBNF = 'root ::= "a"'
MESSAGES = [{"role": "user", "content": "ask"}]
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
TOOLS: dict[str, Any] = {"tools": [WEATHER], "tool_choice": "required"}
FUNCTIONS: dict[str, Any] = {"tools": [{"type": "function", **WEATHER["function"]}], "tool_choice": "required"}  # type: ignore[dict-item]
# Functions that analyze requests.
JOIN = "lorax_server.structured_output.grammars.rewrite_one_of"
CONVERT = "llguidance.gbnf_to_lark.gbnf_to_lark"
PARSE_TOOLS = "lorax_server.server.routes.chat.parse_tool_definitions"
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": (CHAT, {"messages": MESSAGES, "response_format": FORMAT}, JOIN),
    "chat, GBNF": (CHAT, {"messages": MESSAGES, "guided_grammar": GBNF}, CONVERT),
    "chat, tools": (CHAT, {"messages": MESSAGES, **TOOLS}, PARSE_TOOLS),
    "chat, tool grammar": (CHAT, {"messages": MESSAGES, **TOOLS}, JOIN),
    "completions": (COMPLETIONS, {"prompt": "ask", "guided_json": json.dumps(SCHEMA)}, JOIN),
    "responses": (RESPONSES, {"input": "ask", "text": {"format": {"type": "json_schema", **NAMED}}}, JOIN),
    "responses, tools": (RESPONSES, {"input": "ask", **FUNCTIONS}, PARSE_TOOLS),
    "responses, tool grammar": (RESPONSES, {"input": "ask", **FUNCTIONS}, JOIN),
    **{path: (path, LORAX, JOIN) for path in ("/", "/invocations", "/generate", "/generate_stream")},
}


class Hook:
    """Wraps a function: counts its calls and blocks them until released."""

    def __init__(self, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
        module, _, name = target.rpartition(".")
        self._function: Callable[..., Any] = getattr(import_module(module), name)
        self.num_calls = 0
        self.was_released = True
        self.entered, self.released = threading.Event(), threading.Event()
        monkeypatch.setattr(target, self._call)

    def _call(self, *arguments: Any, **named: Any) -> Any:
        self.num_calls += 1
        self.entered.set()
        self.was_released &= self.released.wait(30)
        return self._function(*arguments, **named)


@pytest.mark.parametrize("case", CASES)
def test_schema_analysis_does_not_block_the_event_loop(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, body, target = CASES[case]
    hook, server = Hook(target, monkeypatch), ScriptedServer()

    async def send_requests() -> tuple[Reply, Reply]:
        asking = asyncio.create_task(server._send("POST", path, {"model": "", **body}, {}))
        assert await asyncio.to_thread(hook.entered.wait, 30)
        health = await server._send("GET", "/health", None, {})
        assert not asking.done()
        hook.released.set()
        return health, await asking

    health, reply = asyncio.run(send_requests())
    assert hook.was_released  # by this test, during the analysis
    assert (health.status, reply.status) == (200, 200)
    assert server.grammar


@pytest.mark.parametrize("case", CASES)
def test_only_admitted_requests_are_analyzed(case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, body, target = CASES[case]
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[keys.alice]\nkey = "{KEY}"\nrequests_per_minute = 1\n')
    hook, server = Hook(target, monkeypatch), ScriptedServer(keys_file=keys)
    hook.released.set()
    request_body = {"model": "", **body}
    assert server.post(path, request_body, "wrong").status == 401
    assert hook.num_calls == 0
    assert server.post(path, request_body, KEY).status == 200
    assert hook.num_calls == 1
    assert server.post(path, request_body, KEY).status == 429
    assert hook.num_calls == 1


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHAT, {"messages": MESSAGES, "guided_json": {"const": "x" * MAX_GRAMMAR_CHARACTERS}}, 400),
        (COMPLETIONS, {"prompt": "ask", "guided_regex": ""}, 400),
        (RESPONSES, {"input": "ask", "text": {"format": {"type": "json_schema", "schema": 5}}}, 400),
        ("/generate", {"inputs": "ask", "parameters": {"response_format": {"type": "xml"}}}, 422),
    ],
)
def test_schema_analysis_errors_are_reported(path: str, body: dict[str, Any], status: int) -> None:
    server = ScriptedServer()
    assert server.post(path, {"model": "", **body}).status == status
    assert not server.engine.added
    assert server.service.rate_limits.num_running == 0


# --- Attacks ----------------------------------------------------------------------------------------------------------


def test_large_enum_shared_by_many_unions_is_accepted() -> None:
    """This 84 KB schema used to block the event loop for 5 s. Unions beyond the limit keep `oneOf`."""
    large = {"type": "object", "properties": {"t": {"enum": [f"v{i}" for i in range(8000)]}}, "required": ["t"]}
    union = {"oneOf": [{"$ref": "#/$defs/large"}], "discriminator": {"propertyName": "t"}}
    schema = {"prefixItems": [union] * 150, "$defs": {"large": large}}
    server = ScriptedServer()
    assert server.chat(guided_json=schema).status == 200
    assert "anyOf" in server.grammar
    assert server.grammar.count("oneOf") > 100


@pytest.mark.parametrize(
    ("template", "kind"), [("{{ tools }}[func_name1(a)]", "pythonic"), ("{{ tools }}<parameter=", "qwen3_coder")]
)
def test_shared_definitions_do_not_multiply_grammar(template: str, kind: str) -> None:
    """This 209 KB schema used to produce a 1 GB grammar."""
    properties = {f"p{index}": {"$ref": "#/$defs/a"} for index in range(5_000)}
    parameters = {"type": "object", "properties": properties, "$defs": {"a": {"enum": [["x" * 100_000]]}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    server = ScriptedServer(template=template, tool_parsers=(kind,))
    server.chat()  # loads modules
    tracemalloc.start()
    try:
        reply = server.chat(tools=[tool], tool_choice="required")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (reply.status, reply.json["error"]["param"]) == (400, "tools")
    assert "characters" in reply.message
    assert peak < 2**25
    assert not server.engine.added[1:]


def test_deep_tool_schemas_are_rejected_with_name() -> None:
    chain: dict[str, Any] = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(1000)}
    parameters = {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": chain}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    server = ScriptedServer(template="{{ messages[0].content }}", tool_parsers=("hermes",), describe_tools=False)
    reply = server.chat(tools=[tool], tool_choice="required")
    assert (reply.status, reply.json["error"]["param"]) == (400, "tools")
    assert "levels" in reply.message
    assert server.chat(tools=[tool]).status == 200  # no grammar is compiled
