"""Tests for schema and grammar limits: accepted grammars compile on a small stack, others are rejected."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from lorax_server.errors import InputError
from lorax_server.structured_output.grammars import (
    MAX_GBNF_CHARACTERS,
    from_choices,
    from_grammar,
    from_json_schema,
    from_regex,
)
from lorax_server.structured_output.matcher import compile_matcher
from lorax_server.structured_output.request_formats import read_structure
from lorax_server.structured_output.vocabulary import Vocabulary
from lorax_server.text.tokenizer import TextTokenizer
from lorax_server.text.tools.grammar import (
    MAX_GRAMMAR_CHARACTERS,
    FunctionSchema,
    MarkerWriter,
    ToolFormat,
    write_required_call_grammar,
)
from lorax_server.text.tools.json_formats import HermesFormat
from lorax_server.text.tools.pythonic import PythonicFormat
from lorax_server.text.tools.qwen3_coder import Qwen3CoderFormat
from lorax_server.text.tools.references import MAX_LEVELS, check_depth
from tests.models.tiny import make_tokenizer

STACK = 4 * 2**20  # bytes, as in a trial compile
COMPILE = """
import json, sys, threading
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

class Bytes:
    tokens = [*(bytes([byte]) for byte in range(256)), b"<|end|>"]
    special_token_ids, eos_token_id, bos_token_id = (256,), 256, None

    def __call__(self, text):
        return list(text)

def compile_all():
    tokenizer = LLTokenizer(TokenizerWrapper(Bytes()))
    for name, grammar in json.load(sys.stdin).items():
        print(name, file=sys.stderr, flush=True)
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        errors[name] = matcher.get_error()
        if not matcher.is_error():
            matcher.compute_logit_bias()

