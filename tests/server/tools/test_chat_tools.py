"""Tool calling in chat completions, whole and streamed, parsed with OpenAI's client."""

import json
from typing import Any

import pytest
from openai import LengthFinishReasonError
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from lorax_server.types import FinishReason
from tests.server.tools.scripted_server import HERMES, NOW, WEATHER, ScriptedServer

OSLO = '{"city": "Oslo"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>'
TOOLS = [WEATHER, NOW]


def whole(server: ScriptedServer, **fields: Any) -> Any:
    reply = server.chat(**fields)
    assert reply.status == 200, reply.message
    return ChatCompletion.model_validate(reply.json).choices[0]


def streamed(server: ScriptedServer, **fields: Any) -> Any:
    """Assemble the stream with OpenAI's client."""
    reply = server.chat(stream=True, **fields)
    assert reply.status == 200, reply.message
    state = ChatCompletionStreamState()
    for event in reply.events:
        state.handle_chunk(ChatCompletionChunk.model_validate(event))
    return state.get_final_completion().choices[0]


def both(server: ScriptedServer, **fields: Any) -> Any:
    """Send the request whole and streamed, check that both messages match, and return the message without call IDs."""
    result = []
    for send in (whole, streamed):
        choice = send(server, **fields)
        calls = choice.message.tool_calls or ()
        ids = [call.id for call in calls]
        assert len(set(ids)) == len(ids)
        assert all(ids)
        result.append(
            {
                "content": choice.message.content or None,
                "calls": [(call.type, call.function.name, call.function.arguments) for call in calls],
                "reasoning": getattr(choice.message, "reasoning_content", None),
                "reason": choice.finish_reason,
            }
        )
    assert result[0] == result[1]
    return result[0]


def test_text_and_tool_call_are_separated() -> None:
    server = ScriptedServer(f"Let me see.\n{CALL}")
    assert both(server, tools=TOOLS) == {
        "content": "Let me see.",
        "calls": [("function", "weather", OSLO)],
        "reasoning": None,
        "reason": "tool_calls",
    }
    assert server.prompts[0].startswith('<tools>{"type": "function", "function": {"name": "weather", "description": ')
    assert server.prompts[0].endswith("<user>ask<assistant>")
    assert not server.grammar


def test_completion_may_have_any_number_of_tool_calls() -> None:
    two = both(ScriptedServer(CALL + '\n<tool_call>{"name": "now"}</tool_call>'), tools=TOOLS)
    assert [call[1:] for call in two["calls"]] == [("weather", OSLO), ("now", "{}")]
    assert two["content"] is None
    none = both(ScriptedServer("I do not need any."), tools=TOOLS)
    assert (none["content"], none["calls"], none["reason"]) == ("I do not need any.", [], "stop")


@pytest.mark.parametrize("output", ['<tool_call>{"name": "nobody"}</tool_call>', "<tool_call>{", "a\n"])
def test_invalid_tool_calls_are_text(output: str) -> None:
    result = both(ScriptedServer(output), tools=TOOLS)
    assert (result["content"], result["calls"], result["reason"]) == (output, [], "stop")


def test_truncated_tool_call_is_text_without_grammar() -> None:
    server = ScriptedServer(CALL[:48])
    server.finish_reason = FinishReason.LENGTH
    cut = whole(server, tools=TOOLS)
    assert (cut.message.content, cut.message.tool_calls, cut.finish_reason) == (CALL[:48], None, "length")
    with pytest.raises(LengthFinishReasonError):
        streamed(server, tools=TOOLS)
    cut = whole(server, tools=TOOLS, tool_choice="required")  # a grammar allows partial arguments
    (call,) = cut.message.tool_calls
    assert (call.function.name, call.function.arguments, cut.finish_reason) == ("weather", CALL[45:48], "length")


def test_arguments_stream_incrementally_only_with_grammar() -> None:
    server = ScriptedServer(CALL)
    for choice, is_live in (("required", True), ("auto", False)):
        events = server.chat(stream=True, tools=TOOLS, tool_choice=choice).events
        deltas = [event["choices"][0]["delta"] for event in events]
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert calls[0]["function"] == {"name": "weather", "arguments": ""}
        assert {call["index"] for call in calls} == {0}
        assert [call.get("id") for call in calls[1:]] == [None] * (len(calls) - 1)
        pieces = [call["function"]["arguments"] for call in calls[1:]]
        assert "".join(pieces) == OSLO
        assert len(pieces) >= 3 if is_live else len(pieces) == 1


