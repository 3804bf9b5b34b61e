"""Fifty typical JSON schemas, bounded so that even a random model finishes."""

from typing import Any

Schema = dict[str, Any]


def text(most: int = 6, **more: Any) -> Schema:
    return {"type": "string", "maxLength": most, **more}


def integer(least: int = 0, most: int = 99) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


def one_of(*values: Any) -> Schema:
    return {"enum": list(values)}


def array_of(items: Schema, most: int = 2, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def record(*optional: str, **properties: Schema) -> Schema:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


FLAG: Schema = {"type": "boolean"}
NOTHING: Schema = {"type": "null"}
DATE = text(10, format="date")
AMOUNT = {"type": "number", "minimum": 0, "maximum": 1000}
MONEY = record(amount=AMOUNT, currency=one_of("EUR", "USD", "GBP"))
ADDRESS = record(
    "line2", street=text(), line2=text(), postcode=text(5, pattern="^[0-9]{5}$"), country=one_of("DE", "FR")
)
PERSON = record(name=text(), age=integer(0, 120))
TREE: Schema = {
    "$defs": {
        "node": record("left", value=integer(), left={"anyOf": [{"$ref": "#/$defs/leaf"}, NOTHING]}),
        "leaf": PERSON,
    },
    "$ref": "#/$defs/node",
}

SCHEMAS: dict[str, Schema] = {
    "person": PERSON,
    "address": ADDRESS,
    "money": MONEY,
    "sentiment": record(
        label=one_of("positive", "negative", "neutral"), score={"type": "number", "minimum": 0, "maximum": 1}
    ),
    "entities": record(entities=array_of(record(text=text(), kind=one_of("person", "place", "date")))),
    "yes or no": record(answer=FLAG),
    "classification": one_of("bug", "feature", "question"),
    "rating": integer(1, 5),
    "list of words": array_of(text(), 3),
    "matrix": array_of(array_of(integer(0, 9), 2, 2), 2, 2),
    "pair": {"type": "array", "prefixItems": [text(), integer()], "items": False, "minItems": 2},
    "optional fields": record("nick", "mail", name=text(), nick=text(), mail=text()),
    "nullable": record(middle_name={"anyOf": [text(), NOTHING]}),
    "types": record(value={"type": ["integer", "null", "boolean"]}),
    "constant": record(kind={"const": "event"}, version={"const": 2}),
    "date": record(on=DATE),
    "time": record(at=text(20, format="time")),
    "identifier": record(id={"type": "string", "format": "uuid"}),
    "address of a machine": record(host={"type": "string", "format": "ipv4"}, port=integer(1, 65535)),
    "licence plate": text(9, pattern="^[A-Z]{1,3}-[A-Z]{2} [0-9]{1,4}$"),
    "version": text(8, pattern="^[0-9]+\\.[0-9]+$"),
    "colour": text(7, pattern="^#[0-9a-f]{6}$"),
    "invoice": record(number=text(8, pattern="^[0-9]{4,8}$"), lines=array_of(record(item=text(), price=MONEY), 2, 1)),
    "order": record(customer=PERSON, items=array_of(record(sku=text(), count=integer(1, 9))), paid=FLAG),
    "weather": record(city=text(), degrees=integer(-40, 50), sky=one_of("clear", "cloudy", "rain")),
    "function call": record(
        name=one_of("search", "open"), arguments=record("limit", query=text(), limit=integer(1, 10))
    ),
    "search query": record("filters", query=text(), filters=array_of(record(field=text(), equals=text()), 1)),
    "chart": record(kind=one_of("bar", "line"), points=array_of(record(x=integer(), y=integer()), 2)),
    "question": record(question=text(), choices=array_of(text(), 4, 4), right=integer(0, 3)),
    "recipe": record(title=text(), minutes=integer(1, 300), steps=array_of(text(), 2, 1)),
    "translation": record(language={"type": "string", "pattern": "^[a-z]{2}$"}, text=text()),
    "review": record("comment", stars=integer(1, 5), comment=text()),
    "ticket": record(title=text(), priority=one_of("low", "high", None), labels=array_of(one_of("a", "b"))),
    "contact": record(
        "phone", mail=text(12, pattern="^[a-z]{1,4}@[a-z]{1,4}\\.de$"), phone=text(9, pattern="^\\+[0-9]{4,8}$")
    ),
    "box": record(corner=array_of(integer(), 2, 2), size=record(width=integer(), height=integer())),
    "union": {"anyOf": [PERSON, record(company=text())]},
    "shape": {
        "anyOf": [record(kind={"const": "circle"}, radius=integer()), record(kind={"const": "square"}, side=integer())]
    },
    "either": {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "boolean"}]},
    "both": {"allOf": [{"type": "object", "properties": {"a": integer()}, "required": ["a"]}, record(a=integer(5, 7))]},
    "tree": TREE,
    "references": {"$defs": {"p": PERSON}, **record(first={"$ref": "#/$defs/p"}, second={"$ref": "#/$defs/p"})},
    "definitions": {"definitions": {"p": MONEY}, **record(price={"$ref": "#/definitions/p"})},
    "map": {
        "type": "object",
        "patternProperties": {"^[a-z]{1,3}$": integer()},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    "counts": {"type": "object", "additionalProperties": False, "properties": {"a": integer()}, "minProperties": 1},
    "even": {"type": "integer", "multipleOf": 2, "minimum": 0, "maximum": 100},
    "above": {"type": "integer", "exclusiveMinimum": 10, "exclusiveMaximum": 13},
    "share": record(share={"type": "number", "minimum": 0.25, "maximum": 0.75}),
    "described": {
        "title": "T",
        "description": "d",
        "$comment": "c",
        **record(a={**integer(), "default": 1, "examples": [2]}),
    },
    "settings": record("theme", theme=one_of("dark", "light"), size=integer(8, 32), beta=FLAG),
    "diagnosis": record(code=text(5, pattern="^[A-Z][0-9]{2}$"), sure=FLAG, notes=array_of(text(), 1)),
}
assert len(SCHEMAS) == 50
