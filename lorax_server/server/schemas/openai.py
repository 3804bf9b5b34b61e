"""Request and response bodies of the OpenAI routes, including the fields that LoRAX and vLLM add."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from lorax_server.server.schemas.lorax import (
    AdapterNames,
    CommonOptions,
    FailFastList,
    Fraction,
    NonNegativeInt,
    PositiveInt,
    ResponseFormat,
    Schema,
    StopString,
    Tier,
    TokenIds,
    describing_unsupported,
)
from lorax_server.server.schemas.unsupported_fields import CHAT, COMPLETIONS

# Tools and tool calls. `server.tools.tool_definitions` checks the fields of tools.
FUNCTION_SCHEMA = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,64}$"},
        "description": {"type": "string"},
        "parameters": {"type": "object", "description": "A JSON Schema"},
        "strict": {"type": ["boolean", "null"]},
    },
}
TOOL_SCHEMA = {
    "required": ["type", "function"],
    "properties": {"type": {"const": "function"}, "function": FUNCTION_SCHEMA},
}
Tools = Annotated[FailFastList[Annotated[dict[str, Any], Field(json_schema_extra=TOOL_SCHEMA)]], Field(max_length=128)]
ToolChoice = Annotated[
    str | dict[str, Any],
    Field(description="`none`, `auto`, `required`, or a function: `{type: function, function: {name}}`"),
]


class CalledFunction(Schema):
    name: str
    arguments: str = Field(description="JSON-encoded arguments")


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


# --- Requests ---------------------------------------------------------------------------------------------------------

MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1
OpenAISeed = Annotated[
    int,  # pydantic would write these limits as floats
    Field(ge=MIN_SEED, le=MAX_SEED, json_schema_extra={"minimum": MIN_SEED, "maximum": MAX_SEED}),
]
NumAlternatives = Annotated[int, Field(json_schema_extra={"minimum": 0, "maximum": 20})]
Count = Annotated[int, Field(ge=1, lt=2**31)]
MAX_PROMPTS = 2048
MAX_MESSAGES = 4096
StopTokenIds = FailFastList[Annotated[int, Field(ge=0, lt=2**31)]]
PROMPT_LIST_FIELD = Field(max_length=MAX_PROMPTS, json_schema_extra={"minItems": 1})
PromptText = Annotated[str, Field(json_schema_extra={"minLength": 1})]
PromptIds = Annotated[TokenIds, Field(json_schema_extra={"minItems": 1})]


class StreamOptions(Schema):
    include_usage: bool | None = None


class CommonRequest(CommonOptions):
    """Fields shared by all OpenAI routes."""

    model: str | None = Field(
        default=None,
        description="An adapter: `name`, `base:name` or `name@revision`; null, empty or its name: the base model",
    )
    max_tokens: PositiveInt | None = None
    temperature: Annotated[float, Field(json_schema_extra={"minimum": 0, "maximum": 2})] | None = None
    n: Count | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stop: StopString | FailFastList[StopString] | None = None
    seed: OpenAISeed | None = None
    user: str | None = None

    # LoRAX extensions.
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    typical_p: Fraction | None = None
    adapter_id: str | None = Field(default=None, description="The adapter, if `model` is empty or names the base model")

    # vLLM extensions.
    min_tokens: NonNegativeInt | None = None
    ignore_eos: bool | None = False
    stop_token_ids: StopTokenIds | None = None
    cache_salt: str | None = None
    structured_outputs: dict[str, Any] | None = Field(
        default=None, description="One of `json`, `regex`, `choice`, `grammar`, or `json_object`"
    )
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: FailFastList[str] | None = None
    guided_grammar: str | None = Field(default=None, description="A grammar in llguidance's Lark dialect or in GBNF")

    response_format: ResponseFormat | None = Field(default=None, description="The format of the completion text")

    @property
    def wants_usage(self) -> bool:
        """Return True if the client requested usage in a separate last chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def usage_in_last_chunk(self) -> bool:
        """Return True if `include_usage` is not set. As in LoRAX, the last choice chunk then contains the usage."""
        return self.stream_options is None or self.stream_options.include_usage is None


class FanOutRequest(CommonRequest):
    """Fields of routes that can send one prompt to several models."""

    models: AdapterNames | None = Field(
        default=None, description="Complete the prompt with each of these models; the choices are in this order"
    )


class CompletionRequest(FanOutRequest):
    """One or more prompts to complete."""

    model_config = ConfigDict(json_schema_extra=describing_unsupported(COMPLETIONS))

    prompt: (
        PromptText
        | Annotated[FailFastList[PromptText], PROMPT_LIST_FIELD]
        | PromptIds
        | Annotated[FailFastList[PromptIds], PROMPT_LIST_FIELD]
    )
    best_of: Count | None = None
    echo: bool | None = False
    logprobs: NumAlternatives | None = None
    max_tokens: PositiveInt | None = Field(
        default=None, description="null: 16. With `echo`, 0 returns only the prompt's log probabilities"
    )
    add_special_tokens: bool | None = True

    @property
    def is_scoring(self) -> bool:
        """Return True if only the prompt is scored. One token is generated and not returned."""
        return self.max_tokens == 0


