"""Request and response bodies of OpenAI's Responses API. The route checks input items when it converts them."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from lorax_server.server.schemas.lorax import FailFastList, OpenSchema, PositiveInt, Schema, describing_unsupported
from lorax_server.server.schemas.openai import MAX_MESSAGES, CommonRequest, NumAlternatives, ToolChoice
from lorax_server.server.schemas.unsupported_fields import RESPONSES

FUNCTION_TOOL_SCHEMA = {
    "required": ["type", "name"],
    "properties": {
        "type": {"const": "function"},
        "name": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,64}$"},
        "parameters": {"type": "object"},
    },
}
FunctionTools = Annotated[
    FailFastList[Annotated[dict[str, Any], Field(json_schema_extra=FUNCTION_TOOL_SCHEMA)]], Field(max_length=128)
]
InputItems = Annotated[FailFastList[dict[str, Any]], Field(max_length=MAX_MESSAGES, json_schema_extra={"minItems": 1})]


class TextOptions(OpenSchema):
    format: dict[str, Any] | None = None
    verbosity: str | None = Field(default=None, json_schema_extra={"enum": ["medium", None]})


class ReasoningOptions(Schema):
    """Reasoning options. Reasoning is returned as separate items, and `effort` is passed to the chat template."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(CommonRequest):
    """A conversation to continue. Responses are not stored."""

    model_config = ConfigDict(json_schema_extra=describing_unsupported(RESPONSES))

    input: str | InputItems
    instructions: str | None = None
    max_output_tokens: PositiveInt | None = None
    tools: FunctionTools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: FailFastList[str] | None = None
    top_logprobs: NumAlternatives | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = Field(default=None, description="Must not be true: this server does not store responses")
    truncation: str | None = Field(default=None, json_schema_extra={"enum": ["disabled", None]})
    max_tool_calls: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None


# --- Responses --------------------------------------------------------------------------------------------------------


class OutputItem(OpenSchema):
    id: str
    type: Literal["message", "function_call", "reasoning"]
    status: Literal["in_progress", "completed", "incomplete"]


class InputTokensDetails(Schema):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Schema):
    reasoning_tokens: int


class ResponseUsage(Schema):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseObject(OpenSchema):
    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    output: list[OutputItem]
    usage: ResponseUsage | None = None


class ResponseEvent(OpenSchema):
    """One stream event with one of OpenAI's event types. The last event contains the whole response."""

    type: str
    sequence_number: int
