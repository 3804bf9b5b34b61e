"""Request and response bodies for embeddings, classification, reranking and scores."""

from typing import Annotated, Any, Literal

from pydantic import Field

from lorax_server.server.schemas.lorax import FailFastList, MergedAdapters, OpenSchema, Schema, TokenIds

MAX_INPUTS = 2048
Texts = Annotated[FailFastList[str], Field(json_schema_extra={"minItems": 1, "maxItems": MAX_INPUTS})]
Truncate = Annotated[bool | None, Field(description="Keep the beginning of texts that are too long; default: reject")]


class PoolingParameters(OpenSchema):
    """Parameters that select the adapter, with the same fields as on the other LoRAX routes."""

    adapter_id: str | None = None
    adapter_source: str | None = None
    merged_adapters: MergedAdapters | None = None
    api_token: str | None = None

    @property
    def seed(self) -> None:
        """The random seed for merges, which is always None."""


class EmbedRequest(OpenSchema):
    inputs: str | Texts
    parameters: PoolingParameters | None = None
    truncate: Truncate = None


class ClassifyRequest(OpenSchema):
    inputs: str
    parameters: PoolingParameters | None = None
    truncate: Truncate = None


class ClassifyBatchRequest(OpenSchema):
    inputs: Texts
    parameters: PoolingParameters | None = None
    truncate: Truncate = None


class PooledRequest(PoolingParameters):
    """Fields of all routes with a `model` field."""

    model: str | None = Field(default=None, description="An adapter; null, empty or its name: the base model")
    user: str | None = None
    truncate: Truncate = None
    parameters: PoolingParameters | None = Field(default=None, description="The adapter, as in LoRAX")


# The route checks the number of inputs, because pydantic would name another type in the union.
TextsOrTokens = str | FailFastList[str] | TokenIds | FailFastList[TokenIds]


class EmbeddingRequest(PooledRequest):
    input: TextsOrTokens
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    prompt_name: str | None = Field(default=None, description="A prompt of the model, which is put before each text")


class LabelRequest(PooledRequest):
    input: TextsOrTokens


class Document(OpenSchema):
    text: str


class RerankRequest(PooledRequest):
    query: str
    documents: Annotated[FailFastList[str | Document], Field(json_schema_extra={"minItems": 1, "maxItems": MAX_INPUTS})]
    top_n: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    return_documents: bool | None = Field(default=None, description="Default: true")
    instruction: str | None = Field(default=None, description="The task, for models that judge with an instruction")


class ScoreRequest(PooledRequest):
    """Pairs of texts. A single first text is compared with each second text."""

    text_1: str | Texts
    text_2: str | Texts
    instruction: str | None = None


# --- Responses --------------------------------------------------------------------------------------------------------


class EmbedResponse(Schema):
    embeddings: list[float] | list[list[float]]


class LabelResult(Schema):
    label: str
    score: float


class EntityResult(Schema):
    entity_group: str
    score: float
    word: str
    start: int
    end: int


Classes = list[EntityResult] | list[LabelResult]


class PoolingUsage(Schema):
    prompt_tokens: int
    total_tokens: int


class Embedding(Schema):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class _PooledResponse(Schema):
    id: str
    created: int
    model: str
    usage: PoolingUsage


class EmbeddingResponse(_PooledResponse):
    object: Literal["list"]
    data: list[Embedding]


class LabelsOfInput(Schema):
    index: int
    label: str | None = None
    probs: list[float] | None = None
    num_classes: int | None = None
    entities: list[EntityResult] | None = None


class LabelsResponse(_PooledResponse):
    object: Literal["list"]
    data: list[LabelsOfInput]


class RankedDocument(Schema):
    index: int
    relevance_score: float
    document: dict[str, Any] | None = None


class RerankResponse(_PooledResponse):
    results: list[RankedDocument]


class PairScore(Schema):
    object: Literal["score"]
    index: int
    score: float


class ScoreResponse(_PooledResponse):
    object: Literal["list"]
    data: list[PairScore]
