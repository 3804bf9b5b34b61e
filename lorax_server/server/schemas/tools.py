"""Bodies of tools and calls of OpenAI's chats. `server.tools.offer` checks the fields of tools."""

from typing import Annotated, Any, Literal

from pydantic import Field

from lorax_server.server.schemas.lorax import Many, Schema

FUNCTION = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,64}$"},
        "description": {"type": "string"},
        "parameters": {"type": "object", "description": "A JSON schema"},
        "strict": {"type": ["boolean", "null"]},
    },
}
TOOL = {
    "required": ["type", "function"],
    "properties": {"type": {"const": "function"}, "function": FUNCTION},
}
Tools = Annotated[Many[Annotated[dict[str, Any], Field(json_schema_extra=TOOL)]], Field(max_length=128)]
ToolChoice = Annotated[
    str | dict[str, Any],
    Field(description="`none`, `auto`, `required`, or a function: `{type: function, function: {name}}`"),
]


class CalledFunction(Schema):
    name: str
    arguments: str = Field(description="A JSON text")


class ToolCall(Schema):
    id: str
    type: Literal["function"]
    function: CalledFunction


class CalledFunctionDelta(Schema):
    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(Schema):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunctionDelta
