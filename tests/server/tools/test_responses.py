"""The Responses API: every event and field validates against OpenAI's types."""

import asyncio
from typing import Any

import pytest
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from lorax_server.errors import AdapterNotFoundError, EngineError
from lorax_server.server.request_context import RequestContext
from lorax_server.server.routes.responses.output import ResponseWriter
from lorax_server.types import FinishReason
from tests.server.fake_server import Reply
from tests.server.tools.scripted_server import ScriptedServer

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
OSLO = '{"city": "Oslo"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>'
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Look it up",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
VOLATILE_FIELDS = {"id", "created_at", "completed_at", "call_id", "parsed", "parsed_arguments"}


def whole(server: ScriptedServer, **fields: Any) -> Response:
    reply = server.respond(**fields)
    assert reply.status == 200, reply.message
    return Response.model_validate(reply.json)


def streamed(server: ScriptedServer, **fields: Any) -> tuple[list[Any], Response]:
    """Validate each event with OpenAI's types and assemble the stream with its client."""
    reply = server.respond(stream=True, **fields)
    assert reply.status == 200, reply.message
    assert b"[DONE]" not in reply.body
    events = [EVENTS.validate_python(event) for event in parse_events(reply)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    state: Any = ResponseStreamState(input_tools=[], text_format=omit)
    for event in events:
        state.handle_event(event)
    return events, state._completed_response or events[-1].response


def parse_events(reply: Reply) -> list[Any]:
    """Parse the events and check their names, which some clients rely on."""
    names = [line[7:] for line in reply.body.decode().split("\n") if line.startswith("event: ")]
    events = [
        _parse_event(piece) for piece in reply.body.decode().split("\n\n") if piece not in ("", ":")
    ]  # keep-alives
    assert names == [event["type"] for event in events]
    return events


def _parse_event(piece: str) -> Any:
    name, _, data = piece.partition("\ndata: ")
    assert name.startswith("event: ")
    return Reply(200, {}, data.encode(), []).json


def strip(value: Any) -> Any:
    """Remove the fields that differ between two responses."""
    if isinstance(value, dict):
        return {name: strip(each) for name, each in value.items() if name not in VOLATILE_FIELDS}
    return [strip(each) for each in value] if isinstance(value, list) else value


def both(server: ScriptedServer, **fields: Any) -> Response:
    """Send the request whole and streamed, and check that both responses match."""
    first, (_, second) = whole(server, **fields), streamed(server, **fields)
    assert strip(first.to_dict()) == strip(second.to_dict())
    return first


def test_text_response_has_output_and_usage() -> None:
    response = both(ScriptedServer("Hello there."), metadata={"a": "b"}, temperature=0.5)
    assert response.output_text == "Hello there."
    assert (response.status, response.temperature, response.metadata) == ("completed", 0.5, {"a": "b"})
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.usage.input_tokens_details.cached_tokens == 3


def test_text_stream_has_events_in_order() -> None:
    events, _ = streamed(ScriptedServer("Hi."))
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert deltas > 1
    assert kinds == [
        *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
        *["response.output_text.delta"] * deltas,
        *("response.output_text.done", "response.content_part.done", "response.output_item.done"),
        "response.completed",
    ]
    assert [events[0].response.status, events[0].response.output] == ["in_progress", []]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Hi."


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "name": "weather"}])
def test_function_calls_are_separate_output_items(choice: Any) -> None:
    server = ScriptedServer(f"{CALL}\n{CALL}")
    response = both(server, tools=[WEATHER], tool_choice=choice)
    calls: list[Any] = response.output
    assert [(call.type, call.name, call.arguments, call.status) for call in calls] == [
        ("function_call", "weather", OSLO, "completed")
    ] * 2
    assert len({call.call_id for call in calls}) == 2
    assert response.tools[0].type == "function"
    assert '"name": "weather", "description": "Look it up"' in server.prompts[0]
    assert bool(server.grammar) == (choice != "auto")


def test_function_call_stream_has_events_in_order() -> None:
    events, _ = streamed(ScriptedServer(f"Let me see.\n{CALL}"), tools=[WEATHER], tool_choice="required")
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = kinds.count("function_call_arguments.delta")
    assert deltas > 3
    start = kinds.index("output_item.done") + 1
    assert kinds[start:] == [
        "output_item.added",
        *["function_call_arguments.delta"] * deltas,
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]
    assert {event.output_index for event in events[start:-1]} == {1}


def test_truncated_response_is_incomplete() -> None:
    server = ScriptedServer("Hello there.")
    server.finish_reason = FinishReason.LENGTH
    response = both(server, max_output_tokens=1000)
    assert (response.status, response.output_text) == ("incomplete", "Hello there.")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"  # type: ignore[union-attr]


def test_truncated_function_call_is_incomplete() -> None:
    server = ScriptedServer(f"{CALL}\n{CALL[:50]}")
    server.finish_reason = FinishReason.LENGTH
    response = both(server, tools=[WEATHER], tool_choice="required")
    calls: list[Any] = response.output
    assert [(call.type, call.status) for call in calls] == [
        ("function_call", "completed"),
        ("function_call", "incomplete"),
    ]
    assert response.status == "incomplete"


def test_empty_completion_has_message_item() -> None:
    assert [item.type for item in both(ScriptedServer("")).output] == ["message"]


def test_reasoning_is_a_separate_output_item() -> None:
    server = ScriptedServer("<think>\nI muse.\n</think>\nHi.")
    response = both(server, reasoning={"effort": "low"})
    thought, message = response.output
    assert thought.type == "reasoning"
    assert thought.content is not None
    assert (thought.content[0].text, response.output_text) == ("I muse.", "Hi.")
    assert message.type == "message"
    assert response.usage is not None
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    assert both(server).output_text == server.output


def test_log_probabilities_cover_all_text_tokens() -> None:
    response = both(ScriptedServer("Hi."), include=["message.output_text.logprobs"], top_logprobs=0)
    (message,) = response.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert "".join(each.token for each in part.logprobs) == "Hi.<|im_end|>"


@pytest.mark.parametrize(
    ("output", "tools", "expected"),
    [
        ("a  b <tool", [WEATHER], "a  b <tool<|im_end|>"),
        ("a b", [WEATHER], "a b<|im_end|>"),
        ("<think>I muse.</think>a  b ", [], "a  b <|im_end|>"),
    ],
)
def test_buffered_text_keeps_log_probabilities(output: str, tools: list[Any], expected: str) -> None:
    fields = {"include": ["message.output_text.logprobs"], "reasoning": {}, "tools": tools}
    *_, message = both(ScriptedServer(output), **fields).output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert "".join(each.token for each in part.logprobs) == expected


def test_conversation_items_reach_template() -> None:
    server = ScriptedServer("Fine.")
    items = [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "How is it "}, {"type": "input_text", "text": "?"}],
        },
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Look."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]},
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": OSLO},
        {"type": "function_call", "call_id": "call_2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "3"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "4"}]},
    ]
    both(server, input=items, instructions="Be brief.", tools=[WEATHER])
    assert server.prompts[-1].partition("</tools>")[2] == (
        '<system>Be brief.<user>How is it ?<assistant><think>Look.</think>Wait.<tool_call>weather:{"city": "Oslo"}'
        "</tool_call><tool_call>weather:{}</tool_call><tool>3(weather call_1)<tool>4(weather call_2)<assistant>"
    )


