"""Mistral: `[TOOL_CALLS]` and a list of calls, or, by newer models, `[TOOL_CALLS]name[ARGS]{...}` for each call."""

from lorax_server.text.tools.grammar import CallRules, ToolFormat, write_list, write_text
from lorax_server.text.tools.json_section import JsonSection
from lorax_server.text.tools.parser import MalformedCallError, ParsedEvent, Section, ToolSet

OPENER, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MAX_NAME = 512  # characters of a name, and of an id after it


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
        if len(self._name) > MAX_NAME:
            raise MalformedCallError(1)
        return 1

    def _take_name(self, text: str, at: int, events: list[ParsedEvent]) -> int:
        name = self._name.removesuffix(ARGUMENTS).partition(ID)[0].strip()
        if name not in self._tools.names:
            raise MalformedCallError
        self._has_begun = True
        self._begin(name)
        return self._take_object(text, at, events)


class MistralFormat(ToolFormat):
    openers = (OPENER,)
    markers = (OPENER, ID, ARGUMENTS)
    has_short_ids = True

    def make_section(self, tools: ToolSet) -> Section:
        return MistralSection(tools)

    def write_rules(self, rules: CallRules) -> list[str]:
        marks, is_parallel = rules.marks, rules.is_parallel
        if marks.has_token(ARGUMENTS):  # the token that newer tokenizers have
            more = f" ({marks.write(OPENER)} call)*" if is_parallel else ""
            named = [f"{write_text(call.name)} {marks.write(ARGUMENTS)} {call.rule}" for call in rules.calls]
            return [f"calls: call{more}\n", f"call: {' | '.join(named)}\n"]
        return ['calls: " "? list\n', *write_list(rules, "arguments")]
