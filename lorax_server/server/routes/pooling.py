"""Routes for embeddings, classification, reranking and scores."""

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from lorax_server.errors import InputError
from lorax_server.generation import pooled_results as results
from lorax_server.pooling import CLASSIFY, EMBED, SCORE, TOKEN_CLASSIFY
from lorax_server.server.adapter_lookup import ResolvedModel
from lorax_server.server.checks import check, check_no_surrogates
from lorax_server.server.http.error_responses import json_response
from lorax_server.server.request_context import RequestContext
from lorax_server.server.routes import lorax, openai
from lorax_server.server.schemas.lorax import OpenSchema
from lorax_server.server.schemas.pooling import (
    MAX_INPUTS,
    Classes,
    ClassifyBatchRequest,
    ClassifyRequest,
    Document,
    EmbeddingRequest,
    EmbeddingResponse,
    EmbedRequest,
    EmbedResponse,
    LabelRequest,
    LabelsResponse,
    PooledRequest,
    PoolingParameters,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from lorax_server.server.schemas.unsupported_fields import POOLING
from lorax_server.server.service import Service
from lorax_server.text.prompt import Prompt, list_prompts
from lorax_server.text.tokenizer import EncodedText

_Name = TypeVar("_Name")

MAX_PAIR_SIZE = 4  # characters in all pairs of a request, in multiples of the body limit
CLASSES, PAIRS = (CLASSIFY, TOKEN_CLASSIFY), (EMBED, CLASSIFY, SCORE)


def make_router(service: Service) -> APIRouter:
    router = APIRouter()
    native: dict[str, Any] = {"responses": lorax.ERROR_RESPONSES, "tags": [lorax.OPENAPI_TAG]}
    standard: dict[str, Any] = {"responses": openai.ERROR_RESPONSES, "tags": [openai.OPENAPI_TAG]}

    @router.post("/embed", operation_id="embed", response_model=EmbedResponse, **native)
    async def embed(request: Request, body: EmbedRequest) -> Response:
        """Return the embedding of a text, or a list of embeddings for a list of texts."""
        return await RequestContext(service, request, (EMBED,)).run(lambda context: _embed(context, body))

    @router.post("/classify", operation_id="classify", response_model=Classes, **native)
    async def classify(request: Request, body: ClassifyRequest) -> Response:
        """Return the entities in a text (token classification), or the labels of the text, best first."""
        return await RequestContext(service, request, CLASSES).run(lambda context: _classify(context, body))

    @router.post("/classify_batch", operation_id="classify_batch", response_model=list[Classes], **native)
    async def classify_batch(request: Request, body: ClassifyBatchRequest) -> Response:
        """Classify several texts. The results are in the same order as the texts."""
        return await RequestContext(service, request, CLASSES).run(lambda context: _classify(context, body))

    @router.post("/v1/embeddings", operation_id="create_embeddings", response_model=EmbeddingResponse, **standard)
    async def embeddings(request: Request, body: EmbeddingRequest) -> Response:
        """Return the embeddings of texts or token lists."""
        return await RequestContext(service, request, (EMBED,)).run(lambda context: _embeddings(context, body))

    @router.post("/v1/classify", operation_id="classify_texts", response_model=LabelsResponse, **standard)
    async def labels(request: Request, body: LabelRequest) -> Response:
        """Return the probabilities of all labels for each text, or the entities in each text."""
        return await RequestContext(service, request, CLASSES).run(lambda context: _labels(context, body))

    @router.post("/v1/score", operation_id="score_pairs", response_model=ScoreResponse, **standard)
    async def score(request: Request, body: ScoreRequest) -> Response:
        """Return the relevance or similarity of pairs of texts."""
        return await RequestContext(service, request, PAIRS).run(lambda context: _score(context, body))

    async def rerank(request: Request, body: RerankRequest) -> Response:
        """Sort documents by their relevance to a query."""
        return await RequestContext(service, request, PAIRS).run(lambda context: _rerank(context, body))

    for path, name, described in (("/rerank", "rerank", native), ("/v1/rerank", "rerank_documents", standard)):
        router.post(path, operation_id=name, response_model=RerankResponse, **described)(rerank)
    return router


# --- LoRAX routes -----------------------------------------------------------------------------------------------------


async def _embed(context: RequestContext, body: EmbedRequest) -> Response:
    model = await _select_lorax(context, body, body.parameters)
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    encoded = await _encode_texts(context, model, [(None, text) for text in texts], body.truncate)
    pooled = await context.pool(model, encoded)

    def write() -> Response:
        vectors = [results.to_embedding(each, context.pooling).tolist() for each in pooled]
        content = {"embeddings": vectors[0] if isinstance(body.inputs, str) else vectors}
        return json_response(content, 200, context.response_headers(0))

    return await context.build_response(write)


async def _classify(context: RequestContext, body: ClassifyRequest | ClassifyBatchRequest) -> Response:
    model = await _select_lorax(context, body, body.parameters)
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    encoded = await _encode_texts(context, model, [(None, text) for text in texts], body.truncate)
    pooled = await context.pool(model, encoded)
    is_tokens = context.pooling.task == TOKEN_CLASSIFY

    def write() -> Response:
        content: list[Any] = []
        for index, each in enumerate(pooled):
            if is_tokens:
                found = results.to_entities(each, context.pooling, texts[index], encoded[index])
                content.append([entity._asdict() for entity in found])
            else:
                ranked = sorted(results.to_labels(each, context.pooling), key=lambda label: -label.score)
                content.append([label._asdict() for label in ranked])
        whole = content[0] if isinstance(body, ClassifyRequest) else content
        return json_response(whole, 200, context.response_headers(0))

    return await context.build_response(write)


async def _select_lorax(
    context: RequestContext, body: OpenSchema, parameters: PoolingParameters | None
) -> ResolvedModel:
    selection = lorax.choose_adapter(parameters or PoolingParameters(), context.service.model_names)
    context.record_model(selection)
    for each in (body, parameters or PoolingParameters()):
        context.check_unknown_fields(POOLING, each)
    for name in PoolingParameters.model_fields.keys() & (body.model_extra or {}).keys():
        raise InputError(f"`{name}` is not a top-level field; move it into `parameters`")
    await context.admit(1, False)
    return await context.resolve(selection)


# --- OpenAI and Cohere routes -----------------------------------------------------------------------------------------


async def _embeddings(context: RequestContext, body: EmbeddingRequest) -> Response:
    model = await _select(context, body)
    prompts = list_prompts(body.input)
    pooled = await context.pool(
        model, await _encode_prompts(context, model, prompts, body.truncate, prompt_name=body.prompt_name)
    )

    def write() -> Response:
        data = []
        for index, each in enumerate(pooled):
            values = results.to_embedding(each, context.pooling, body.dimensions)
            shown: Any = results.to_base64(values) if body.encoding_format == "base64" else values.tolist()
            data.append({"object": "embedding", "index": index, "embedding": shown})
        return _respond(context, body, "embd", {"object": "list", "data": data})

    return await context.build_response(write)


async def _labels(context: RequestContext, body: LabelRequest) -> Response:
    model = await _select(context, body)
    prompts = list_prompts(body.input)
    is_tokens = context.pooling.task == TOKEN_CLASSIFY
    check(not is_tokens or all(isinstance(each, str) for each in prompts), "`input` must be text for this model")
    encoded = await _encode_prompts(context, model, prompts, body.truncate)
    pooled = await context.pool(model, encoded)

    def write() -> Response:
        data: list[dict[str, Any]] = []
        for index, each in enumerate(pooled):
            if is_tokens:
                found = results.to_entities(each, context.pooling, str(prompts[index]), encoded[index])
                data.append({"index": index, "entities": [entity._asdict() for entity in found]})
                continue
            scored = results.to_labels(each, context.pooling)
            best = max(scored, key=lambda label: label.score).label
            probabilities = [label.score for label in scored]
            data.append({"index": index, "label": best, "probs": probabilities, "num_classes": len(scored)})
        return _respond(context, body, "classify", {"object": "list", "data": data})

    return await context.build_response(write)


async def _score(context: RequestContext, body: ScoreRequest) -> Response:
    first, second = ([text] if isinstance(text, str) else text for text in (body.text_1, body.text_2))
    check(
        len(first) in (1, len(second)),
        f"`text_1` must be one text, or as many as `text_2` ({len(second)}); it has {len(first)}",
    )
    firsts = first if len(first) == len(second) else first * len(second)
    pairs = list(zip(firsts, second, strict=True))
    scores = await _score_pairs(context, body, pairs, ("text_1", "text_2"), body.instruction)
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    return _respond(context, body, "score", {"object": "list", "data": data})


async def _rerank(context: RequestContext, body: RerankRequest) -> Response:
    texts = [each.text if isinstance(each, Document) else each for each in body.documents]
    pairs = [(body.query, text) for text in texts]
    scores = await _score_pairs(context, body, pairs, ("query", "documents"), body.instruction, is_retrieval=True)
    order = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n]
    ranked: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in order]
    for each in ranked if body.return_documents is not False else ():
        each["document"] = {"text": texts[each["index"]]}
    return _respond(context, body, "rerank", {"results": ranked})


