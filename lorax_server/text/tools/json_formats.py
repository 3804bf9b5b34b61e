"""Tool call formats based on JSON objects."""

from collections.abc import Sequence

from lorax_server.text.tools.grammar import (
    OBJECT_START,
    Call,
    CallRules,
    ToolFormat,
    to_lark_string,
    write_call_list,
    write_call_objects,
    write_json_calls,
)
from lorax_server.text.tools.json_tool_calls import JsonToolCallParser, ObjectReader
from lorax_server.text.tools.parser import MalformedCallError, ParsedEvent, ToolCallParser, ToolSet

TOOL_CALL_START, TOOL_CALL_END = "<tool_call>", "</tool_call>"
GRANITE_START, GRANITE_END = "<|tool_call|>", "<|/tool_call|>"
GRANITE_ALTERNATIVE_STARTS = ("<tool_call>", "<function_call>")
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS_MARKER, CALL_ID_MARKER, ARGS_MARKER = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MAX_NAME_CHARACTERS = 512  # function name and call ID


class HermesFormat(ToolFormat):
    """Hermes and Qwen: each call is enclosed in `<tool_call>` and `</tool_call>`."""

    opening_markers = (TOOL_CALL_START,)
    markers = (TOOL_CALL_START, TOOL_CALL_END)

    def make_call_parser(self, tools: ToolSet) -> ToolCallParser:
        return JsonToolCallParser(tools, TOOL_CALL_END)

    def write_rules(self, rules: CallRules) -> list[str]:
        opening_marker, closing_marker = map(rules.markers.write, (TOOL_CALL_START, TOOL_CALL_END))
        more = rf' ("\n" {opening_marker} tagged)*' if rules.is_parallel else ""
        tagged = rf'"\n" object "\n" {closing_marker}'
        return [f"calls: tagged{more}\ntagged: {tagged}\n", write_call_objects(rules.calls, "arguments")]

    def write_calls(self, calls: Sequence[Call]) -> str:
        return "\n".join(f"{TOOL_CALL_START}\n{call.to_json('arguments')}\n{TOOL_CALL_END}" for call in calls)


class GraniteFormat(ToolFormat):
    """Granite 3 and Phi-4: a list of calls after `<|tool_call|>`, or a single call in early Granite models."""

    opening_markers = (GRANITE_START, *GRANITE_ALTERNATIVE_STARTS)
    markers = (GRANITE_START, GRANITE_END, *GRANITE_ALTERNATIVE_STARTS)

    def make_call_parser(self, tools: ToolSet) -> ToolCallParser:
        return JsonToolCallParser(tools, GRANITE_END)

    def write_rules(self, rules: CallRules) -> list[str]:
        return ["calls: list\n", *write_call_list(rules, "arguments")]

    def write_calls(self, calls: Sequence[Call]) -> str:
        return GRANITE_START + write_json_calls(calls, "arguments")


class LlamaJsonFormat(ToolFormat):
    """Llama 3.1 to 3.3: objects with `name` and `parameters`, separated by `;`."""

    opening_markers = (PYTHON_TAG,)
    start_characters = "{"
    start_pattern = OBJECT_START
    markers = (PYTHON_TAG,)

    def make_call_parser(self, tools: ToolSet) -> ToolCallParser:
        return JsonToolCallParser(tools, separator=";")

    def write_rules(self, rules: CallRules) -> list[str]:
        more = ' ("; " object)*' if rules.is_parallel else ""
        tag = f"{rules.markers.token(PYTHON_TAG)}? " if rules.markers.has_token(PYTHON_TAG) else ""
        return [f"calls: {tag}object{more}\n", write_call_objects(rules.calls, "parameters")]

    def write_calls(self, calls: Sequence[Call]) -> str:
        return "; ".join(call.to_json("parameters") for call in calls)


class MistralToolCallParser(JsonToolCallParser):
    """Parses a list of calls, or a function name followed by arguments."""

    def __init__(self, tools: ToolSet) -> None:
        super().__init__(tools)
        self._has_started = False
        self._name = ""

    def consume(self, text: str, at: int, events: list[ParsedEvent]) -> int:
        character = text[at]
        if self._has_started or (character.isspace() and not self._name):
            return super().consume(text, at, events)
        if character == "{" and self._name:
            return self._consume_name(text, at, events)
        if character in "[{" and not self._name:
            self._has_started = True
            return super().consume(text, at, events)
        self._name += character
        self.is_malformed = len(self._name) > MAX_NAME_CHARACTERS
        return 1

    def _consume_name(self, text: str, at: int, events: list[ParsedEvent]) -> int:
        name = self._name.removesuffix(ARGS_MARKER).partition(CALL_ID_MARKER)[0].strip()
        if name not in self._tools.names:
            raise MalformedCallError
        self._has_started = True
        return self._consume_object(ObjectReader(name), text, at, events)


class MistralFormat(ToolFormat):
    """Mistral: `[TOOL_CALLS]` and a list of calls. Newer models write `[TOOL_CALLS]name[ARGS]{...}` for each call."""

    opening_markers = (TOOL_CALLS_MARKER,)
    markers = (TOOL_CALLS_MARKER, CALL_ID_MARKER, ARGS_MARKER)
    has_short_ids = True

    def make_call_parser(self, tools: ToolSet) -> ToolCallParser:
        return MistralToolCallParser(tools)

    def write_rules(self, rules: CallRules) -> list[str]:
        markers, is_parallel = rules.markers, rules.is_parallel
        if markers.has_token(ARGS_MARKER):  # only newer tokenizers have this token
            more = f" ({markers.write(TOOL_CALLS_MARKER)} call)*" if is_parallel else ""
            call_rules = [
                f"{to_lark_string(call.name)} {markers.write(ARGS_MARKER)} {call.rule}" for call in rules.calls
            ]
            return [f"calls: call{more}\n", f"call: {' | '.join(call_rules)}\n"]
        return ['calls: " "? list\n', *write_call_list(rules, "arguments")]

    def write_calls(self, calls: Sequence[Call]) -> str:
        return TOOL_CALLS_MARKER + write_json_calls(calls, "arguments")


class PlainJsonFormat(ToolFormat):
    """The format for all other models: an object with `name` and `arguments`, or a list of such objects."""

    start_characters = "{["
    start_pattern = OBJECT_START

    def make_call_parser(self, tools: ToolSet) -> ToolCallParser:
        return JsonToolCallParser(tools, separator=";")

    def write_rules(self, rules: CallRules) -> list[str]:
        choice = "object | list" if rules.is_parallel else "object"
        return [f"calls: {choice}\n", *write_call_list(rules, "arguments")]

    def write_calls(self, calls: Sequence[Call]) -> str:
        return write_json_calls(calls, "arguments") if len(calls) > 1 else calls[0].to_json("arguments")
