"""JSON schemas for structured output benchmarks."""

from typing import Any

from lorax_server.structured_output.grammars import from_json_schema
from lorax_server.types import Structure


def make_object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def make_schema(number: int) -> Structure:
    """Return a schema for a list of objects that is too long to finish. Different numbers produce different schemas."""
    properties = {
        f"name_{number}": {"type": "string", "maxLength": 40},
        f"count_{number}": {"type": "integer"},
        "kind": {"enum": [f"kind {number + i}" for i in range(5)]},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        "place": {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}},
    }
    return from_json_schema({"type": "array", "items": make_object(properties), "minItems": 10_000})