@pytest.mark.parametrize(
    ("tool_format", "output", "template"),
    [
        ("mistral", f'[TOOL_CALLS][{{"name": "weather", "arguments": {OSLO}}}]', "{{ tools }}[TOOL_CALLS]"),
        ("mistral", f"[TOOL_CALLS]weather[ARGS]{OSLO}", "{{ tools }}[TOOL_CALLS]"),
        ("granite", f'<|tool_call|>[{{"name": "weather", "arguments": {OSLO}}}]', "{{ tools }}<|tool_call|>"),
        (
            "llama3_json",
            f'<|python_tag|>{{"name": "weather", "parameters": {OSLO}}}',
            "{{ tools }}<|start_header_id|>",
        ),
        ("pythonic", '[weather(city="Oslo")]', "{{ tools }}[func_name1(a)]"),
        ("json", f'{{"name": "weather", "arguments": {OSLO}}}', "{{ tools }}"),
    ],
)
def test_tool_format_is_selected_by_template_or_flag(tool_format: str, output: str, template: str) -> None:
    """Some formats use special tokens as markers, which plain text output must not contain."""
    for server in (
        ScriptedServer(output, template),
        ScriptedServer(output, "{{ tools }}", tool_parsers=(tool_format,)),
    ):
        result = both(server, tools=TOOLS)
        assert (result["content"], result["calls"]) == (None, [("function", "weather", OSLO)])
        (call,) = whole(server, tools=TOOLS).message.tool_calls
        assert (len(call.id) == 9) == (tool_format == "mistral")
        assert "[TOOL_CALLS]" not in (both(server)["content"] or "")


def test_tool_parser_can_be_set_per_adapter() -> None:
    output = f'{{"name": "weather", "arguments": {OSLO}}}'
    server = ScriptedServer(output, tool_parsers=("poet=json", "other=mistral"))
    assert both(server, tools=TOOLS)["content"] == output
    assert both(server, tools=TOOLS, model="poet")["calls"] == [("function", "weather", OSLO)]


def test_tools_require_tool_template() -> None:
    server = ScriptedServer(CALL, "{{ messages[0].content }}")
    rejected = server.chat(tools=TOOLS)
    assert (rejected.status, rejected.json["error"]["param"]) == (400, "tools")
    assert "template" in rejected.message
    base = server.service.tokenizers.base
    base.chat_templates = {**base.chat_templates, "tool_use": HERMES}
    assert both(server, tools=TOOLS)["reason"] == "tool_calls"
    assert server.chat(tools=TOOLS, tool_choice="none").json["choices"][0]["message"]["content"] == CALL
    assert server.prompts[-1] == "ask"
    xml = ScriptedServer(CALL, "{{ tools }}<tool_call>name<arg_key>").chat(tools=TOOLS)
    assert (xml.status, "XML tool call format that is not supported" in xml.message) == (400, True)


# --- Tool choice ------------------------------------------------------------------------------------------------------

