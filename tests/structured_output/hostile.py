"""Hostile schemas, patterns and grammars: deep, huge, ambiguous, exponential or malformed."""

import json
from typing import Any

Json = dict[str, Any] | bool


def nest_keyword(depth: int, keyword: str = "items") -> Json:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"type": "array" if keyword == "items" else "object", keyword: schema}
    return schema


def make_doubling_definitions(depth: int) -> Json:
    """Return definitions that each refer twice to the next, so expanding them gives 2**depth copies."""
    definitions: dict[str, Any] = {
        f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(depth)
    }
    return {"$defs": definitions | {f"d{depth}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def all_of(parts: list[Json]) -> Json:
    return {"allOf": parts}


def make_long_reference(length: int, count: int) -> Json:
    """Return a schema in which many subschemas use one long reference to a missing target."""
    part = {"oneOf": [{"$ref": "#/$defs/a"}], "discriminator": {"propertyName": "t"}}
    return {"$defs": {"a": {"$ref": "#" + "/" * length}}, "allOf": [part] * count}


def many_properties(count: int, **more: Any) -> Json:
    return {"type": "object", "properties": {f"p{i}": {"type": "string", **more} for i in range(count)}}


SCHEMAS: dict[str, Json] = {
    "deep arrays": nest_keyword(120),
    "deep objects": {"type": "object", "properties": {"a": nest_keyword(100, "additionalProperties")}},
    "itself": {"$ref": "#"},
    "a ring": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "nowhere": {"$ref": "#/$defs/nothing"},
    "far away": make_long_reference(100_000, 100),
    "another machine": {"$ref": "http://169.254.169.254/latest"},
    "a file": {"$ref": "file:///etc/passwd"},
    "a strange id": {"$id": "\x00::not a uri", "type": "string"},
    "an endless list": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    "doubling": make_doubling_definitions(12),
    "deep doubling": make_doubling_definitions(60),
    "a huge enum": {"enum": [f"value {i}" for i in range(10_000)]},
    "an enum of objects": {"enum": [{"a": [i, {"b": i}]} for i in range(2_000)]},
    "a long const": {"const": "x" * 100_000},
    "an empty enum": {"enum": []},
    "a false schema": False,
    "many properties": many_properties(3_000),
    "many patterns": many_properties(1_000, pattern="^(a|b)*c{3,40}[d-z]+$"),
    "many required": {"type": "object", "required": [f"r{i}" for i in range(5_000)]},
    "many branches": {"anyOf": [{"type": "object", "properties": {f"k{i}": {"const": i}}} for i in range(2_000)]},
    "oneOf of many": {"oneOf": [{"const": i} for i in range(500)]},
    "allOf of patterns": all_of([{"type": "string", "pattern": f".*{c}.*{c}.*"} for c in "abcdefghijklmnop"]),
    "allOf of objects": all_of([many_properties(40) for _ in range(60)]),
    "allOf of allOf": all_of([all_of([all_of([{"minimum": i}]) for i in range(20)]) for _ in range(50)]),
    "overlapping patterns": {"type": "object", "patternProperties": {f"(a|b)*{i}": {} for i in range(200)}},
    "a thousand items at least": {"type": "array", "minItems": 1_000, "items": {"type": "integer"}},
    "a billion items": {"type": "array", "minItems": 10**9},
    "a long string": {"type": "string", "minLength": 10**6, "maxLength": 10**7},
    "a longer string": {"type": "string", "minLength": 2**63},
    "a negative length": {"type": "string", "minLength": -1},
    "numbers as far as they go": {"type": "number", "minimum": -1e308, "maximum": 1e308},
    "a narrow range": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 5e-324},
    "multiples of little": {"type": "number", "multipleOf": 1e-300},
    "multiples of much": {"type": "integer", "multipleOf": 987_654_321},
    "an evil pattern": {"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$"},
    "a counting pattern": {"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"},
    "a pattern that looks around": {"type": "string", "pattern": "(?!a)b"},
    "a bad pattern": {"type": "string", "pattern": "(["},
    "types that do not exist": {"type": ["string", "nothing"]},
    "keywords of the wrong kind": {"type": "object", "properties": [], "required": "a"},
    "unicode": {"enum": ["\u202e", "\U0010ffff", "\x00", "\ufeff"]},
    "prefix items": {"type": "array", "prefixItems": [{"type": "string"}] * 3_000},
}
REGEXES: dict[str, str] = {
    "nested brackets": "(" * 5_000 + "a" + ")" * 5_000,
    "unclosed": "(" * 1_000,
    "ambiguous": "(a|a)*(a|aa)*(a?){50}a{50}",
    "a window": ".*a.{2000}",
    "windows": "|".join(f".*{c}.{{{i * 7}}}{c}" for i, c in enumerate("abcdefghijklmnopqrstuvwxyz", 1)),
    "counted and counted": "((((a{1,99}){1,99}){1,99}){1,99}){1,99}",
    "a great count": "a{1000000000}",
    "all of unicode": r"(\p{L}|\p{N}|\p{S}|\p{Z}){1,500}",
    "a thousand words": "|".join(f"word{i}[a-z]*{i}" for i in range(1_000)),
    "no text": "[^\\s\\S]",
    "without end": "(a*)*(b*)*(c*)*",
    "case": "(?i)" + "straße" * 200,
    "backward": r"(a)\1",
    "slashes": "/" * 3_000,
}
GRAMMARS: dict[str, str] = {
    "left recursion": "start: start start",
    "ambiguity": 'start: a\na: a a | "x" | ""',
    "much ambiguity": "start: a a a a a a a a\na: b*\nb: c*\nc: /x/*",
    "no start": 'a: "b"',
    "no rules": "%%%%",
    "an unknown name": "start: nothing",
    "deep brackets": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000,
    "many rules": "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1} | "b"' for i in range(3_000)) + '\nr3000: "c"',
    "many words": "start: " + " | ".join(f'"v{i}"' for i in range(8_000)),
    "an intersection": "start: /(.*a.{40})&(.*b.{40})&(.*c.{40})/",
    "lenient": 'start: %json {"x-guidance": {"lenient": "yes"}, "type": "nothing"}',
    "a schema in it": "start: %json " + json.dumps(nest_keyword(200)),
    "special tokens": "start: <|im_end|> <[0-999999999]>",
    "GBNF, unclosed": 'root ::= "a" (' * 50,
    "GBNF, deep": "root ::= " + "(" * 900 + '"a"' + ")" * 900,
    "GBNF, blank lines": 'root ::= "a"' + "\n" * 16_000,
    "GBNF, lines of blanks": 'root ::= "a"' + " \t\r\n" * 4_000,
    "GBNF, itself": "root ::= root root",
}