errors = {}
threading.stack_size(int(sys.argv[1]))
thread = threading.Thread(target=compile_all)
thread.start()
thread.join()
print(json.dumps(errors))
"""


def compile_in_process(texts: dict[str, str]) -> dict[str, str]:
    """Compile grammars in a child process with a small stack. Return their errors. Fail if the stack overflows."""
    command = [sys.executable, "-c", COMPILE, str(STACK)]
    done = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr.splitlines()[-1]
    errors: dict[str, str] = json.loads(done.stdout)
    return errors


# --- Depth ------------------------------------------------------------------------------------------------------------

Wrap = Callable[[Any], dict[str, Any]]
WRAPS: dict[str, Wrap] = {
    "items": lambda part: {"items": part},
    "additionalProperties": lambda part: {"type": "object", "additionalProperties": part},
    "properties": lambda part: {"type": "object", "properties": {"a": part}, "required": ["a"]},
    "patternProperties": lambda part: {"type": "object", "patternProperties": {"^a": part}},
    "prefixItems": lambda part: {"prefixItems": [part]},
    "anyOf": lambda part: {"anyOf": [part, {"type": "null"}]},
    "allOf": lambda part: {"allOf": [part]},
    "oneOf": lambda part: {"oneOf": [part]},
    "bare references": lambda part: part,
}


def chain(wrap: Wrap, count: int, per_definition: int) -> dict[str, Any]:
    """Nest subschemas `count` times, split into a chain of definitions."""
    part: dict[str, Any] = {}
    definitions: dict[str, Any] = {}
    for index in range(count):
        part = wrap(part)
        if index % per_definition == per_definition - 1:
            definitions[f"d{index}"], part = part, {"$ref": f"#/$defs/d{index}"}
    return {**part, "$defs": definitions}


def is_depth_accepted(schema: dict[str, Any]) -> bool:
    try:
        check_depth(schema)
    except InputError:
        return False
    return True


def deepest(wrap: Wrap, per_definition: int) -> dict[str, Any]:
    """Return the longest accepted chain."""
    low, high = 1, 2 * MAX_LEVELS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_depth_accepted(chain(wrap, middle, per_definition)) else (low, middle)
    return chain(wrap, low, per_definition)


def test_deepest_accepted_grammars_compile_on_small_stack() -> None:
    schemas = {f"{name}, {count} in each": deepest(wrap, count) for name, wrap in WRAPS.items() for count in (1, 50)}
    result = {name: from_json_schema(schema).grammar for name, schema in schemas.items()}
    assert compile_in_process(result) == dict.fromkeys(result, "")


@pytest.mark.parametrize("name", WRAPS)
@pytest.mark.parametrize("per_definition", [1, 10])
def test_long_reference_chain_is_rejected(name: str, per_definition: int) -> None:
    with pytest.raises(InputError, match=f"more than {MAX_LEVELS} levels"):
        from_json_schema(chain(WRAPS[name], 2600, per_definition))


def test_deep_json_schemas_are_rejected() -> None:
    deep: dict[str, Any] = {}
    for _ in range(MAX_LEVELS):
        deep = {"items": deep}
    for depth in (MAX_LEVELS, 20_000):
        text = '{"items": ' * depth + "{}" + "}" * depth
        with pytest.raises(InputError, match=r"levels|recursion|is not valid JSON"):
            from_json_schema(text)
    with pytest.raises(InputError, match="levels"):
        from_json_schema(deep)


def test_recursive_schema_has_finite_depth() -> None:
    tree = {"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#/$defs/a"}}}
    check_depth({**tree, "$defs": {"a": {"items": {"$ref": "#/$defs/b"}}, "b": {"items": {"$ref": "#/$defs/a"}}}})


def test_depth_is_measured_once_per_subschema() -> None:
    class Counted(dict[str, Any]):
        num_read = 0

        def get(self, key: str, default: Any = None) -> Any:
            self.num_read += key == "$ref"  # looked up once per read
            return super().get(key, default)

    parts = {f"d{i}": Counted({"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2}) for i in range(40)}
    check_depth({"$defs": parts, "anyOf": [{"$ref": f"#/$defs/d{i % 40}"} for i in range(1000)]})
    assert {part.num_read for part in parts.values()} == {1}


# --- User grammars ----------------------------------------------------------------------------------------------------


def test_llguidance_rejects_deeply_nested_groups() -> None:
    """llguidance limits nesting in regexes and in rules."""
    texts = {}
    for depth in (300, 100_000):
        texts[f"regex {depth}"] = from_regex("(" * depth + "a" + ")" * depth).grammar
        texts[f"classes {depth}"] = from_regex("[" * depth + "a" + "]" * depth).grammar
        pattern = {"type": "string", "pattern": "(" * depth + "a" + ")" * depth}
        texts[f"pattern {depth}"] = from_json_schema(pattern).grammar
    texts["rules"] = from_grammar("start: " + "(" * 700 + '"a"' + ")" * 700).grammar
    texts["nested grammars"] = from_grammar("start: " + "%lark {\nstart: " * 700 + '"a"' + "\n}" * 700).grammar
    errors = compile_in_process(texts)
    assert [name for name, error in errors.items() if not error] == []


def test_gbnf_with_many_rules_is_rejected_before_conversion() -> None:
    """The converter scans the whole grammar once for each rule in a chain."""
    rules = "".join(f"a{index}::=a{index + 1}\n" for index in range(500)) + 'a500::="x"\n'
    text = f"root::=b\nb::={'.' * 8000}a0\n{rules}"
    assert len(text) < MAX_GBNF_CHARACTERS
    with pytest.raises(InputError, match="too many rules"):
        from_grammar(text)
    assert (
        "start"
        in from_grammar("".join(f"a{index}::=a{index + 1}\n" for index in range(200)) + 'a200::="x"\nroot::=a0').grammar
    )


# --- Size -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda text: from_json_schema({"const": text}),
        from_regex,
        from_grammar,
        lambda text: from_choices([text]),
        lambda text: from_grammar(f"root ::= {text}"),
    ],
)
def test_oversized_grammars_are_rejected(make: Callable[[str], object]) -> None:
    with pytest.raises(InputError, match="characters"):
        make("x" * (MAX_GRAMMAR_CHARACTERS + 1))


@pytest.mark.parametrize("make", [from_regex, from_grammar])
def test_lone_surrogates_are_rejected(make: Callable[[str], object]) -> None:
    with pytest.raises(InputError, match="lone surrogates"):
        make("a\ud800")


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_object", "schema": '{"type": "object"}'},
        {"type": "json_schema", "json_schema": {"name": "person", "schema": '{"type": "object"}'}},
    ],
)
def test_response_format_schema_as_text_is_rejected(response_format: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="`response_format`: the JSON schema must be an object"):
        read_structure({"response_format": response_format})
    assert read_structure({"guided_json": '{"type": "object"}'}) == from_json_schema({"type": "object"})


PERSON = {
    "type": "object",
    "required": ["name", "ages"],
    "additionalProperties": False,
    "properties": {"name": {"type": "string"}, "ages": {"type": "array", "items": {"type": "integer"}}},
}
VALUE = {"name": "Ann", "ages": [1, 2]}
SERIALIZATIONS = {
    "compact": json.dumps(VALUE, separators=(",", ":")),
    "default": json.dumps(VALUE),
    "spaces": '{ "name" : "Ann" , "ages" : [ 1 , 2 ] }',
    "two spaces": '{"name":  "Ann", "ages": [1, 2]}',
    "indented": json.dumps(VALUE, indent=2),
    "tab": '{"name":\t"Ann", "ages": [1, 2]}',
}


@pytest.mark.parametrize(
    ("whitespace", "accepted"),
    [
        (None, ("compact", "default", "spaces")),
        ("", ("compact",)),
        (r"[ \n]{1,5}", ("compact", "default", "spaces", "two spaces", "indented")),
        (r"( |\t)+", ("compact", "default", "spaces", "two spaces", "tab")),
    ],
)
def test_whitespace_between_json_tokens_is_limited(whitespace: str | None, accepted: tuple[str, ...]) -> None:
    fields: dict[str, Any] = {"json": PERSON} | ({} if whitespace is None else {"whitespace_pattern": whitespace})
    structure = read_structure({"structured_outputs": fields})
    assert structure is not None
    if whitespace is None:
        assert structure == from_json_schema(PERSON)
    tokenizer = TextTokenizer(make_tokenizer().backend_tokenizer, {}, {})
    compiled = compile_matcher(Vocabulary.from_table(tokenizer.token_table()), structure.grammar)
    result = []
    for name, text in SERIALIZATIONS.items():
        matcher, ids = compiled.deep_copy(), tokenizer.encode(text, add_special_tokens=False)
        if matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting():
            result.append(name)
    assert tuple(result) == accepted


def test_tool_arguments_have_compact_whitespace() -> None:
    grammar = write_required_call_grammar(
        HermesFormat(), [FunctionSchema("f", PERSON, True)], True, MarkerWriter(lambda _: None), None
    )
    assert json.dumps({"whitespace_pattern": " "}) in grammar


@pytest.mark.parametrize("pattern", ["a", r"\s*", ".", "[^x]", "1", " {1,2", r"\u0020", 5, [" "]])
def test_whitespace_pattern_must_match_whitespace_only(pattern: Any) -> None:
    with pytest.raises(InputError, match="`whitespace_pattern` must be a regex of spaces"):
        read_structure({"structured_outputs": {"json_object": True, "whitespace_pattern": pattern}})


def test_non_json_numbers_are_rejected() -> None:
    for value in (float("nan"), float("inf")):
        with pytest.raises(InputError, match="cannot be written as JSON"):
            from_json_schema({"const": value})


# --- Tools ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [PythonicFormat(), Qwen3CoderFormat()], ids=["pythonic", "qwen3_coder"])
def test_grammar_depth_is_independent_of_parameter_count(form: ToolFormat) -> None:
    """With as many parameters as the size limit allows, a chain of rules would overflow the stack."""
    grammar, count = "", 256
    while True:
        properties: dict[str, Any] = {f"p{index}": {"type": "string"} for index in range(count)}
        functions = [FunctionSchema("f", {"type": "object", "properties": properties}, False)]
        try:
            grammar = write_required_call_grammar(form, functions, False, MarkerWriter(lambda _: None), None)
        except InputError:
            break
        count += count // 4
    assert count > 600
    assert compile_in_process({"tools": grammar}) == {"tools": ""}