NAMED = {"type": "function", "function": {"name": "weather"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}


@pytest.mark.parametrize(
    ("choice", "names", "is_parallel"),
    [("required", {"weather", "now"}, True), (NAMED, {"weather"}, False), ("weather", {"weather"}, False),
     (ALLOWED, {"weather"}, True)],
)  # fmt: skip
def test_required_tool_calls_use_grammar(choice: Any, names: set[str], is_parallel: bool) -> None:
    server = ScriptedServer(CALL)
    assert both(server, tools=TOOLS, tool_choice=choice)["reason"] == "tool_calls"
    assert {name for name in ("weather", "now") if f'\\"{name}\\"' in server.grammar} == names
    assert ("tagged)*" in server.grammar) == is_parallel
    assert "now" in server.prompts[-1]  # the prompt lists all tools, so that the prefix cache still matches
    assert "trigger" not in server.grammar


def test_strict_or_single_calls_use_triggered_grammar() -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    server = ScriptedServer(CALL)
    assert both(server, tools=[strict, NOW])["reason"] == "tool_calls"
    assert "trigger" in server.grammar
    assert '"lenient": true' in server.grammar.split("arguments_1")[-1]
    assert '"lenient": true' not in server.grammar.split("arguments_0:")[1].split("\n")[0]
    assert "strict" not in server.prompts[-1]
    both(server, tools=TOOLS, parallel_tool_calls=False)
    assert ("trigger" in server.grammar, "tagged)*" in server.grammar) == (True, False)


@pytest.mark.parametrize(
    ("fields", "param", "expected"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "`tools`"),
        ({"tool_choice": NAMED}, "tool_choice", "`tools`"),
        ({"tools": TOOLS, "tool_choice": "nobody"}, "tool_choice", "'nobody'"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom", "custom": {}}}, "tool_choice", "'custom'"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "allowed_tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": 1}}, "tool_choice", "None"),
        ({"tools": [NOW, NOW]}, "tools", "two functions"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "'web_search'"),
        ({"tools": [{"type": "function"}]}, "tools[0]", "`function`"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0]", "letters"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 1}}]}, "tools[0]", "Schema"),
        ({"tools": [{"type": "function", "function": {"name": "a", "strict": 1}}]}, "tools[0]", "strict"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]},
            "tools[0]",
            "object",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"x-guidance": {}}}}]},
            "tools[0]",
            "x-guidance",
        ),
        *[
            ({"tools": [{"type": "function", "function": {"name": "a", "parameters": wrong}}]}, "tools[0]", word)
            for word, wrong in (
                ("properties", {"properties": ["a"]}),
                ("properties", {"properties": {"a": 1}}),
                ("required", {"required": "a"}),
                ("required", {"required": [["a"]]}),
                ("required", {"required": None}),
            )
        ],
        ({"tools": [NOW] * 129}, None, "128"),
        ({"tools": 1}, "tools", "list"),
    ],
)
def test_invalid_tools_are_rejected_by_name(fields: dict[str, Any], param: str | None, expected: str) -> None:
    server = ScriptedServer(CALL)
    rejected = server.chat(**fields)
    assert rejected.status == 400
    assert expected in rejected.message
    assert param in (rejected.json["error"]["param"], None)
    assert not server.engine.added


def test_too_large_tool_schemas_are_rejected() -> None:
    large = {"type": "object", "properties": {f"p{index}": {"const": "x" * 50} for index in range(5000)}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": large}}]
    server = ScriptedServer("Hello.")
    rejected = server.chat(tools=tools, tool_choice="required")
    assert (rejected.status, rejected.json["error"]["param"]) == (400, "tools")
    assert not server.engine.added


# --- Templates that do not render tools -------------------------------------------------------------------------------

BARE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
JSON_CALL = f'{{"name": "weather", "arguments": {OSLO}}}'


@pytest.mark.parametrize("choice", ["required", NAMED, ALLOWED])
def test_required_call_is_forced_without_tools_in_template(choice: Any) -> None:
    server = ScriptedServer(JSON_CALL, BARE)
    assert both(server, tools=TOOLS, tool_choice=choice)["calls"] == [("function", "weather", OSLO)]
    assert "weather" in server.grammar
    assert set(server.prompts) == {"<user>ask"}
    assert server.respond(tools=[{"type": "function", "name": "now"}], tool_choice="required").status == 200
    assert server.chat(tools=TOOLS).status == 400


def test_tool_parser_writes_tools_into_system_message() -> None:
    server = ScriptedServer(f"Well.\n{CALL}", BARE, tool_parsers=("hermes",))
    assert both(server, tools=TOOLS)["calls"] == [("function", "weather", OSLO)]
    system, user = server.prompts[-1].removeprefix("<system>").split("<user>")
    assert user == "ask"
    assert system.startswith("You can call these functions.")
    listed = system[system.index("<tools>\n") + 8 : system.index("\n</tools>")].split("\n")
    assert [json.loads(line) for line in listed] == TOOLS
    assert system.endswith(
        '<tool_call>\n{"name": "FUNCTION_NAME", "arguments": {"ARGUMENT_NAME": "VALUE"}}\n</tool_call>'
    )
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "ask"}]
    assert both(server, tools=TOOLS, messages=messages)["reason"] == "tool_calls"
    assert server.prompts[-1] == f"<system>Be brief.\n\n{system}<user>ask"
    both(server, tools=TOOLS, tool_choice="none")
    assert server.prompts[-1] == "<user>ask"


