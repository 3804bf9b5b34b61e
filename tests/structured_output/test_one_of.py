"""Tests for rewriting `oneOf` as `anyOf` where a tag property distinguishes all alternatives."""

import json
from collections.abc import Iterator
from enum import IntEnum
from typing import Annotated, Any, Literal, Optional

import jsonschema
import pytest
from pydantic import BaseModel, Field, TypeAdapter

from lorax_server.errors import InputError
from lorax_server.structured_output.grammars import from_json_schema, prepare_schema
from lorax_server.structured_output.matcher import GrammarError, compile_matcher
from lorax_server.structured_output.one_of import MAX_STEPS, MAX_TAG_NAMES, rewrite_one_of
from lorax_server.structured_output.vocabulary import Vocabulary
from lorax_server.text.tokenizer import TextTokenizer
from lorax_server.text.tools.grammar import MAX_GRAMMAR_CHARACTERS
from lorax_server.text.tools.references import MAX_REFERENCE_CHARACTERS, resolve
from tests.models.tiny import make_tokenizer
from tests.structured_output.hostile import make_long_reference


class Size(IntEnum):
    SMALL = 1
    LARGE = 2


class Cat(BaseModel):
    kind: Literal["cat", "kitten"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    size: Size


class Version1(BaseModel):
    version: Literal[1]
    name: str


class Version2(BaseModel):
    version: Literal[2]
    name: str


class Small(BaseModel):
    size: Literal[Size.SMALL]


class Large(BaseModel):
    size: Literal[Size.LARGE]


class On(BaseModel):
    is_on: Literal[True]


class Off(BaseModel):
    is_on: Literal[False]


class Leaf(BaseModel):
    kind: Literal["leaf"]
    value: int


class Branch(BaseModel):
    kind: Literal["branch"]
    parts: "list[Annotated[Branch | Leaf, Field(discriminator='kind')]]"


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]
CAT, DOG, LEAF = {"kind": "kitten", "lives": 9}, {"kind": "dog", "size": 2}, {"kind": "leaf", "value": 1}
UNIONS: dict[str, tuple[Any, list[Any], list[Any]]] = {  # union, valid instances, invalid instances
    "texts": (Pet, [CAT, DOG], [{"kind": "dog", "lives": 9}, {"kind": "cow"}]),
    "numbers": (
        Annotated[Version1 | Version2, Field(discriminator="version")],
        [{"version": 1, "name": "a"}, {"version": 2, "name": "b"}],
        [{"version": 3, "name": "a"}, {"name": "a"}],
    ),
    "members": (Annotated[Small | Large, Field(discriminator="size")], [{"size": 1}, {"size": 2}], [{"size": 3}]),
    "booleans": (
        Annotated[On | Off, Field(discriminator="is_on")],
        [{"is_on": True}, {"is_on": False}],
        [{"is_on": "x"}, {}],
    ),
    "within another": (Annotated[Pet | Leaf, Field(discriminator="kind")], [CAT, LEAF], [{"kind": "leaf"}]),
    "or null": (Optional[Pet], [None, CAT], [{}]),  # noqa: UP045 - an alias that is not a type
    "recursive": (Branch, [{"kind": "branch", "parts": [LEAF, {"kind": "branch", "parts": []}]}], [LEAF]),
}
A, B = ({"type": "object", "properties": {"t": {"const": tag}}, "required": ["t"]} for tag in "ab")
NO_TYPE = {"properties": {"t": {"const": "b"}}, "required": ["t"]}  # accepts all values that are not objects
NOT_REQUIRED = {"type": "object", "properties": {"t": {"const": "b"}}}
NOT_REWRITTEN: dict[str, dict[str, Any]] = {
    "the same": {"oneOf": [A, A]},
    "no type": {"oneOf": [A, NO_TYPE]},
    "not required": {"oneOf": [A, NOT_REQUIRED]},
    "no tag": {"oneOf": [A, {"type": "object", "required": ["t"]}]},
    "one number": {"oneOf": [{**A, "properties": {"t": {"enum": [value]}}} for value in (1, 1.0)]},
    "objects": {"oneOf": [{**A, "properties": {"t": {"const": {"a": value}}}} for value in (1, 2)]},
    "another beside it": {"oneOf": [A, B], "anyOf": [A]},
    "a tag that is another": {"oneOf": [A, B], "discriminator": {"propertyName": "other"}},
    "nowhere": {"oneOf": [{"$ref": "#/$defs/none"}, {"$ref": "elsewhere"}, {"$ref": 1}]},
    "round in circles": {"oneOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"$ref": "#/$defs/a"}}},
    "itself": {"oneOf": [{"$ref": "#"}, A]},
    "values": {"const": {"oneOf": [A, B]}, "enum": [{"oneOf": [A, B]}], "default": {"oneOf": [A, B]}},
    "names": {"properties": {"oneOf": {"type": "string"}}},
    "nothing": {"oneOf": []},
    "no list": {"oneOf": A},
}


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer(make_tokenizer().backend_tokenizer, {}, {})


@pytest.mark.parametrize("name", UNIONS)
def test_pydantic_discriminated_unions_are_rewritten(name: str, tokenizer: TextTokenizer) -> None:
    union, right, wrong = UNIONS[name]
    schema = TypeAdapter(union).json_schema()
    assert "oneOf" in json.dumps(schema)
    assert "oneOf" not in json.dumps(rewrite_one_of(schema))
    compiled = compile_matcher(Vocabulary.from_table(tokenizer.token_table()), from_json_schema(schema).grammar)
    for instance in (*right, *wrong):
        matcher = compiled.deep_copy()
        ids = tokenizer.encode(json.dumps(instance), add_special_tokens=False)
        is_accepted = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
        is_valid = jsonschema.Draft202012Validator(schema).is_valid(instance)
        assert (is_accepted, is_valid) == (instance in right, instance in right), instance


def test_one_of_without_discriminator_is_rewritten() -> None:
    assert rewrite_one_of({"not": {"oneOf": [A, B]}}) == {"not": {"anyOf": [A, B]}}
    within = {"items": {"oneOf": [A, {"oneOf": [B, {**A, "properties": {"t": {"const": 1}}}]}]}}
    assert "oneOf" not in json.dumps(rewrite_one_of(within))


@pytest.mark.parametrize("name", NOT_REWRITTEN)
def test_overlapping_one_of_is_not_rewritten(name: str) -> None:
    assert rewrite_one_of(NOT_REWRITTEN[name]) == NOT_REWRITTEN[name]


def test_overlapping_one_of_error_suggests_any_of(tokenizer: TextTokenizer) -> None:
    with pytest.raises(GrammarError, match=r"oneOf.*anyOf"):
        compile_matcher(
            Vocabulary.from_table(tokenizer.token_table()), from_json_schema(NOT_REWRITTEN["the same"]).grammar
        )


class CountedList(list[Any]):
    """Counts how many of its items are read."""

    num_read = 0

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            self.num_read += 1
            yield item

    def __contains__(self, item: object) -> bool:
        return any(each == item for each in self)


class CountedDict(dict[str, Any]):
    """Counts how many of its keys are looked up or listed."""

    num_read = 0

    def __iter__(self) -> Iterator[str]:
        for name in super().__iter__():
            self.num_read += 1
            yield name

    def get(self, key: str, default: Any = None) -> Any:
        self.num_read += 1
        return super().get(key, default)


def tagged(definition: str) -> dict[str, Any]:
    return {"oneOf": [{"$ref": f"#/$defs/{definition}"}, A], "discriminator": {"propertyName": "t"}}


@pytest.mark.parametrize("count", [300, 1200])
def test_shared_enum_is_read_in_bounded_steps(count: int) -> None:
    """Many unions refer to one definition with a large enum and a long `required`."""
    values, required = CountedList(f"v{i}" for i in range(count)), CountedList([*map(str, range(count)), "t"])
    large = {"type": "object", "properties": {"t": {"enum": values}}, "required": required}
    schema = {"allOf": [tagged("large")] * count, "$defs": {"large": large}}
    joined = rewrite_one_of(schema, 10 * count)
    assert "anyOf" in joined["allOf"][0]  # the first unions are within the limit
    assert "oneOf" in joined["allOf"][-1]
    assert values.num_read + required.num_read <= 10 * count
    values.num_read = required.num_read = 0
    prepare_schema(schema)
    num_characters = len(json.dumps(schema))
    assert values.num_read + required.num_read <= 2 * num_characters  # twice: also written as JSON


def test_union_of_large_models_is_within_the_limit() -> None:
    """Each of the 100 alternatives requires 100 properties."""
    names = [f"p{i}" for i in range(100)]
    parts = [{"type": "object", "properties": {"t": {"const": i}}, "required": [*names, "t"]} for i in range(100)]
    assert prepare_schema({"oneOf": parts}) == {"anyOf": parts}


def test_only_first_properties_are_checked_as_tags() -> None:
    properties = CountedDict({f"p{i}": {} for i in range(1000)})
    first = {"type": "object", "properties": properties, "required": ["p0"]}
    schema = {"allOf": [{"oneOf": [{"$ref": "#/$defs/a"}]}] * 100, "$defs": {"a": first}}
    assert rewrite_one_of(schema) == schema
    assert properties.num_read < 100 * 3 * MAX_TAG_NAMES


def test_hostile_references_take_bounded_steps() -> None:
    """Each subschema refers to all others, so there are exponentially many paths."""
    parts = CountedDict(
        {f"p{index}": {"anyOf": [{"$ref": f"#/$defs/p{other}"} for other in range(60)]} for index in range(60)}
    )
    many = {"allOf": [tagged("p0")] * 1000, "$defs": parts}
    assert rewrite_one_of(many) == many
    assert parts.num_read <= MAX_STEPS
    for each in (make_long_reference(200, 1000), make_long_reference(100_000, 1000)):
        assert isinstance(each, dict)
        assert rewrite_one_of(each) == each


class Unprintable:
    """A placeholder for an object that is too large to convert to a string."""

    def __str__(self) -> str:
        raise AssertionError("the object is converted to a string")


def test_resolve_rejects_invalid_references() -> None:
    root = {"a/b": {"~": 1}, "c": [{}]}
    assert resolve("#", root) is root
    assert resolve("#/a~1b/~0", root) == 1
    for reference in (
        "#/c/0",
        "#/none/none",
        "elsewhere#/c",
        "#c",
        "",
        None,
        Unprintable(),
        "#/c" + "/" * MAX_REFERENCE_CHARACTERS,
    ):
        assert resolve(reference, root) is None
    assert rewrite_one_of({"oneOf": [{"$ref": Unprintable()}]})["oneOf"]


def test_resolve_stops_at_missing_target() -> None:
    root = CountedDict()
    assert resolve("#/none" + "/none" * 40, root) is None
    assert root.num_read == 1


def test_one_of_with_embedded_id_is_not_rewritten() -> None:
    """References in a subschema with an `$id` refer to that subschema, not to the root."""
    union = {"oneOf": [A, B]}
    assert "anyOf" in from_json_schema({**union, "$id": "urn:whole"}).grammar
    inner = {"$id": "urn:part", "$defs": {"a": A}, "oneOf": [{"$ref": "#/$defs/a"}, B]}
    for schema in ({**union, "items": inner}, {"$id": "urn:whole", **union, "items": inner}):
        assert "anyOf" not in from_json_schema(schema).grammar


def test_oversized_schema_is_rejected_before_rewriting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorax_server.structured_output.grammars.rewrite_one_of", None)
    with pytest.raises(InputError, match=f"{MAX_GRAMMAR_CHARACTERS} characters"):
        from_json_schema({"const": "x" * MAX_GRAMMAR_CHARACTERS})
