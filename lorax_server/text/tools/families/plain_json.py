"""Any other model: an answer that is a JSON object with `name` and `arguments`, or a list of them."""

from lorax_server.text.tools.grammar import OBJECT_START, CallRules, ToolFormat, write_list
from lorax_server.text.tools.json_section import JsonSection
from lorax_server.text.tools.parser import Section, ToolSet


class PlainJsonFormat(ToolFormat):
    starts = "{["
    start_pattern = OBJECT_START

    def make_section(self, tools: ToolSet) -> Section:
        return JsonSection(tools, separator=";")

    def write_rules(self, rules: CallRules) -> list[str]:
        choice = "object | list" if rules.is_parallel else "object"
        return [f"calls: {choice}\n", *write_list(rules, "arguments")]