def test_tool_parser_leaves_prompt_unchanged_if_disabled_or_rendered() -> None:
    server = ScriptedServer(CALL, BARE, tool_parsers=("hermes",), describe_tools=False)
    assert both(server, tools=TOOLS)["reason"] == "tool_calls"
    assert server.prompts[-1] == "<user>ask"
    for fields, template in (({"tool_parsers": ("poet=json",)}, HERMES), ({"tool_parsers": ("hermes",)}, HERMES)):
        server = ScriptedServer(CALL, template, **fields)
        assert both(server, tools=TOOLS)["reason"] == "tool_calls"
        assert "You can call these functions" not in server.prompts[-1]


def test_tool_calls_and_results_become_text_if_template_does_not_render_them() -> None:
    server = ScriptedServer("Cold.", BARE, tool_parsers=("json",))
    first, second = (
        {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in (("weather", OSLO), ("now", "{oops"))
    )
    messages = [
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [first, second]},
        {"role": "tool", "tool_call_id": "call_weather", "content": "3"},
        {"role": "tool", "tool_call_id": "call_now", "content": "noon"},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "Cold."},
        {"role": "user", "content": "Thanks"},
    ]
    assert both(server, tools=TOOLS, messages=messages)["content"] == "Cold."
    oops = '{"name": "now", "arguments": {"arguments": "{oops"}}'
    assert server.prompts[-1].partition("<user>")[2] == (
        f"How is it?<assistant>Let me see.\n[{JSON_CALL}, {oops}]"
        "<user>Result of weather: 3\nResult of now: noon\nAnd?<assistant>Cold.<user>Thanks"
    )


# --- Default token limit ----------------------------------------------------------------------------------------------

FORMAT = {"type": "json_object"}
PLAIN = "{{ tools }}<tool_call>"  # a template without reasoning


@pytest.mark.parametrize(
    ("template", "fields", "limit"),
    [
        (PLAIN, {"response_format": FORMAT}, 50),
        (HERMES, {"response_format": FORMAT}, 50),
        (PLAIN, {"guided_regex": "a*", "min_tokens": 60}, 60),
        (PLAIN, {"response_format": FORMAT, "max_tokens": 90}, 90),
        (PLAIN, {"response_format": FORMAT, "max_completion_tokens": 10}, 10),
        (PLAIN, {}, None),
        (PLAIN, {"tools": TOOLS, "tool_choice": "required"}, 50),
        (PLAIN, {"tools": TOOLS, "parallel_tool_calls": False}, None),  # the model may write text instead
        (HERMES, {"tools": TOOLS, "tool_choice": "required"}, None),  # the model may reason before the call
    ],
)
def test_structured_output_has_default_token_limit(template: str, fields: dict[str, Any], limit: int | None) -> None:
    server = ScriptedServer(CALL, template, default_structured_tokens=50)
    assert server.chat(**fields).status == 200
    (request,) = server.engine.added
    assert request.stop.max_new_tokens == limit or (limit is None and request.stop.max_new_tokens > 50_000)
    if "max_tokens" not in fields and "tools" not in fields and "response_format" in fields:
        limits = {"text": {"format": FORMAT}, "max_output_tokens": fields.get("max_completion_tokens")}
        assert server.respond(**limits).status == 200
        assert server.engine.added[-1].stop.max_new_tokens == limit


def test_structured_output_has_default_token_limit_on_other_routes() -> None:
    server = ScriptedServer(default_structured_tokens=50)
    parameters = {"response_format": {"type": "json_object", "schema": {}}}
    for path, body in {
        "/generate": {"inputs": "ask", "parameters": parameters},
        "/v1/completions": {"prompt": "ask", "guided_choice": ["a"]},
    }.items():
        assert server.post(path, body).status == 200
    assert [request.stop.max_new_tokens for request in server.engine.added] == [50, 16]


# --- Conversations ----------------------------------------------------------------------------------------------------


