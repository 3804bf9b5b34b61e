"""Formats whose calls are JSON objects."""

from lorax_server.text.tools.grammar import OBJECT_START, CallRules, ToolFormat, write_list, write_objects, write_text
from lorax_server.text.tools.json_section import JsonSection, ObjectReader
from lorax_server.text.tools.parser import MalformedCallError, ParsedEvent, Section, ToolSet

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
GRANITE_OPENER, GRANITE_CLOSER = "<|tool_call|>", "<|/tool_call|>"
GRANITE_OTHER_OPENERS = ("<tool_call>", "<function_call>")
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MAX_NAME = 512  # characters of a name, and of an id after it


class HermesFormat(ToolFormat):
    """Hermes and Qwen: `<tool_call>` and `</tool_call>` around each call."""

    openers = (TOOL_CALL,)
    markers = (TOOL_CALL, TOOL_CALL_END)

    def make_section(self, tools: ToolSet) -> Section:
        return JsonSection(tools, TOOL_CALL_END)

    def write_rules(self, rules: CallRules) -> list[str]:
        opener, closer = map(rules.marks.write, (TOOL_CALL, TOOL_CALL_END))
        more = rf' ("\n" {opener} tagged)*' if rules.is_parallel else ""
        tagged = rf'"\n" object "\n" {closer}'
        return [f"calls: tagged{more}\ntagged: {tagged}\n", write_objects(rules.calls, "arguments")]


class GraniteFormat(ToolFormat):
    """Granite 3 and Phi-4: a list of calls after `<|tool_call|>`; Granite's first models have a single one."""

    openers = (GRANITE_OPENER, *GRANITE_OTHER_OPENERS)
    markers = (GRANITE_OPENER, GRANITE_CLOSER, *GRANITE_OTHER_OPENERS)

    def make_section(self, tools: ToolSet) -> Section:
        return JsonSection(tools, GRANITE_CLOSER)

    def write_rules(self, rules: CallRules) -> list[str]:
        return ["calls: list\n", *write_list(rules, "arguments")]


class LlamaJsonFormat(ToolFormat):
    """Llama 3.1 to 3.3: an object with `name` and `parameters`, or several with `;` between them."""

    openers = (PYTHON_TAG,)
    starts = "{"
    start_pattern = OBJECT_START
    markers = (PYTHON_TAG,)

    def make_section(self, tools: ToolSet) -> Section:
        return JsonSection(tools, separator=";")

    def write_rules(self, rules: CallRules) -> list[str]:
        more = ' ("; " object)*' if rules.is_parallel else ""
        tag = f"{rules.marks.token(PYTHON_TAG)}? " if rules.marks.has_token(PYTHON_TAG) else ""
        return [f"calls: {tag}object{more}\n", write_objects(rules.calls, "parameters")]


class MistralSection(JsonSection):
    """Reads both forms: a name begins with anything but a bracket."""

    def __init__(self, tools: ToolSet) -> None:
        super().__init__(tools)
        self._has_begun = False
        self._name = ""

    def take(self, text: str, at: int, events: list[ParsedEvent]) -> int:
        character = text[at]
        if self._has_begun or (character.isspace() and not self._name):
            return super().take(text, at, events)
        if character == "{" and self._name:
            return self._take_name(text, at, events)
        if character in "[{" and not self._name:
            self._has_begun = True
            return super().take(text, at, events)
        self._name += character
        self.is_malformed = len(self._name) > MAX_NAME
        return 1

    def _take_name(self, text: str, at: int, events: list[ParsedEvent]) -> int:
        name = self._name.removesuffix(ARGS).partition(CALL_ID)[0].strip()
        if name not in self._tools.names:
            raise MalformedCallError
        self._has_begun = True
        return self._take_object(ObjectReader(name), text, at, events)


class MistralFormat(ToolFormat):
    """Mistral: `[TOOL_CALLS]` and a list of calls, or, by newer models, `[TOOL_CALLS]name[ARGS]{...}` for each call."""

    openers = (TOOL_CALLS,)
    markers = (TOOL_CALLS, CALL_ID, ARGS)
    has_short_ids = True

    def make_section(self, tools: ToolSet) -> Section:
        return MistralSection(tools)

    def write_rules(self, rules: CallRules) -> list[str]:
        marks, is_parallel = rules.marks, rules.is_parallel
        if marks.has_token(ARGS):  # the token that newer tokenizers have
            more = f" ({marks.write(TOOL_CALLS)} call)*" if is_parallel else ""
            named = [f"{write_text(call.name)} {marks.write(ARGS)} {call.rule}" for call in rules.calls]
            return [f"calls: call{more}\n", f"call: {' | '.join(named)}\n"]
        return ['calls: " "? list\n', *write_list(rules, "arguments")]


class PlainJsonFormat(ToolFormat):
    """Any other model: an object with `name` and `arguments`, or a list of them."""

    starts = "{["
    start_pattern = OBJECT_START

    def make_section(self, tools: ToolSet) -> Section:
        return JsonSection(tools, separator=";")

    def write_rules(self, rules: CallRules) -> list[str]:
        choice = "object | list" if rules.is_parallel else "object"
        return [f"calls: {choice}\n", *write_list(rules, "arguments")]
