"""Generation requests: their state and lifecycle, which all generation routes share.

A route passes a handler to `RequestContext.run`, which adds timeouts, error responses, logs and metrics. The handler
calls `record_model`, `admit`, `resolve` and `prepare`. Authentication happens earlier, in the middleware.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from lorax_server.errors import ContextLengthError, DeadlineError, InputError, LoraxError, NotSupportedError
from lorax_server.generation.generation import TokenEvent
from lorax_server.pooling import CLASSIFY, EMBED, GENERATE, SCORE, TOKEN_CLASSIFY, PoolingConfig
from lorax_server.server.access.keys import Key
from lorax_server.server.access.model_names import BASE_MODEL, AdapterKey, ModelSelection
from lorax_server.server.access.rate_limits import Permit
from lorax_server.server.adapter_lookup import AdapterLookup, ResolvedModel
from lorax_server.server.checks import TIMEOUT_HEADER, check_logprobs, check_no_surrogates, resolve_timeout
from lorax_server.server.generations import RemoteGeneration, count_cached_tokens, interleave
from lorax_server.server.http.error_responses import ErrorResponse, make_error_response
from lorax_server.server.http.hosts import client_network
from lorax_server.server.http.sse import DirectWriter, EventStream, encode_event, wait_for_disconnect
from lorax_server.server.schemas.lorax import OpenSchema
from lorax_server.server.schemas.unsupported_fields import reject_unsupported
from lorax_server.server.service import Service
from lorax_server.server.telemetry.logs import log_request
from lorax_server.server.telemetry.request_record import RequestRecord
from lorax_server.text.prompt import Prompt
from lorax_server.text.tokenizer import EncodedText, TextTokenizer
from lorax_server.types import Pooled, Request, SamplingParams, StopParams, Structure

logger = logging.getLogger(__name__)

CLIENT_DISCONNECTED_STATUS = 499  # for the log only
BEARER_PREFIX = "bearer "
SAFE_HEADER_CHARACTERS = "/@:,.-_ +"  # these characters are not percent-encoded in headers
MAX_IGNORED_FIELDS = 16  # fields that x-ignored-fields names
MAX_HEADER_CHARACTERS = 256
LONG_REQUEST_S = 180.0  # requests that run longer are logged once
TASK_NAMES = {
    GENERATE: "text generation",
    EMBED: "embeddings",
    CLASSIFY: "text classification",
    TOKEN_CLASSIFY: "token classification",
    SCORE: "scores",
}
MAX_INPUTS_PER_BATCH = 64
POOLED_BYTES_PER_TOKEN = 64  # encoding 16 numbers takes about as long as encoding one token
MAX_INLINE_TOKENS = 2000  # including alternatives; encoding fewer tokens is faster than a thread switch


@dataclass(frozen=True)
class RequestOptions:
    """All request parameters except the prompt and the model, in the same form for all routes."""

    sampling: SamplingParams  # without the seed
    stop: StopParams  # without the model's EOS tokens
    seeds: Sequence[int]  # one per completion
    may_clamp_max_new_tokens: bool = False  # reduce `max_new_tokens` to the context length instead of raising
    add_special_tokens: bool = True
    truncate: int | None = None
    logprobs: bool = False
    prompt_logprobs: bool = False
    is_scoring: bool = False  # only the prompt is scored; the single generated token is hidden
    salt: str = ""
    structure: Structure | None = None
    speculation: bool = True

    def count_logprobs(self, num_prompt_tokens: int, num_tokens: int, is_streamed: bool) -> int:
        """Return the number of log probabilities that the request keeps in memory. For streams, these are only the log
        probabilities of prompt tokens.
        """
        count = 0
        if not is_streamed and (self.logprobs or self.sampling.num_alternatives):
            count += num_tokens
        if self.prompt_logprobs:
            count += num_prompt_tokens
        return count * (1 + self.sampling.num_alternatives) * len(self.seeds)


RouteHandler = Callable[["RequestContext"], Coroutine[Any, Any, Response]]
EncodeEvents = Callable[[int, list[TokenEvent], bool], bytes]
"""Encodes new tokens. Arguments: generation index, events, whether they are the generation's first."""