async def _score_pairs(
    context: RequestContext,
    body: PooledRequest,
    pairs: list[tuple[str, str]],
    fields: tuple[str, str],
    instruction: str | None,
    is_retrieval: bool = False,
) -> list[float]:
    """Return a score per pair: the model's judgment, or the cosine similarity of the embeddings.

    `fields` are the names of the request fields that contain the first and second texts. If `is_retrieval`, the pairs
    are queries and documents, and embedding models use their prompts for these.
    """
    model, config = await _select(context, body), context.pooling
    results.prepare_pair("", "", config, instruction)  # rejects an instruction without effect
    if config.can_score:
        _check_count(pairs)
        _check_size(context, pairs, instruction or "")
        check_no_surrogates(instruction or "", "instruction")
        for field, text in _list_distinct(pairs, fields):
            check_no_surrogates(text, field)
        prepare = partial(results.prepare_pair, config=config, instruction=instruction)
        pooled = await context.pool(model, await _encode(context, model, pairs, prepare, body.truncate))
        return [results.to_score(each, config) for each in pooled]
    _check_count(pairs)
    for field, text in _list_distinct(pairs, fields):
        check(bool(text), f"`{field}` cannot be empty")
        check_no_surrogates(text, field)
    has_prompts = is_retrieval and {"query", "document"} <= config.prompts.keys()
    names = ("query", "document") if has_prompts else (None, None)
    named = [tuple(zip(names, pair, strict=True)) for pair in pairs]
    distinct = _list_distinct(pairs, names)
    pooled = await context.pool(model, await _encode_texts(context, model, distinct, body.truncate))
    vectors = dict(zip(distinct, (results.to_embedding(each, config) for each in pooled), strict=True))
    return await asyncio.to_thread(lambda: [results.cosine(vectors[one], vectors[other]) for one, other in named])


