"""Hermes and Qwen: `<tool_call>` and `</tool_call>` around each call."""

from collections.abc import Sequence

from lorax_server.text.tools.grammar import CallGrammar, Marks, write_objects
from lorax_server.text.tools.json_section import JsonSection
from lorax_server.text.tools.parser import Section, ToolSet

OPENER, CLOSER = "<tool_call>", "</tool_call>"


class HermesFormat:
    openers = (OPENER,)
    starts = ""
    start_pattern = ""
    markers = (OPENER, CLOSER)

    def make_section(self, opener: str, tools: ToolSet) -> Section:
        return JsonSection(tools, CLOSER)

    def write_rules(self, calls: Sequence[CallGrammar], is_parallel: bool, marks: Marks) -> str:
        rules = write_objects(calls, "arguments")
        more = rf' ("\n" {marks.write(OPENER)} tagged)*' if is_parallel else ""
        return f"calls: tagged{more}\n" + f'tagged: "\\n" object "\\n" {marks.write(CLOSER)}\n{rules}'