class RequestContext:
    """A running generation request: its permit, timeout, generations and log record."""

    def __init__(self, service: Service, http_request: HttpRequest, tasks: Sequence[str] = (GENERATE,)) -> None:
        """Create the context for a route that needs a model with one of these tasks."""
        self.service = service
        self._tasks = tasks
        self.path = http_request.url.path
        self.key: Key = http_request.state.key
        self.generations: list[RemoteGeneration] = []
        self.record: RequestRecord = http_request.state.record
        self.record.status, self.record.started_at = HTTPStatus.OK, time.time()
        self.record.trace_parent = http_request.headers.get("traceparent")
        self.timeout_s = service.config.request_timeout_s
        self._http_request = http_request
        self._started_at = time.monotonic()
        self._permit: Permit | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._long_timer = asyncio.get_running_loop().call_later(LONG_REQUEST_S, self._log_long_request)
        self._stopped: asyncio.Future[LoraxError] = asyncio.get_running_loop().create_future()
        self._num_characters = 0
        self._num_models = 1
        self._encoded: dict[tuple[TextTokenizer, str], list[int]] = {}  # prompts that several adapters share
        self._adapter_tier = ""  # tier of the adapter when the request arrived
        self._is_stale = False  # the newest adapter version cannot be served, so an older one is used
        self._ignored_fields: list[str] = []  # names of unknown fields in the request
        self._is_scoring = False
        self._num_logprobs = 0  # upper bound for log probabilities in the response
        self.adapter_field = "model"  # the field that names the adapters, in errors on OpenAI routes
        self.renamed_fields: dict[str, str] = {}  # the client's names of fields in errors, by LoRAX's names
        # Encodes an error in a stream. If None, the stream sends an event with the error body.
        self.encode_failure: Callable[[ErrorResponse], bytes] | None = None

    # --- Lifecycle ----------------------------------------------------------------------------------------------------

    async def run(self, handler: RouteHandler) -> Response:
        """Run the route handler and return its response. Exceptions become error responses.

        If the response is a stream, metrics and permits are updated when the stream ends.
        """
        self.service.metrics.count_request()
        self.service.running.add(self)
        response: Response | None = None
        try:
            response = await self._run_handler(handler)
        except Exception as error:
            error_response = self._record_error(error)
            self.record.status = error_response.status
            response = error_response.to_response(self.path)
            response.headers.update(self._request_headers())
        finally:
            if isinstance(response, EventStream):
                response.on_finish = self._finish
            else:
                self._finish(is_disconnected=response is None)
        return Response(status_code=CLIENT_DISCONNECTED_STATUS) if response is None else response

    async def _run_handler(self, handler: RouteHandler) -> Response | None:
        """Start the request timeout, and return the handler's response, or None if the client disconnected."""
        self._check_task()
        self.timeout_s = resolve_timeout(self.timeout_s, self._http_request.headers.get(TIMEOUT_HEADER))
        if self.timeout_s is not None:
            timeout_error = DeadlineError(f"the request timed out after {self.timeout_s:g} s")
            self._timer = asyncio.get_running_loop().call_later(self.timeout_s, self.stop, timeout_error)
        handling = asyncio.create_task(handler(self))
        disconnecting = asyncio.create_task(wait_for_disconnect(self._http_request.receive))
        try:
            await asyncio.wait((handling, disconnecting, self._stopped), return_when=asyncio.FIRST_COMPLETED)
            if handling.done():
                return handling.result()
            if self._stopped.done():
                raise self._stopped.result()
            return None
        finally:
            disconnecting.cancel()
            handling.cancel()
            await asyncio.wait((handling, disconnecting))

    def _check_task(self) -> None:
        task = self.service.task
        if task not in self._tasks:
            uses = " or ".join(TASK_NAMES[each] for each in self._tasks)
            raise NotSupportedError(
                f"this server's model does not support {uses}; it is served for {TASK_NAMES[task]} (--task {task})"
            )

    @property
    def pooling(self) -> PoolingConfig:
        """The pooling settings of a model that does not generate text."""
        assert self.service.pooling is not None
        return self.service.pooling

    @property
    def adapter_keys(self) -> set[AdapterKey]:
        """The adapters that the request may use until it finishes."""
        return self.lookup.adapter_keys

    def stop(self, error: LoraxError) -> None:
        """Stop the request at any stage. The client receives the error."""
        if not self._stopped.done():
            self._stopped.set_result(error)
        for generation in self.generations:
            generation.stop(error)

    def _log_long_request(self) -> None:
        logger.warning(
            "request %s is still running after %g s and has %d tokens; set a token limit in the request, or use "
            "--request-timeout-s",
            *(self.record.request_id, LONG_REQUEST_S),
            sum(len(generation.completion.token_ids) for generation in self.generations),
        )

    @property
    def tenant(self) -> str:
        """The tenant for fair scheduling: the key name, or the client network if the server has no keys."""
        client = self._http_request.client
        return self.key.name or client_network(client.host if client is not None else "")

    # --- Handler stages, in call order --------------------------------------------------------------------------------

    def record_model(self, selection: ModelSelection) -> None:
        """Record the requested adapter. Call this first, so that rejected requests are counted for the adapter."""
        record, service = self.record, self.service
        record.adapter_id, record.source = selection.label, selection.source
        is_listed = selection.requested_source is None and selection.label in service.model_names.adapters
        is_single = len(selection.refs) == 1  # not for merges: clients can invent any number of them
        record.is_known_adapter = is_single and (
            is_listed or bool(service.adapter_index.latest_identity(selection.adapter_keys[0]))
        )

    def record_models(self, selections: Sequence[ModelSelection]) -> None:
        """Record the adapters of a request that sends one prompt to several adapters."""
        if len(selections) == 1:
            self.record_model(selections[0])
        else:
            names = ",".join(selection.label or BASE_MODEL for selection in selections)
            self.record.adapter_id, self.record.has_several_adapters = names[:MAX_HEADER_CHARACTERS], True

    async def admit(self, count: int, is_streamed: bool, num_models: int = 1) -> None:
        """Acquire a permit for `count` completions, or raise if a limit is exceeded.

        A request for several models counts as one request for each model.
        """
        self.record.num_choices, self.record.is_streamed = count, is_streamed
        self._permit = self.service.rate_limits.acquire(self.key, count, num_models)
        self._num_models = num_models

    @cached_property
    def lookup(self) -> AdapterLookup:
        """The caller's adapter lookup. On a server without keys, the bearer token is meant for the adapter source."""
        authorization, is_open = self._http_request.headers.get("authorization", ""), self.service.keys.allows_anonymous
        is_for_source = is_open and not self.key.is_admin and authorization.lower().startswith(BEARER_PREFIX)
        bearer = authorization[len(BEARER_PREFIX) :].strip() if is_for_source else ""
        return AdapterLookup(self.service, self.key, bearer or None, self.path, self.record.request_id)

    async def resolve(self, selection: ModelSelection) -> ResolvedModel:
        """Return the selected adapter and its tokenizer, and record the adapter. Raise if the caller may not use it."""
        adapter = await self.lookup.resolve(selection)
        self.record.identity, self._adapter_tier = adapter.identity, adapter.tier
        self._is_stale = self._is_stale or adapter.stale is not None
        return ResolvedModel(adapter, await self.service.tokenizers.find(adapter))

    def record_identities(self, models: Sequence[ResolvedModel]) -> None:
        """Record the resolved adapters of a request for several models."""
        if len(models) > 1:
            self._adapter_tier, self.lookup.version = "", None
            self.record.identity = ",".join([each.adapter.identity for each in models if each.adapter.identity])

    async def prepare(self, model: ResolvedModel, prompt: Prompt, options: RequestOptions) -> list[RemoteGeneration]:
        """Create and return a generation for each completion of a prompt, without submitting it to the engine.

        Token counts are added to the request record.
        """
        service, record = self.service, self.record
        if isinstance(prompt, str):
            self._num_characters += len(prompt)
        shared = (model.tokenizer, prompt) if self._num_models > 1 and isinstance(prompt, str) else None
        ids = self._encoded.get(shared) if shared is not None else None
        if ids is None:
            ids = await encode_prompt(service, model.tokenizer, prompt, options)
            if shared is not None:
                self._encoded[shared] = ids
        stop = fit_stop_params(service, model.tokenizer, options, len(ids))
        self._num_logprobs += options.count_logprobs(len(ids), stop.max_new_tokens, record.is_streamed)
        check_logprobs(self._num_logprobs)
        structure, vocabulary = options.structure, None
        if structure is not None:
            structure, vocabulary = await service.tokenizers.check_grammar(model.tokenizer, structure, self.tenant)
        generations = []
        for seed in options.seeds:
            request = Request(
                service.engine.new_id(),
                ids,
                replace(options.sampling, seed=seed),
                stop,
                model.adapter.identity,
                tenant=self.tenant,
                salt=self.key.cache_salt(options.salt),
                prompt_logprobs=options.prompt_logprobs,
                structure=structure,
                vocabulary=vocabulary,
                speculation=options.speculation,
            )
            generations.append(RemoteGeneration(service.engine, request, model.tokenizer))
            self.generations.append(generations[-1])
        self._is_scoring = options.is_scoring
        record.max_new_tokens = 0 if options.is_scoring else stop.max_new_tokens
        record.prompt_tokens += len(ids)
        record.validation_s = time.monotonic() - self._started_at
        if service.config.log_prompts:
            text = prompt if isinstance(prompt, str) else str(list(prompt))
            record.prompt = text if record.prompt is None else f"{record.prompt}\n{text}"
        return generations

    async def pool(self, model: ResolvedModel, inputs: Sequence[EncodedText]) -> list[Pooled]:
        """Run all inputs through the model and return their results."""
        service, record = self.service, self.record
        stop, sampling = StopParams(max_new_tokens=1), SamplingParams()
        for index, each in enumerate(inputs):
            if index % MAX_INPUTS_PER_BATCH == 0:
                await asyncio.sleep(0)  # let other requests run
            request = Request(
                service.engine.new_id(),
                each.ids,
                sampling,
                stop,
                model.adapter.identity,
                tenant=self.tenant,
                second_start=each.second_start,
            )
            self.generations.append(RemoteGeneration(service.engine, request, model.tokenizer))
            record.prompt_tokens += len(each.ids)
        record.validation_s = time.monotonic() - self._started_at
        await service.input_window.finish_all(self.generations)
        completions = [generation.completion for generation in self.generations]
        return [completion.pooled for completion in completions if completion.pooled is not None]

    def check_unknown_fields(self, route: str, body: OpenSchema) -> None:
        """Raise if an unsupported field would change the completion. Otherwise, list the ignored fields in a response
        header.
        """
        self._ignored_fields += reject_unsupported(route, body.model_extra, vars(body))

    # --- Responses ----------------------------------------------------------------------------------------------------

    async def build_response(self, make: Callable[[], Response]) -> Response:
        """Return the response from `make`. Large responses are built on a thread, to keep the event loop responsive."""
        size = 0
        for generation in self.generations:
            completion, sampling = generation.completion, generation.request.sampling
            size += len(completion.token_ids) * (1 + sampling.num_alternatives)
            size += len(completion.prompt_logprobs or ())
            size += 0 if completion.pooled is None else len(completion.pooled.data) // POOLED_BYTES_PER_TOKEN
        return make() if size <= MAX_INLINE_TOKENS else await asyncio.to_thread(make)

    async def stream_events(self, encode: EncodeEvents, encode_end: Callable[[], bytes] = lambda: b"") -> EventStream:
        """Return a response that streams the events from all generations as they arrive, then `encode_end()`."""
        direct_writer, keep_alive_s = DirectWriter(), self.service.config.keep_alive_s
        if len(self.generations) == 1:  # DirectWriter does not support interleaved generations
            self.generations[0].set_direct_writer(direct_writer, lambda token_events: encode(0, token_events, False))
        events = await self.await_first_event(self._encode_events(encode, encode_end))
        return EventStream(events, keep_alive_s, self.stream_headers(), direct_writer=direct_writer)

    async def _encode_events(
        self, encode: EncodeEvents, encode_end: Callable[[], bytes]
    ) -> AsyncGenerator[bytes, None]:
        started = set[int]()
        async with aclosing(interleave(self.generations)) as stream:
            async for index, token_events in stream:
                chunk = encode(index, token_events, index not in started)
                started.add(index)
                if chunk:
                    yield chunk
        if end := encode_end():
            yield end

    async def await_first_event(self, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        """Return the events once the first event is available or `keep_alive_s` has passed.

        Errors before that are raised, so the response can have an error status. Later errors become the last event.
        """
        first = asyncio.ensure_future(anext(events))
        try:
            await asyncio.wait((first,), timeout=self.service.config.keep_alive_s)
            if first.done():
                first.result()
        except BaseException:
            first.cancel()
            with suppress(BaseException):
                await first
            await events.aclose()
            raise
        stream = self._catch_errors(first, events)
        await anext(stream)  # closing a generator that has not started would skip its `finally`
        return stream

    async def _catch_errors(
        self, first: "asyncio.Future[bytes]", events: AsyncGenerator[bytes, None]
    ) -> AsyncGenerator[bytes, None]:
        try:
            yield b""
            yield await first
            async for chunk in events:
                yield chunk
        except Exception as error:
            error_response = self._record_error(error)
            yield (
                encode_event(error_response.body(self.path))
                if self.encode_failure is None
                else self.encode_failure(error_response)
            )
        finally:
            first.cancel()
            await events.aclose()

    def _record_error(self, error: Exception) -> ErrorResponse:
        if not isinstance(error, LoraxError):
            logger.exception("request %s failed with an internal error", self.record.request_id)
        error_response = make_error_response(error, self.path, self.adapter_field, self.renamed_fields)
        self.record.error_type, self.record.error = error_response.error_type, str(error)
        return error_response

    # --- Completion ---------------------------------------------------------------------------------------------------

    def _finish(self, is_disconnected: bool) -> None:
        """Release the request's resources and record its outcome in metrics, traces and the log."""
        self.service.finish(self)
        self._long_timer.cancel()
        if self._timer is not None:
            self._timer.cancel()
        record = self.record
        record.is_dropped = is_disconnected
        record.total_s = time.monotonic() - self._started_at
        self._finish_record()
        if self._permit is not None:
            self._permit.release(record.prompt_tokens + record.generated_tokens)
        self.service.metrics.record_finished(record)
        self.service.tracer.export_trace(record)
        log_request(record)

    def _finish_record(self) -> None:
        record, generations = self.record, self.generations
        completions = [generation.completion for generation in generations]
        num_generated = sum(len(completion.token_ids) for completion in completions)
        record.generated_tokens = 0 if self._is_scoring else num_generated
        record.drafted_tokens = sum(completion.num_drafted for completion in completions)
        record.skipped_tokens = sum(completion.num_skipped for completion in completions)
        reasons = [completion.finish_reason for completion in completions]
        record.finish_reasons = [reason.name.lower() for reason in reasons if reason is not None]
        if self.service.config.log_prompts:
            record.text = "\n".join(generation.text for generation in generations)
        record.cached_tokens = count_cached_tokens(generations)
        for generation in generations:
            started, submitted_at = generation.start_info, generation.submitted_at
            first_output_at = generation.first_output_at
            if started is not None and submitted_at is not None and first_output_at is not None:
                record.queue_s, record.adapter_s = started.queue_s, started.adapter_s
                first_step_at = submitted_at + started.queue_s
                record.first_token_s = max(0.0, first_output_at - first_step_at)
                record.inference_s = max(0.0, time.monotonic() - first_step_at)
                return

    # --- Headers ------------------------------------------------------------------------------------------------------

    def _request_headers(self) -> dict[str, str]:
        """Return the headers that describe the adapter, its warnings, and ignored request fields."""
        ignored = [quote(name[:MAX_HEADER_CHARACTERS]) for name in self._ignored_fields[:MAX_IGNORED_FIELDS]]
        headers = {"x-ignored-fields": ", ".join(ignored)} if ignored else {}
        if warnings := self.lookup.warnings:
            text = warnings[0][:MAX_HEADER_CHARACTERS]
            headers["x-adapter-warning"] = quote(text, safe=SAFE_HEADER_CHARACTERS + "';")
        return headers | self._adapter_headers()

    def _adapter_headers(self) -> dict[str, str]:
        record = self.record
        if not record.identity:
            return {}
        version = "" if self.lookup.version is None else f"v{self.lookup.version}"
        if self._is_stale:
            version = "previous"
        return {
            "x-adapter-id": quote(record.adapter_id or "", safe=SAFE_HEADER_CHARACTERS),
            "x-adapter-source": quote(record.source),
            "x-adapter-hash": record.identity,
            **({"x-adapter-tier": self._adapter_tier} if self._adapter_tier else {}),
            **({"x-adapter-version": version} if version else {}),
        }

    @property
    def first_event_fields(self) -> dict[str, str]:
        """Additional fields for the first stream event."""
        return {"adapter_tier": self._adapter_tier} if self._adapter_tier else {}

    def stream_headers(self) -> dict[str, str]:
        return {
            "x-compute-type": f"{self.service.engine.info.device}+optimized",
            "x-compute-characters": str(self._num_characters),
            "x-model-id": quote(self.service.config.model_id, safe=SAFE_HEADER_CHARACTERS),
            **self._request_headers(),
        }

    def response_headers(self, generated_tokens: int) -> dict[str, str]:
        """Return the headers for a complete response. Times are in milliseconds."""
        self._finish_record()
        record = self.record
        total_s = time.monotonic() - self._started_at
        first_s = record.first_token_s or 0.0
        milliseconds = {
            "x-compute-time": total_s,
            "x-total-time": total_s,
            "x-validation-time": record.validation_s,
            "x-queue-time": record.queue_s,
            "x-inference-time": record.inference_s,
            "x-time-per-token": record.inference_s / max(generated_tokens, 1),
            "x-time-to-first-token": first_s,
            "x-time-per-output-token": max(0.0, record.inference_s - first_s) / max(generated_tokens - 1, 1),
        }
        counts = {
            "x-prompt-tokens": record.prompt_tokens,
            "x-generated-tokens": generated_tokens,
            "x-skipped-tokens": record.skipped_tokens,
            "x-total-tokens": record.prompt_tokens + generated_tokens,
        }
        values = {name: int(value * 1000) for name, value in milliseconds.items()} | counts
        return self.stream_headers() | {name: str(value) for name, value in values.items()}


# --- Limits -----------------------------------------------------------------------------------------------------------


def constrain(service: Service, options: RequestOptions, structure: Structure | None) -> RequestOptions:
    """Return the options with a grammar. If the request sets no token limit, set the limit for structured output."""
    stop = options.stop
    if structure is not None and options.may_clamp_max_new_tokens:
        limit = min(stop.max_new_tokens, service.config.default_structured_tokens)
        stop = replace(stop, max_new_tokens=max(limit, stop.min_new_tokens))
    return replace(options, structure=structure, stop=stop)


# --- Prompts ----------------------------------------------------------------------------------------------------------


async def encode_prompt(
    service: Service, tokenizer: TextTokenizer, prompt: Prompt, options: RequestOptions
) -> list[int]:
    if isinstance(prompt, str):
        check_no_surrogates(prompt)
        count = tokenizer.min_token_count(prompt)
        if options.truncate is None and count > service.max_input_length:
            fit_stop_params(service, tokenizer, options, count, count_prefix="at least ")  # reject before tokenizing
        ids = await service.tokenizers.encode(tokenizer, prompt, options.add_special_tokens, options.truncate)
    else:
        ids = list(prompt)
        vocab_size = max(service.engine.info.vocab_size, tokenizer.num_ids)
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise InputError(f"`inputs` has tokens beyond the vocabulary of {vocab_size}")
        if options.truncate is not None:
            ids = ids[-options.truncate :]
    if not ids:
        raise InputError("`inputs` cannot be empty")
    return ids


def fit_stop_params(
    service: Service, tokenizer: TextTokenizer, options: RequestOptions, num_prompt_tokens: int, count_prefix: str = ""
) -> StopParams:
    """Return the stop parameters for a prompt of this length. Raise if it exceeds the context length."""
    total, max_new_tokens = service.max_total_tokens, options.stop.max_new_tokens
    if options.may_clamp_max_new_tokens:
        max_new_tokens = min(max_new_tokens, max(total - num_prompt_tokens, 1))
    elif num_prompt_tokens + max_new_tokens > total:
        raise ContextLengthError(
            f"`inputs` tokens + `max_new_tokens` must be <= {total}. "
            f"Given: {count_prefix}{num_prompt_tokens} `inputs` tokens and {max_new_tokens} `max_new_tokens`"
        )
    if num_prompt_tokens > service.max_input_length:
        raise ContextLengthError(
            f"`inputs` must have less than {service.max_input_length} tokens. Given: {count_prefix}{num_prompt_tokens}"
        )
    eos_token_ids = service.defaults.eos_token_ids | tokenizer.eos_token_ids
    return replace(options.stop, max_new_tokens=max_new_tokens, eos_token_ids=eos_token_ids)
