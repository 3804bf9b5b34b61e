"""Hermes and Qwen: `<tool_call>` and `</tool_call>` around each call."""

from lorax_server.text.tools.grammar import CallRules, ToolFormat, write_objects
from lorax_server.text.tools.json_section import JsonSection
from lorax_server.text.tools.parser import Section, ToolSet

OPENER, CLOSER = "<tool_call>", "</tool_call>"


class HermesFormat(ToolFormat):
    openers = (OPENER,)
    markers = (OPENER, CLOSER)

    def make_section(self, tools: ToolSet) -> Section:
        return JsonSection(tools, CLOSER)

    def write_rules(self, rules: CallRules) -> list[str]:
        opener, closer = map(rules.marks.write, (OPENER, CLOSER))
        more = rf' ("\n" {opener} tagged)*' if rules.is_parallel else ""
        tagged = rf'"\n" object "\n" {closer}'
        return [f"calls: tagged{more}\ntagged: {tagged}\n", write_objects(rules.calls, "arguments")]