def test_output_items_are_valid_input() -> None:
    """Send the output items with the next request, as clients of a stateless server do."""
    server = ScriptedServer(f"<think>\nI muse.\n</think>\n{CALL}")
    output = server.respond(tools=[WEATHER], reasoning={}).json["output"]
    result = {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "3"}
    whole(server, input=[{"role": "user", "content": "ask"}, *output, result], tools=[WEATHER])
    assert f"<user>ask<assistant><think>I muse.</think><tool_call>weather:{OSLO}</tool_call>" in server.prompts[-1]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"store": True}, "store"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0]"),
        ({"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"max_tokens": 1}, "max_tokens"),
        ({"max_completion_tokens": 1}, "max_completion_tokens"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ({"response_format": {"type": "text"}}, "response_format"),
        ({"n": 2}, "n"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"type": "computer_call"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0]"),
        ({"input": [{"role": "user", "content": 1}]}, "input[0]"),
        ({"input": [{"content": "a"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "name": "a", "arguments": "{}"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0]"),
        ({"input": []}, "input"),
        ({"instructions": "a", "input": [{"role": "user", "content": "a"}] * 4096}, "input"),
        ({"input": ""}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_unsupported_response_fields_are_rejected_by_name(fields: dict[str, Any], name: str) -> None:
    server = ScriptedServer()
    for stream in (False, True):
        rejected = server.respond(stream=stream, **fields)
        assert rejected.status == 400
        assert f"`{name}`" in rejected.message
        assert rejected.json["error"]["param"].partition(".")[0] == name.partition(".")[0]
    assert not server.engine.added


def test_neutral_response_fields_are_accepted() -> None:
    response = whole(
        ScriptedServer(),
        store=False,
        previous_response_id=None,
        background=False,
        truncation="disabled",
        include=["reasoning.encrypted_content"],
        text={"format": {"type": "text"}, "verbosity": "medium"},
        tools=[],
        service_tier="auto",
        prompt_cache_key="k",
        user="u",
        stream_options={"include_obfuscation": False},
    )
    assert response.output_text == "Hello."
    assert response.to_dict()["store"] is False


def test_responses_route_serves_adapter_or_returns_404() -> None:
    reply = ScriptedServer().respond(model="poet")
    assert (reply.json["model"], reply.headers["x-adapter-id"]) == ("poet", "poet")
    server = ScriptedServer()
    server.resolutions["gone"] = AdapterNotFoundError("no such adapter")
    assert server.respond(model="gone").status == 404


def test_early_failure_sets_status_and_late_failure_sends_event() -> None:
    class Failing(ScriptedServer):
        tokens = 0

        async def _generate(self, request: Any) -> None:
            for token_id in self.service.tokenizers.base.encode(self.output)[: self.tokens]:
                self.engine.emit_tokens(request.request_id, token_id)
            self.engine.fail(request.request_id, EngineError("it broke"))

    server = Failing("Hello there.")
    assert server.respond(stream=True).status == 500
    server.tokens = 2
    *_, last = parse_events(server.respond(stream=True))
    failed = EVENTS.validate_python(last)
    assert (failed.type, failed.response.status) == ("response.failed", "failed")
    assert "it broke" in failed.response.error.message


def test_failure_after_headers_follows_created_event(monkeypatch: pytest.MonkeyPatch) -> None:
    has_started, await_first_event = asyncio.Event(), RequestContext.await_first_event

    async def start_stream(*args: Any) -> Any:
        stream = await await_first_event(*args)
        has_started.set()
        return stream

    class Late(ScriptedServer):
        async def _generate(self, request: Any) -> None:
            await has_started.wait()
            self.engine.fail(request.request_id, EngineError("it broke"))

    monkeypatch.setattr(RequestContext, "await_first_event", start_stream)
    events = parse_events(Late(keep_alive_s=0.01).respond(stream=True))
    assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.failed"]
    assert [event["sequence_number"] for event in events] == [0, 1, 2]


def test_failed_response_contains_partial_text() -> None:
    writer = ResponseWriter({"id": "resp_1"}, None, None)
    events = [*writer.start(), *writer.feed("two ", 1), *writer.feed("words", 1), *writer.fail("it broke")]
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "two words"
