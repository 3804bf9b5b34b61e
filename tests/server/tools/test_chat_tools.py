"""Tools of chats: offered by the template, called in the answer, whole and streamed, as OpenAI's client reads them."""

import json
from typing import Any

import pytest
from openai import LengthFinishReasonError
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from lorax_server.types import FinishReason
from tests.server.tools.talker import HERMES, NOW, WEATHER, Talker

OSLO = '{"city": "Oslo"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>'
TOOLS = [WEATHER, NOW]


def whole(talker: Talker, **fields: Any) -> Any:
    reply = talker.chat(**fields)
    assert reply.status == 200, reply.message
    return ChatCompletion.model_validate(reply.json).choices[0]


def streamed(talker: Talker, **fields: Any) -> Any:
    """Let OpenAI's client put the events together."""
    reply = talker.chat(stream=True, **fields)
    assert reply.status == 200, reply.message
    state = ChatCompletionStreamState()
    for event in reply.events:
        state.handle_chunk(ChatCompletionChunk.model_validate(event))
    return state.get_final_completion().choices[0]


def both(talker: Talker, **fields: Any) -> Any:
    """Ask twice, and return the one message that both answers have, without ids of calls."""
    found = []
    for ask in (whole, streamed):
        choice = ask(talker, **fields)
        calls = choice.message.tool_calls or ()
        ids = [call.id for call in calls]
        assert len(set(ids)) == len(ids)
        assert all(ids)
        found.append(
            {
                "content": choice.message.content or None,
                "calls": [(call.type, call.function.name, call.function.arguments) for call in calls],
                "reasoning": getattr(choice.message, "reasoning_content", None),
                "reason": choice.finish_reason,
            }
        )
    assert found[0] == found[1]
    return found[0]


def test_a_call() -> None:
    talker = Talker(f"Let me see.\n{CALL}")
    assert both(talker, tools=TOOLS) == {
        "content": "Let me see.",
        "calls": [("function", "weather", OSLO)],
        "reasoning": None,
        "reason": "tool_calls",
    }
    assert talker.prompts[0].startswith('<tools>{"type": "function", "function": {"name": "weather", "description": ')
    assert talker.prompts[0].endswith("<user>ask<assistant>")
    assert not talker.grammar


def test_several_calls_and_none() -> None:
    two = both(Talker(CALL + '\n<tool_call>{"name": "now"}</tool_call>'), tools=TOOLS)
    assert [call[1:] for call in two["calls"]] == [("weather", OSLO), ("now", "{}")]
    assert two["content"] is None
    none = both(Talker("I do not need any."), tools=TOOLS)
    assert (none["content"], none["calls"], none["reason"]) == ("I do not need any.", [], "stop")


@pytest.mark.parametrize("says", ['<tool_call>{"name": "nobody"}</tool_call>', "<tool_call>{", "a\n"])
def test_calls_that_are_none_are_text(says: str) -> None:
    found = both(Talker(says), tools=TOOLS)
    assert (found["content"], found["calls"], found["reason"]) == (says, [], "stop")


def test_a_call_that_is_cut_off() -> None:
    talker = Talker(CALL[:48])
    talker.ends = FinishReason.LENGTH
    cut = whole(talker, tools=TOOLS)
    assert (cut.message.content, cut.message.tool_calls, cut.finish_reason) == (CALL[:48], None, "length")
    with pytest.raises(LengthFinishReasonError):
        streamed(talker, tools=TOOLS)
    cut = whole(talker, tools=TOOLS, tool_choice="required")  # arguments that were enforced as far as they come
    (call,) = cut.message.tool_calls
    assert (call.function.name, call.function.arguments, cut.finish_reason) == ("weather", CALL[45:48], "length")


def test_arguments_are_streamed_as_they_come_where_they_are_enforced() -> None:
    talker = Talker(CALL)
    for choice, is_live in (("required", True), ("auto", False)):
        events = talker.chat(stream=True, tools=TOOLS, tool_choice=choice).events
        deltas = [event["choices"][0]["delta"] for event in events]
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert calls[0]["function"] == {"name": "weather", "arguments": ""}
        assert {call["index"] for call in calls} == {0}
        assert [call.get("id") for call in calls[1:]] == [None] * (len(calls) - 1)
        pieces = [call["function"]["arguments"] for call in calls[1:]]
        assert "".join(pieces) == OSLO
        assert len(pieces) >= 3 if is_live else len(pieces) == 1


