"""Llama 3.1 to 3.3: an answer that is a JSON object with `name` and `parameters`, or several with `;` between them."""

from lorax_server.text.tools.grammar import OBJECT_START, CallRules, ToolFormat, write_objects
from lorax_server.text.tools.json_section import JsonSection
from lorax_server.text.tools.parser import Section, ToolSet

OPENER = "<|python_tag|>"


class LlamaJsonFormat(ToolFormat):
    openers = (OPENER,)
    starts = "{"
    start_pattern = OBJECT_START
    markers = (OPENER,)

    def make_section(self, tools: ToolSet) -> Section:
        return JsonSection(tools, separator=";")

    def write_rules(self, rules: CallRules) -> list[str]:
        more = ' ("; " object)*' if rules.is_parallel else ""
        tag = f"{rules.marks.token(OPENER)}? " if rules.marks.has_token(OPENER) else ""
        return [f"calls: {tag}object{more}\n", write_objects(rules.calls, "parameters")]
