"""Request and response bodies of the LoRAX routes, with LoRAX's field names, types and defaults.

Field limits in `json_schema_extra` are documentation only; `routes.lorax` checks them with LoRAX's error messages.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from lorax_server.server.schemas.unsupported_fields import GENERATE, describe_unsupported
from lorax_server.types import MAX_FLOAT

_T = TypeVar("_T")
# Report only the first invalid item, because reporting a million items takes half a minute.
FailFastList = Annotated[list[_T], Field(fail_fast=True)]

Seed = Annotated[int, Field(json_schema_extra={"minimum": 0, "maximum": 2**64 - 1})]
PositiveInt32 = Annotated[int, Field(json_schema_extra={"minimum": 1, "maximum": 2**31 - 1})]
NonNegativeInt = Annotated[int, Field(json_schema_extra={"minimum": 0})]
PositiveInt = Annotated[int, Field(json_schema_extra={"minimum": 1})]
Fraction = Annotated[float, Field(json_schema_extra={"exclusiveMinimum": 0, "maximum": 1})]
Penalty = Annotated[float, Field(json_schema_extra={"minimum": -2, "maximum": 2})]
# `parse_logit_bias` checks the values, because pydantic would report every invalid value.
LogitBias = Annotated[
    dict[str, Any],
    Field(json_schema_extra={"additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}),
]
StopString = Annotated[str, Field(json_schema_extra={"minLength": 1, "maxLength": 1024})]
TokenIds = FailFastList[NonNegativeInt]


class Schema(BaseModel):
    """The base class in strict mode: strings and numbers are not converted to each other. Unknown fields are ignored,
    as in LoRAX.
    """

    model_config = ConfigDict(strict=True, protected_namespaces=())


def describing_unsupported(route: str) -> Callable[[dict[str, Any]], None]:
    """Return a schema hook that lists the fields of other servers that the route rejects."""

    def add(schema: dict[str, Any]) -> None:
        schema["description"] = f"{schema.get('description', '')}\n\n{describe_unsupported(route)}".lstrip()

    return add


class OpenSchema(Schema):
    """Like `Schema`, but keeps unknown fields in `model_extra`, so that routes can check them."""

    model_config = ConfigDict(extra="allow")


class MergedAdapters(Schema):
    ids: Annotated[FailFastList[str], Field(json_schema_extra={"minItems": 1, "maxItems": 32})]
    weights: FailFastList[float] | None = None
    """One weight per id, each from -1000 to 1000. If left out, all weights are 1."""
    merge_strategy: str | None = Field(
        default=None, json_schema_extra={"enum": ["linear", "ties", "dare_linear", "dare_ties", "", None]}
    )
    density: Annotated[float, Field(ge=0, le=1)] | None = None
    """The fraction of weights to keep. null or 0 keeps all."""
    majority_sign_method: str | None = Field(default=None, json_schema_extra={"enum": ["total", "frequency", "", None]})


class ResponseFormat(Schema):
    """The output format: JSON, optionally with a JSON Schema. `text` means no constraint."""

    type: str = Field(json_schema_extra={"enum": ["text", "json_object", "json_schema"]})
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    json_schema: dict[str, Any] | None = None


MAX_FAN_OUT = 32  # adapters that one request may ask
AdapterNames = Annotated[FailFastList[str], Field(min_length=1, max_length=MAX_FAN_OUT)]


class CommonOptions(OpenSchema):
    """Options shared by the LoRAX and OpenAI routes."""

    adapter_source: str | None = Field(default=None, description="hub, local or s3; null: the server's default")
    merged_adapters: MergedAdapters | None = None
    api_token: str | None = Field(default=None, description="Access token for the adapter source")
    repetition_penalty: Annotated[float, Field(json_schema_extra={"minimum": 1e-3, "maximum": 1e3})] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    top_p: Fraction | None = None
    min_p: Annotated[float, Field(json_schema_extra={"minimum": 0, "maximum": 1})] | None = None
    logit_bias: LogitBias | None = Field(default=None, description="Values to add to token scores, by token id")
    ignore_eos_token: bool | None = False
    speculation: Literal["off", "auto"] | None = Field(
        default=None,
        description="off: generate one token per step, and do not use the completion for drafts; null: auto",
    )


class GenerateParameters(CommonOptions):
    """Generation options. A null value is the same as an omitted field."""

    model_config = ConfigDict(json_schema_extra=describing_unsupported(GENERATE))

    adapter_id: str | None = Field(
        default=None, description="The adapter name; null, empty or `__base_model__`: no adapter"
    )
    adapter_ids: AdapterNames | None = Field(
        default=None, description="Complete the prompt with each of these adapters, and return `choices`"
    )
    best_of: NonNegativeInt | None = Field(
        default=None, description="Sample this many completions and return the most likely one; 0 means 1"
    )
    temperature: Annotated[float, Field(json_schema_extra={"minimum": 0, "maximum": MAX_FLOAT})] | None = None
    top_k: PositiveInt32 | None = None
    typical_p: Annotated[float, Field(json_schema_extra={"exclusiveMinimum": 0, "exclusiveMaximum": 1})] | None = None
    do_sample: bool | None = False
    max_new_tokens: PositiveInt32 | None = Field(default=None, description="null: as many as fit into the context")
    min_new_tokens: NonNegativeInt | None = None
    return_full_text: bool | None = Field(default=None, description="Start `generated_text` with the prompt")
    stop: FailFastList[StopString] | None = []
    truncate: PositiveInt32 | None = Field(
        default=None, description="Keep only this many tokens from the end of the prompt"
    )
    watermark: bool | None = False
    details: bool | None = False
    decoder_input_details: bool | None = False
    return_k_alternatives: PositiveInt32 | None = None
    apply_chat_template: bool | None = False
    seed: Seed | None = None
    response_format: ResponseFormat | None = None


class GenerateRequest(OpenSchema):
    inputs: str = Field(json_schema_extra={"minLength": 1})
    parameters: GenerateParameters | None = None


class CompatGenerateRequest(GenerateRequest):
    stream: bool | None = False


class TokenizeRequest(Schema):
    inputs: str
    add_special_tokens: bool | None = True


class DetokenizeRequest(Schema):
    ids: TokenIds
    skip_special_tokens: bool | None = True


# --- Responses --------------------------------------------------------------------------------------------------------

FinishReason = Literal["length", "eos_token", "stop_sequence"]


class PrefillToken(Schema):
    id: int
    text: str
    logprob: float | None = None


class AlternativeToken(PrefillToken):
    pass


class Token(Schema):
    id: int
    text: str
    logprob: float | None
    special: bool
    skipped: bool
    alternative_tokens: list[AlternativeToken] | None = None


class _Summary(Schema):
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None


class BestOfSequence(_Summary):
    generated_text: str
    prefill: list[PrefillToken]
    tokens: list[Token]


class StreamDetails(_Summary):
    prompt_tokens: int


class Details(StreamDetails):
    skipped_tokens: int
    prefill: list[PrefillToken]
    tokens: list[Token]
    best_of_sequences: list[BestOfSequence] | None = None


class GenerateResponse(Schema):
    generated_text: str
    details: Details | None = None


class GenerateChoice(GenerateResponse):
    """The completion by one adapter in `adapter_ids`."""

    index: int
    adapter_id: str


class FanOutResponse(Schema):
    choices: list[GenerateChoice]


Tier = Annotated[
    Literal["device", "host", "disk", "fetched"],
    Field(description="Where the adapter was when the request arrived; only in the first event"),
]


class StreamResponse(Schema):
    """One stream event."""

    token: Token
    generated_text: str | None
    details: StreamDetails | None
    adapter_tier: Tier | None = None
    index: int | None = Field(default=None, description="The choice; only with `adapter_ids`")
    adapter_id: str | None = Field(default=None, description="The adapter; only with `adapter_ids`")


class SimpleToken(Schema):
    id: int
    text: str
    start: int
    stop: int


class DetokenizeResponse(Schema):
    text: str


class Info(Schema):
    model_config = ConfigDict(json_schema_serialization_defaults_required=True)

    model_id: str
    model_sha: str | None
    model_dtype: str
    weight_format: str | None = None
    weight_bytes: int | None = None
    model_device_type: str
    model_pipeline_tag: str | None = None
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_length: int
    max_total_tokens: int
    waiting_served_ratio: float = 0.0  # LoRAX scheduler settings without a counterpart here are 0
    max_batch_total_tokens: int
    max_waiting_tokens: int = 0
    validation_workers: int = 0
    eager_prefill: bool = True
    version: str
    sha: str | None = None
    docker_label: str | None = None
    request_logger_url: str | None = None


class ErrorResponse(Schema):
    error: str
    error_type: str