@pytest.mark.parametrize(
    ("form", "says", "template"),
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
def test_every_family_by_its_template_or_by_its_name(form: str, says: str, template: str) -> None:
    """Markers of some families are special tokens, which other answers do not show."""
    for talker in (Talker(says, template), Talker(says, "{{ tools }}", tool_parsers=(form,))):
        found = both(talker, tools=TOOLS)
        assert (found["content"], found["calls"]) == (None, [("function", "weather", OSLO)])
        (call,) = whole(talker, tools=TOOLS).message.tool_calls
        assert (len(call.id) == 9) == (form == "mistral")
        assert "[TOOL_CALLS]" not in (both(talker)["content"] or "")


def test_an_adapter_has_a_parser_of_its_own() -> None:
    says = f'{{"name": "weather", "arguments": {OSLO}}}'
    talker = Talker(says, tool_parsers=("poet=json", "other=mistral"))
    assert both(talker, tools=TOOLS)["content"] == says
    assert both(talker, tools=TOOLS, model="poet")["calls"] == [("function", "weather", OSLO)]


def test_templates_for_tools() -> None:
    talker = Talker(CALL, "{{ messages[0].content }}")
    refused = talker.chat(tools=TOOLS)
    assert (refused.status, refused.json["error"]["param"]) == (400, "tools")
    assert "template" in refused.message
    base = talker.service.tokenizers.base
    base.chat_templates = {**base.chat_templates, "tool_use": HERMES}
    assert both(talker, tools=TOOLS)["reason"] == "tool_calls"
    assert talker.chat(tools=TOOLS, tool_choice="none").json["choices"][0]["message"]["content"] == CALL
    assert talker.prompts[-1] == "ask"
    xml = Talker(CALL, "{{ tools }}<tool_call>name<arg_key>").chat(tools=TOOLS)
    assert (xml.status, "XML tool call format that is not supported" in xml.message) == (400, True)


# --- What is asked for ------------------------------------------------------------------------------------------------

NAMED = {"type": "function", "function": {"name": "weather"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}


@pytest.mark.parametrize(
    ("choice", "names", "is_parallel"),
    [("required", {"weather", "now"}, True), (NAMED, {"weather"}, False), ("weather", {"weather"}, False),
     (ALLOWED, {"weather"}, True)],
)  # fmt: skip
def test_required_calls_have_a_grammar(choice: Any, names: set[str], is_parallel: bool) -> None:
    talker = Talker(CALL)
    assert both(talker, tools=TOOLS, tool_choice=choice)["reason"] == "tool_calls"
    assert {name for name in ("weather", "now") if f'\\"{name}\\"' in talker.grammar} == names
    assert ("tagged)*" in talker.grammar) == is_parallel
    assert "now" in talker.prompts[-1]  # the prompt has all of them, so that it is found in the cache
    assert "trigger" not in talker.grammar


def test_strict_functions_and_single_calls_have_a_grammar_once_a_call_has_begun() -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    talker = Talker(CALL)
    assert both(talker, tools=[strict, NOW])["reason"] == "tool_calls"
    assert "trigger" in talker.grammar
    assert '"lenient": true' in talker.grammar.split("arguments_1")[-1]
    assert '"lenient": true' not in talker.grammar.split("arguments_0:")[1].split("\n")[0]
    assert "strict" not in talker.prompts[-1]
    both(talker, tools=TOOLS, parallel_tool_calls=False)
    assert ("trigger" in talker.grammar, "tagged)*" in talker.grammar) == (True, False)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
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
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 1}}]}, "tools[0]", "schema"),
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
def test_wrong_tools_are_refused_by_name(fields: dict[str, Any], param: str | None, words: str) -> None:
    talker = Talker(CALL)
    refused = talker.chat(**fields)
    assert refused.status == 400
    assert words in refused.message
    assert param in (refused.json["error"]["param"], None)
    assert not talker.engine.added