async def _select(context: RequestContext, body: PooledRequest) -> ResolvedModel:
    if body.parameters is not None and body.adapter_id is None:  # as in LoRAX
        given = {name: getattr(body.parameters, name) for name in PoolingParameters.model_fields}
        body = body.model_copy(update={name: value for name, value in given.items() if value is not None})
    openai.record_model(context, body)
    context.check_unknown_fields(POOLING, body)
    await context.admit(1, False)
    return await openai.resolve(context, body)


def _respond(context: RequestContext, body: PooledRequest, prefix: str, content: dict[str, Any]) -> Response:
    count = context.record.prompt_tokens
    envelope = {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "created": int(time.time()),
        "model": body.adapter_id or body.model or context.service.model_names.primary_name,
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }
    return json_response(content | envelope, 200, context.response_headers(0))


# --- Inputs -----------------------------------------------------------------------------------------------------------


async def _encode_prompts(
    context: RequestContext,
    model: ResolvedModel,
    prompts: Sequence[Prompt],
    truncate: bool | None,
    prompt_name: str | None = None,
) -> list[EncodedText]:
    """Return the tokens of prompts that are texts. Prompts that are token lists are returned unchanged."""
    _check_count(prompts)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if texts:
        return await _encode_texts(context, model, [(prompt_name, text) for text in texts], truncate)
    check(prompt_name is None, "`prompt_name` has no effect on token IDs; put the prompt's tokens before them")
    limit = context.service.max_input_length
    vocab_size = max(context.service.engine.info.vocab_size, model.tokenizer.num_ids)  # the engine checks per adapter
    lists = [list(prompt)[:limit] if truncate else list(prompt) for prompt in prompts if not isinstance(prompt, str)]
    for ids in lists:
        check(bool(ids), "`inputs` cannot be empty")
        results.check_length(len(ids), limit)
        check(0 <= min(ids) <= max(ids) < vocab_size, f"`inputs` has tokens beyond the vocabulary of {vocab_size}")
    return [EncodedText(ids) for ids in lists]


