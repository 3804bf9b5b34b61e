"""Tools in the playground: validation, requests and display of calls."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from playwright.sync_api import Route, expect

from tests.browser.conftest import HOSTILE
from tests.browser.playground import Playground

pytestmark = pytest.mark.slow
TOOL = {"name": "look", "parameters": {"type": "object", "properties": {}}}


def mock_chat(playground: Playground, *deltas: dict[str, Any], choices: Sequence[dict[str, Any]] = ()) -> list[Any]:
    """Mock the chat route and return the received requests."""
    requests: list[Any] = []

    def fulfill(route: Route) -> None:
        requests.append(route.request.post_data_json)
        events = [{"choices": [choice]} for choice in (*({"index": 0, "delta": delta} for delta in deltas), *choices)]
        events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        route.fulfill(body=body, content_type="text/event-stream")

    playground.page.route("**/v1/chat/completions", fulfill)
    return requests


def piece(index: int, **function: str) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, "function": function}]}


def test_streamed_tool_calls_are_assembled(playground: Playground) -> None:
    deltas = [piece(0, name="look", arguments=""), piece(0, arguments='{"at": '), piece(0, arguments='["<b>", 1]}')]
    requests = mock_chat(playground, *deltas, piece(1, name=HOSTILE, arguments='{"cut": "of'))
    playground.set(tools=json.dumps([TOOL]), tool_choice="required")
    expect(playground.at("#summary")).to_contain_text("tools: required")
    playground.send_prompt("Look", "first")
    assert requests[0]["tools"] == [{"type": "function", "function": TOOL}]
    assert requests[0]["tool_choice"] == "required"
    calls = playground.answer("first").get_by_role("list", name="Tool calls of first").locator(".call")
    expect(calls.locator("> .name")).to_have_text(["look", HOSTILE])
    expect(calls.first.locator(".leaf")).to_have_text(['0: "<b>"', "1: 1"])
    expect(calls.nth(1).locator(".tree")).to_have_text('{"cut": "of')
    assert playground.fact("first", "reason") == "tool_calls"
    assert playground.page.evaluate("window.hacked") is None
    playground.set(tools="")
    mock_chat(playground, {"content": "No."})
    playground.send_prompt("And now?", "first")
    expect(playground.answer("first").locator(".calls")).to_be_hidden()


def test_completion_without_calls_is_text(playground: Playground) -> None:
    tokens: list[Any] = [{"token": text, "logprob": -0.1, "top_logprobs": []} for text in ("No", ".", "<|end|>")]
    choices: list[Any] = [
        *({"delta": {}, "logprobs": {"content": [token]}} for token in tokens),  # buffered as a possible call
        {"delta": {"content": "No."}, "logprobs": None},
    ]
    playground.set(tools=json.dumps([TOOL]))
    mock_chat(playground, choices=choices)
    playground.send_prompt("Look", "first")
    assert playground.completion_text("first") == "No."
    expect(playground.answer("first").locator(".calls")).to_be_hidden()


def test_example_tools_are_sent_unchanged(playground: Playground) -> None:
    requests = mock_chat(playground)
    playground.set(max_tokens="8")
    playground.page.get_by_role("button", name="Example for Tools").click()
    expect(playground.at("#tools-error")).to_be_hidden()
    playground.send_prompt("Look", "first")
    (tool,) = requests[0]["tools"]
    assert (tool["type"], tool["function"]["name"], requests[0]["tool_choice"]) == ("function", "weather", "auto")
    playground.page.reload()
    expect(playground.at("#summary")).to_contain_text("tools: auto")


@pytest.mark.parametrize("typed", ["[", "{}", "[]", "[1]", "null", '[{"function": {}}]', '[{"parameters": {}}]'])
def test_invalid_tools_show_error(playground: Playground, typed: str) -> None:
    playground.set(tools=typed)
    playground.send("Look", "first")
    error = "Not valid JSON" if typed == "[" else "Must be a JSON list of named functions."
    expect(playground.at("#tools-error")).to_contain_text(error)
    expect(playground.at("#tools")).to_be_focused()
    expect(playground.at(".turn")).to_have_count(0)


def test_tools_require_chat_mode(playground: Playground) -> None:
    playground.set(tools=json.dumps([TOOL]), mode="text")
    playground.send("Look", "first")
    expect(playground.at("#tools-error")).to_have_text("Tools require chat mode.")
    playground.set(mode="chat")
    expect(playground.at("#tools-error")).to_be_hidden()
    playground.send_prompt("Look", "first")  # the server returns the error
    expect(playground.answer("first").locator(".error")).to_contain_text("template")
    assert playground.refusals == [400]