def test_schemas_that_are_too_large_together_are_refused() -> None:
    large = {"type": "object", "properties": {f"p{index}": {"const": "x" * 50} for index in range(5000)}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": large}}]
    talker = Talker("Hello.")
    refused = talker.chat(tools=tools, tool_choice="required")
    assert (refused.status, refused.json["error"]["param"]) == (400, "tools")
    assert not talker.engine.added


# --- Conversations ----------------------------------------------------------------------------------------------------


def test_a_conversation_with_calls_and_results() -> None:
    talker = Talker("It is 3 degrees.")
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": OSLO}}
    messages = [
        {"role": "user", "content": "How is it in Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Look."},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "3"}]},
        {"role": "assistant", "content": "3.", "tool_calls": []},
        {"role": "user", "content": "And now?"},
    ]
    assert both(talker, messages=messages, tools=TOOLS)["content"] == "It is 3 degrees."
    talked = talker.prompts[-1].partition("</tools>")[2]
    assert talked == (
        '<user>How is it in Oslo?<assistant><think>Look.</think><tool_call>weather:{"city": "Oslo"}</tool_call>'
        "<tool>3(weather call_1)<assistant>3.<user>And now?<assistant>"
    )


def test_arguments_that_are_no_json_reach_the_template_as_they_are() -> None:
    talker = Talker()
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{oops"}}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]}]
    assert talker.chat(messages=messages).status == 200
    assert 'weather:"{oops"' in talker.prompts[-1]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "tool_calls": [{"type": "custom"}]},
        {"role": "assistant", "tool_calls": [{"type": "function"}]},
        {"role": "user", "content": "", "tool_calls": [{"function": {"name": "a"}}]},
    ],
)
def test_wrong_calls_of_a_conversation_are_refused(message: dict[str, Any]) -> None:
    refused = Talker().chat(messages=[message])
    assert (refused.status, refused.json["error"]["param"][:22]) == (400, "messages[0].tool_calls")


# --- Reasoning --------------------------------------------------------------------------------------------------------

THOUGHT = "<think>\nUse <tool_call>? Yes.\n</think>\n\n"


def test_reasoning_is_separated_where_it_is_asked_for() -> None:
    talker = Talker(THOUGHT + CALL)
    found = both(talker, tools=TOOLS, separate_reasoning=True)
    assert (found["reasoning"], found["content"]) == ("Use <tool_call>? Yes.", None)
    assert found["calls"] == [("function", "weather", OSLO)]
    found = both(talker, tools=TOOLS)  # not asked for: it is text, in which no call is looked for
    assert (found["reasoning"], found["content"]) == (None, THOUGHT.rstrip())
    assert found["calls"] == [("function", "weather", OSLO)]
    assert both(Talker(THOUGHT + "Hi."))["content"] == THOUGHT + "Hi."
    found = both(Talker(THOUGHT + "Hi.", separate_reasoning=True))
    assert (found["reasoning"], found["content"]) == ("Use <tool_call>? Yes.", "Hi.")
    assert both(Talker(THOUGHT, separate_reasoning=True), separate_reasoning=False)["content"] == THOUGHT


def test_reasoning_that_the_prompt_begins() -> None:
    talker = Talker("I muse.\n</think>\nHi.")
    found = both(talker, separate_reasoning=True, chat_template_kwargs={"think": True})
    assert (found["reasoning"], found["content"]) == ("I muse.", "Hi.")
    talker = Talker("I muse.\n</think>\n" + CALL)
    found = both(talker, tools=TOOLS, tool_choice="required", chat_template_kwargs={"think": True})
    assert found["calls"] == [("function", "weather", OSLO)]
    assert talker.grammar.startswith("start: reasons")


def test_an_answer_with_a_form_has_no_reasoning_that_the_prompt_begins() -> None:
    fields = {"response_format": {"type": "json_object"}, "chat_template_kwargs": {"think": True}}
    found = both(Talker('{"a": 1}'), separate_reasoning=True, **fields)
    assert (found["reasoning"], found["content"]) == (None, '{"a": 1}')


def test_log_probabilities_beside_calls() -> None:
    talker = Talker(f"Let me see.\n{CALL}")
    expected = len(talker.service.tokenizers.base.encode(talker.says)) + 1
    assert len(talker.chat(tools=TOOLS, logprobs=True).json["choices"][0]["logprobs"]["content"]) == expected
    events = talker.chat(tools=TOOLS, logprobs=True, stream=True).events
    listed = [event["choices"][0]["logprobs"] for event in events]
    assert sum(len(each["content"]) for each in listed if each) == expected


def test_several_answers() -> None:
    reply = Talker(CALL).chat(tools=TOOLS, n=2).json
    ids = [choice["message"]["tool_calls"][0]["id"] for choice in reply["choices"]]
    assert len(set(ids)) == 2
    assert json.loads(reply["choices"][1]["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "Oslo"}
