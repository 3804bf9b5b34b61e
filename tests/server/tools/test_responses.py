"""OpenAI's Responses API: every event and every field as OpenAI's own types have them, without state."""

import asyncio
from typing import Any

import pytest
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from lorax_server.errors import AdapterNotFoundError, EngineError
from lorax_server.server.routes.responses.output import ResponseWriter
from lorax_server.types import FinishReason
from tests.server.fake_server import Reply
from tests.server.tools.talker import Talker

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
OSLO = '{"city": "Oslo"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>'
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Look it up",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CHANGING = {"id", "created_at", "completed_at", "call_id", "parsed", "parsed_arguments"}


def whole(talker: Talker, **fields: Any) -> Response:
    reply = talker.respond(**fields)
    assert reply.status == 200, reply.message
    return Response.model_validate(reply.json)


def streamed(talker: Talker, **fields: Any) -> tuple[list[Any], Response]:
    """Let OpenAI's types read each event, and its client put them together."""
    reply = talker.respond(stream=True, **fields)
    assert reply.status == 200, reply.message
    assert b"[DONE]" not in reply.body
    events = [EVENTS.validate_python(event) for event in events_of(reply)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    state: Any = ResponseStreamState(input_tools=[], text_format=omit)
    for event in events:
        state.handle_event(event)
    return events, state._completed_response or events[-1].response


def events_of(reply: Reply) -> list[Any]:
    """Check that each event has its name, which some clients go by."""
    names = [line[7:] for line in reply.body.decode().split("\n") if line.startswith("event: ")]
    events = [_event(piece) for piece in reply.body.decode().split("\n\n") if piece not in ("", ":")]  # keep-alives
    assert names == [event["type"] for event in events]
    return events


def _event(piece: str) -> Any:
    name, _, data = piece.partition("\ndata: ")
    assert name.startswith("event: ")
    return Reply(200, {}, data.encode(), []).json


def strip(value: Any) -> Any:
    """Leave out what differs between two answers."""
    if isinstance(value, dict):
        return {name: strip(each) for name, each in value.items() if name not in CHANGING}
    return [strip(each) for each in value] if isinstance(value, list) else value


def both(talker: Talker, **fields: Any) -> Response:
    """Ask twice; the two answers are the same."""
    first, (_, second) = whole(talker, **fields), streamed(talker, **fields)
    assert strip(first.to_dict()) == strip(second.to_dict())
    return first


def test_text() -> None:
    response = both(Talker("Hello there."), metadata={"a": "b"}, temperature=0.5)
    assert response.output_text == "Hello there."
    assert (response.status, response.temperature, response.metadata) == ("completed", 0.5, {"a": "b"})
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.usage.input_tokens_details.cached_tokens == 3


def test_the_events_of_text() -> None:
    events, _ = streamed(Talker("Hi."))
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
def test_calls(choice: Any) -> None:
    talker = Talker(f"{CALL}\n{CALL}")
    response = both(talker, tools=[WEATHER], tool_choice=choice)
    calls: list[Any] = response.output
    assert [(call.type, call.name, call.arguments, call.status) for call in calls] == [
        ("function_call", "weather", OSLO, "completed")
    ] * 2
    assert len({call.call_id for call in calls}) == 2
    assert response.tools[0].type == "function"
    assert '"name": "weather", "description": "Look it up"' in talker.prompts[0]
    assert bool(talker.grammar) == (choice != "auto")


def test_the_events_of_calls() -> None:
    events, _ = streamed(Talker(f"Let me see.\n{CALL}"), tools=[WEATHER], tool_choice="required")
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


def test_an_answer_that_is_cut_off() -> None:
    talker = Talker("Hello there.")
    talker.ends = FinishReason.LENGTH
    response = both(talker, max_output_tokens=1000)
    assert (response.status, response.output_text) == ("incomplete", "Hello there.")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"  # type: ignore[union-attr]


def test_a_call_that_is_cut_off_is_incomplete() -> None:
    talker = Talker(f"{CALL}\n{CALL[:50]}")
    talker.ends = FinishReason.LENGTH
    response = both(talker, tools=[WEATHER], tool_choice="required")
    calls: list[Any] = response.output
    assert [(call.type, call.status) for call in calls] == [
        ("function_call", "completed"),
        ("function_call", "incomplete"),
    ]
    assert response.status == "incomplete"


def test_an_answer_without_text_has_a_message() -> None:
    assert [item.type for item in both(Talker("")).output] == ["message"]


def test_reasoning() -> None:
    talker = Talker("<think>\nI muse.\n</think>\nHi.")
    response = both(talker, reasoning={"effort": "low"})
    thought, message = response.output
    assert thought.type == "reasoning"
    assert thought.content is not None
    assert (thought.content[0].text, response.output_text) == ("I muse.", "Hi.")
    assert message.type == "message"
    assert response.usage is not None
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    assert both(talker).output_text == talker.says


def test_log_probabilities() -> None:
    response = both(Talker("Hi."), include=["message.output_text.logprobs"], top_logprobs=0)
    (message,) = response.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert "".join(each.token for each in part.logprobs) == "Hi.<|im_end|>"


@pytest.mark.parametrize(
    ("says", "tools", "expected"),
    [
        ("a  b <tool", [WEATHER], "a  b <tool<|im_end|>"),
        ("a b", [WEATHER], "a b<|im_end|>"),
        ("<think>I muse.</think>a  b ", [], "a  b <|im_end|>"),
    ],
)
def test_log_probabilities_of_text_that_was_held_back(says: str, tools: list[Any], expected: str) -> None:
    fields = {"include": ["message.output_text.logprobs"], "reasoning": {}, "tools": tools}
    *_, message = both(Talker(says), **fields).output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert "".join(each.token for each in part.logprobs) == expected


def test_a_conversation() -> None:
    talker = Talker("Fine.")
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
    both(talker, input=items, instructions="Be brief.", tools=[WEATHER])
    assert talker.prompts[-1].partition("</tools>")[2] == (
        '<system>Be brief.<user>How is it ?<assistant><think>Look.</think>Wait.<tool_call>weather:{"city": "Oslo"}'
        "</tool_call><tool_call>weather:{}</tool_call><tool>3(weather call_1)<tool>4(weather call_2)<assistant>"
    )


def test_what_comes_back_can_be_sent_again() -> None:
    """Send the items of an answer with the next request, as clients of a server without state do."""
    talker = Talker(f"<think>\nI muse.\n</think>\n{CALL}")
    output = talker.respond(tools=[WEATHER], reasoning={}).json["output"]
    result = {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "3"}
    whole(talker, input=[{"role": "user", "content": "ask"}, *output, result], tools=[WEATHER])
    assert f"<user>ask<assistant><think>I muse.</think><tool_call>weather:{OSLO}</tool_call>" in talker.prompts[-1]


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
def test_what_needs_state_or_is_not_there_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    talker = Talker()
    for stream in (False, True):
        refused = talker.respond(stream=stream, **fields)
        assert refused.status == 400
        assert f"`{name}`" in refused.message
        assert refused.json["error"]["param"].partition(".")[0] == name.partition(".")[0]
    assert not talker.engine.added


def test_what_asks_for_nothing_passes() -> None:
    response = whole(
        Talker(),
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


def test_an_adapter_answers() -> None:
    reply = Talker().respond(model="poet")
    assert (reply.json["model"], reply.headers["x-adapter-id"]) == ("poet", "poet")
    talker = Talker()
    talker.answers["gone"] = AdapterNotFoundError("no such adapter")
    assert talker.respond(model="gone").status == 404


def test_a_failure_before_the_first_token_has_a_status_and_a_later_one_is_the_last_event() -> None:
    class Failing(Talker):
        tokens = 0

        async def _say(self, request: Any) -> None:
            for token_id in self.service.tokenizers.base.encode(self.says)[: self.tokens]:
                self.engine.give(request.request_id, token_id)
            self.engine.fail(request.request_id, EngineError("it broke"))

    talker = Failing("Hello there.")
    assert talker.respond(stream=True).status == 500
    talker.tokens = 2
    *_, last = events_of(talker.respond(stream=True))
    failed = EVENTS.validate_python(last)
    assert (failed.type, failed.response.status) == ("response.failed", "failed")
    assert "it broke" in failed.response.error.message


def test_a_failure_after_the_headers_comes_after_the_beginning() -> None:
    class Late(Talker):
        async def _say(self, request: Any) -> None:
            await asyncio.sleep(0.1)
            self.engine.fail(request.request_id, EngineError("it broke"))

    events = events_of(Late(keep_alive_s=0.01).respond(stream=True))
    assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.failed"]
    assert [event["sequence_number"] for event in events] == [0, 1, 2]


def test_a_failed_response_has_the_text_so_far() -> None:
    writer = ResponseWriter({"id": "resp_1"}, None, None)
    events = [*writer.start(), *writer.feed("two ", 1), *writer.feed("words", 1), *writer.fail("it broke")]
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "two words"