def test_tool_calls_and_results_reach_template() -> None:
    server = ScriptedServer("It is 3 degrees.")
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": OSLO}}
    messages = [
        {"role": "user", "content": "How is it in Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Look."},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "3"}]},
        {"role": "assistant", "content": "3.", "tool_calls": []},
        {"role": "user", "content": "And now?"},
    ]
    assert both(server, messages=messages, tools=TOOLS)["content"] == "It is 3 degrees."
    rendered = server.prompts[-1].partition("</tools>")[2]
    assert rendered == (
        '<user>How is it in Oslo?<assistant><think>Look.</think><tool_call>weather:{"city": "Oslo"}</tool_call>'
        "<tool>3(weather call_1)<assistant>3.<user>And now?<assistant>"
    )


def test_invalid_json_arguments_reach_template_unchanged() -> None:
    server = ScriptedServer()
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{oops"}}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]}]
    assert server.chat(messages=messages).status == 200
    assert 'weather:"{oops"' in server.prompts[-1]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "tool_calls": [{"type": "custom"}]},
        {"role": "assistant", "tool_calls": [{"type": "function"}]},
        {"role": "user", "content": "", "tool_calls": [{"function": {"name": "a"}}]},
    ],
)
def test_invalid_tool_calls_in_history_are_rejected(message: dict[str, Any]) -> None:
    rejected = ScriptedServer().chat(messages=[message])
    assert (rejected.status, rejected.json["error"]["param"][:22]) == (400, "messages[0].tool_calls")


# --- Reasoning --------------------------------------------------------------------------------------------------------

THOUGHT = "<think>\nUse <tool_call>? Yes.\n</think>\n\n"


def test_reasoning_is_separated_on_request() -> None:
    server = ScriptedServer(THOUGHT + CALL)
    result = both(server, tools=TOOLS, separate_reasoning=True)
    assert (result["reasoning"], result["content"]) == ("Use <tool_call>? Yes.", None)
    assert result["calls"] == [("function", "weather", OSLO)]
    result = both(server, tools=TOOLS)  # not separated: reasoning is text, and tool calls in it are ignored
    assert (result["reasoning"], result["content"]) == (None, THOUGHT.rstrip())
    assert result["calls"] == [("function", "weather", OSLO)]
    assert both(ScriptedServer(THOUGHT + "Hi."))["content"] == THOUGHT + "Hi."
    result = both(ScriptedServer(THOUGHT + "Hi.", separate_reasoning=True))
    assert (result["reasoning"], result["content"]) == ("Use <tool_call>? Yes.", "Hi.")
    assert both(ScriptedServer(THOUGHT, separate_reasoning=True), separate_reasoning=False)["content"] == THOUGHT


def test_reasoning_opened_by_prompt_is_separated() -> None:
    server = ScriptedServer("I muse.\n</think>\nHi.")
    result = both(server, separate_reasoning=True, chat_template_kwargs={"think": True})
    assert (result["reasoning"], result["content"]) == ("I muse.", "Hi.")
    server = ScriptedServer("I muse.\n</think>\n" + CALL)
    result = both(server, tools=TOOLS, tool_choice="required", chat_template_kwargs={"think": True})
    assert result["calls"] == [("function", "weather", OSLO)]
    assert server.grammar.startswith("start: reasons")


def test_response_format_disables_reasoning_opened_by_prompt() -> None:
    fields = {"response_format": {"type": "json_object"}, "chat_template_kwargs": {"think": True}}
    result = both(ScriptedServer('{"a": 1}'), separate_reasoning=True, **fields)
    assert (result["reasoning"], result["content"]) == (None, '{"a": 1}')


def test_log_probabilities_cover_all_tool_call_tokens() -> None:
    server = ScriptedServer(f"Let me see.\n{CALL}")
    expected = len(server.service.tokenizers.base.encode(server.output)) + 1
    assert len(server.chat(tools=TOOLS, logprobs=True).json["choices"][0]["logprobs"]["content"]) == expected
    events = server.chat(tools=TOOLS, logprobs=True, stream=True).events
    listed = [event["choices"][0]["logprobs"] for event in events]
    assert sum(len(each["content"]) for each in listed if each) == expected


def test_several_choices_have_distinct_call_ids() -> None:
    reply = ScriptedServer(CALL).chat(tools=TOOLS, n=2).json
    ids = [choice["message"]["tool_calls"][0]["id"] for choice in reply["choices"]]
    assert len(set(ids)) == 2
    assert json.loads(reply["choices"][1]["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "Oslo"}