async def _encode_texts(
    context: RequestContext, model: ResolvedModel, texts: Sequence[tuple[str | None, str]], truncate: bool | None
) -> list[EncodedText]:
    """Return the tokens of texts. Each text has the name of its prompt, where None selects the default prompt."""
    _check_count(texts)
    for _, text in texts:
        check(bool(text), "`inputs` cannot be empty")
        check_no_surrogates(text)
    prompts = {name: results.find_prompt(context.pooling, name) for name, _ in texts}
    prepare = partial(results.prepare_text, config=context.pooling)
    return await _encode(context, model, [(prompts[name], text) for name, text in texts], prepare, truncate)


def _list_distinct(pairs: Sequence[tuple[str, str]], names: tuple[_Name, _Name]) -> list[tuple[_Name, str]]:
    """Return the distinct texts of all pairs. Each text has the name for its position in the pair."""
    return list(dict.fromkeys(each for pair in pairs for each in zip(names, pair, strict=True)))


def _check_count(inputs: Sequence[object]) -> None:
    check(len(inputs) > 0, "`inputs` cannot be empty")
    check(len(inputs) <= MAX_INPUTS, f"`inputs` must have at most {MAX_INPUTS} items. Given: {len(inputs)}")


def _check_size(context: RequestContext, pairs: Sequence[tuple[str, str]], instruction: str) -> None:
    """Raise if the texts of all pairs together are too long, because each pair has its own copy of the query and the
    instruction.
    """
    limit = MAX_PAIR_SIZE * context.service.config.max_body_bytes
    size = sum(len(first) + len(second) + len(instruction) for first, second in pairs)
    check(size <= limit, f"`inputs` must have at most {limit} characters in all pairs together. Given: {size}")


async def _encode(
    context: RequestContext,
    model: ResolvedModel,
    inputs: Sequence[tuple[str, str]],
    prepare: Callable[[str, str], Any],
    truncate: bool | None,
) -> list[EncodedText]:
    """Return the tokens of the texts or pairs of texts that `prepare` returns for the inputs.

    Each slice of the inputs is checked before the next slice is tokenized, which limits memory and lets other requests
    use the tokenizer threads.
    """
    service, limit = context.service, context.service.max_input_length
    _check_count(inputs)
    template = prepare("", "")
    added = len(template) if isinstance(template, str) else 0
    sizes = [added + len(first) + len(second) for first, second in inputs]

    def work(part: slice) -> list[EncodedText]:
        texts = [prepare(*each) for each in inputs[part]]
        return results.encode_inputs(model.tokenizer, texts, context.pooling, limit, bool(truncate))

    encoded: list[EncodedText] = []
    for part in results.slice_inputs(sizes):
        encoded += await service.tokenizers.run(model.tokenizer, sum(sizes[part]), partial(work, part))
    return encoded