class TextPart(Schema):
    type: str
    text: str | None = None


class Message(Schema):
    """A chat message. Fields such as `tool_calls` are passed to the chat template."""

    role: str
    content: str | Annotated[FailFastList[TextPart | dict[str, Any]], Field(max_length=MAX_MESSAGES)] | None = None
    name: str | None = None
    tool_calls: FailFastList[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChatCompletionRequest(FanOutRequest):
    """A conversation to continue."""

    model_config = ConfigDict(json_schema_extra=describing_unsupported(CHAT))

    messages: FailFastList[Message] = Field(max_length=MAX_MESSAGES, json_schema_extra={"minItems": 1})
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = False
    top_logprobs: NumAlternatives | None = None
    guideline: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    add_generation_prompt: bool | None = True
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = Field(default=None, description="false: at most one tool call")
    tool_prompt: str | None = None
    separate_reasoning: bool | None = Field(
        default=None, description="Return text in `<think>` as `reasoning_content`; null: the server's setting"
    )


# --- Responses --------------------------------------------------------------------------------------------------------


ModelOfChoice = Field(default=None, description="The model of the choice; only with `models`")


class PromptTokensDetails(Schema):
    cached_tokens: int


class CompletionTokensDetails(Schema):
    """Draft tokens, if speculative decoding verified any."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Schema):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class _ResponseBase(Schema):
    id: str
    created: int
    model: str
    system_fingerprint: str | None = None


class CompletionLogprobs(Schema):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float | None] | None] | None


class CompletionChoice(Schema):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    model: str | None = ModelOfChoice


class CompletionResponse(_ResponseBase):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None


class CompletionChunk(CompletionResponse):
    """One stream event. After the last chunk, the stream sends `[DONE]`."""

    adapter_tier: Tier | None = None


class TopLogprob(Schema):
    token: str
    logprob: float | None
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Schema):
    content: list[TokenLogprob] | None
    refusal: None = None


class AssistantMessage(Schema):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None


class ChatChoice(Schema):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    model: str | None = ModelOfChoice


class ChatCompletionResponse(_ResponseBase):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(Schema):
    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCallDelta] | None = None
    reasoning_content: str | None = None


class ChatChunkChoice(Schema):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    model: str | None = ModelOfChoice


class ChatCompletionChunk(_ResponseBase):
    """One stream event. After the last chunk, the stream sends `[DONE]`."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    adapter_tier: Tier | None = None


class Model(Schema):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None
    weight_format: str | None = None
    weight_bytes: int | None = None


class ModelList(Schema):
    object: Literal["list"]
    data: list[Model]


class ErrorDetails(Schema):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIErrorResponse(Schema):
    error: ErrorDetails


# --- Adapters ---------------------------------------------------------------------------------------------------------


class AdapterRequest(Schema):
    adapter_id: str = Field(json_schema_extra={"minLength": 1})
    adapter_source: str | None = None
    api_token: str | None = None


class LoadRequest(AdapterRequest):
    name: str | None = Field(
        default=None, description="A name for the adapter that requests can use; null: only its id"
    )
    pin: bool | None = Field(default=None, description="Whether the adapter stays on the device; null: unchanged")


class Adapter(Schema):
    id: str
    object: Literal["adapter"]
    source: str | None
    hash: str | None
    state: str
    bytes: int | None
    pinned: bool
    requests: int
    uses: int
    error: str | None = None


class AdapterList(Schema):
    object: Literal["list"]
    data: list[Adapter]
    has_more: bool
    next: str | None = Field(description="`after` for the next page; null: this is the last page")


class VersionWeights(Schema):
    """Selects one version, or divides the requests among versions. Set exactly one field."""

    version: int | None = Field(default=None, description="The version for all requests.")
    weights: dict[str, Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]] | None = Field(
        default=None, description="Relative numbers of requests by version.", examples=[{"v1": 0.9, "v2": 0.1}]
    )


class AdapterVersionInfo(Schema):
    id: str
    version: int
    weight: float
    hash: str | None
    requests: int


class AdapterVersionList(Schema):
    id: str
    object: Literal["list"]
    data: list[AdapterVersionInfo]


class VllmLoadRequest(Schema):
    lora_name: str = Field(json_schema_extra={"minLength": 1})
    lora_path: str = Field(json_schema_extra={"minLength": 1})
    load_inplace: bool | None = False


class VllmUnloadRequest(Schema):
    lora_name: str = Field(json_schema_extra={"minLength": 1})
    lora_int_id: int | None = None
