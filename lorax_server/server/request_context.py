"""One generation request, from its arrival to its last byte: the caller, the generations and the outcome.

A route creates a `RequestContext` and passes a coroutine to `RequestContext.answer`, which adds timeouts, errors, logs
and metrics. The coroutine calls `record_model`, `admit`, `resolve` and `prepare`. The middleware has authenticated the
caller and created the request record.
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

from lorax_server.errors import ContextLengthError, DeadlineError, InputError, LoraxError
from lorax_server.generation.generation import TokenEvent
from lorax_server.server.access.keys import Key
from lorax_server.server.access.model_names import Choice
from lorax_server.server.access.rate_limits import Permit
from lorax_server.server.adapter_lookup import AdapterLookup, ResolvedModel
from lorax_server.server.checks import TIMEOUT_HEADER, check_logprobs, check_text, shorten_timeout
from lorax_server.server.generations import RemoteGeneration, count_cached, interleave
from lorax_server.server.http.hosts import client_network
from lorax_server.server.http.problems import Problem, describe
from lorax_server.server.http.sse import EventStream, Shortcut, event, until_gone
from lorax_server.server.service import Service
from lorax_server.server.telemetry.logs import log_request
from lorax_server.server.telemetry.request_record import RequestRecord
from lorax_server.text.prompt import Prompt
from lorax_server.text.tokenizer import TextTokenizer
from lorax_server.types import Request, SamplingParams, StopParams, Structure

logger = logging.getLogger(__name__)

CLIENT_LEFT = 499  # for the log: there is no client to read it
BEARER = "bearer "
SAFE = "/@:,.-_ +"  # characters of names that headers show as they are
SMALL = 2000  # tokens, with their alternatives, that are written sooner than another thread has begun


@dataclass(frozen=True)
class RequestOptions:
    """Everything that a request asks for besides its prompt and its model, in the same form for all routes."""

    sampling: SamplingParams  # of every answer but for its seed
    stop: StopParams  # without the model's own eos tokens
    seeds: Sequence[int]  # one for each answer
    may_shorten: bool = False  # generate fewer than `max_new_tokens` where all do not fit, instead of refusing
    add_special_tokens: bool = True
    truncate: int | None = None
    logprobs: bool = False  # the answer lists those of its tokens
    prompt_logprobs: bool = False
    is_scoring: bool = False  # only the prompt matters; the one token that is generated is not shown
    salt: str = ""
    structure: Structure | None = None

    def count_logprobs(self, num_prompt_tokens: int, num_tokens: int, is_streamed: bool) -> int:
        """Count the log probabilities that are in memory at once. A stream has those of its tokens one by one."""
        count = 0
        if not is_streamed and (self.logprobs or self.sampling.num_alternatives):
            count += num_tokens
        if self.prompt_logprobs:
            count += num_prompt_tokens
        return count * (1 + self.sampling.num_alternatives) * len(self.seeds)


Work = Callable[["RequestContext"], Coroutine[Any, Any, Response]]
WriteEvents = Callable[[int, list[TokenEvent], bool], bytes]
"""Encodes new tokens of the generation with this index; True for its first tokens."""


class RequestContext:
    """A request and its resources until it ends."""

    def __init__(self, service: Service, http: HttpRequest) -> None:
        self.service = service
        self.path = http.url.path
        self.key: Key = http.state.key
        self.generations: list[RemoteGeneration] = []
        self.record: RequestRecord = http.state.record
        self.record.status, self.record.started_at = HTTPStatus.OK, time.time()
        self.record.trace_parent = http.headers.get("traceparent")
        self.timeout_s = service.config.request_timeout_s
        self._http = http
        self._began = time.monotonic()
        self._permit: Permit | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stopped: asyncio.Future[LoraxError] = asyncio.get_running_loop().create_future()
        self._num_characters = 0
        self._adapter_tier = ""  # where the adapter was when the request named it
        self._is_stale = False  # the adapter's newest version cannot be served, so that an older one answers
        self._is_scoring = False
        self._num_logprobs = 0  # upper bound of those in the answers
        self.write_failure: Callable[[Problem], bytes] | None = None  # of a stream, if not as an event with the error

    # --- Around a route's work ----------------------------------------------------------------------------------------

    async def answer(self, work: Work) -> Response:
        """Run a route's work and return its response; errors become responses, too.

        A stream continues after this has returned, and ends the request itself.
        """
        self.service.metrics.begin()
        self.service.running.add(self)
        response: Response | None = None
        try:
            response = await self._work(work)
        except Exception as error:
            problem = self._note(error)
            self.record.status = problem.status
            response = problem.response(self.path)
            response.headers.update(self._adapter_headers())
        finally:
            if isinstance(response, EventStream):
                response.on_end = self._end
            else:
                self._end(has_left=response is None)
        return Response(status_code=CLIENT_LEFT) if response is None else response

    async def _work(self, work: Work) -> Response | None:
        """Return the work's response, or None if the client has disconnected."""
        self.timeout_s = shorten_timeout(self.timeout_s, self._http.headers.get(TIMEOUT_HEADER))
        if self.timeout_s is not None:
            too_late = DeadlineError(f"there was no answer within {self.timeout_s:g} s")
            self._timer = asyncio.get_running_loop().call_later(self.timeout_s, self.stop, too_late)
        working, leaving = asyncio.create_task(work(self)), asyncio.create_task(until_gone(self._http.receive))
        try:
            await asyncio.wait((working, leaving, self._stopped), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            if self._stopped.done():
                raise self._stopped.result()
            return None
        finally:
            leaving.cancel()
            working.cancel()
            await asyncio.wait((working, leaving))

    def stop(self, error: LoraxError) -> None:
        """End the work, also before the engine is asked; its reader gets the error."""
        if not self._stopped.done():
            self._stopped.set_result(error)
        for generation in self.generations:
            generation.stop(error)

    @property
    def tenant(self) -> str:
        """The name under which the caller shares the engine and the sandbox with others."""
        return self.key.name or client_network(self._http.client.host if self._http.client is not None else "")

    # --- Steps of a route, in this order ------------------------------------------------------------------------------

    def record_model(self, choice: Choice) -> None:
        """Note the adapter that a request names, before anything else: a refused request is counted there too."""
        record, service = self.record, self.service
        record.adapter_id, record.source = choice.label, choice.source
        is_listed = choice.asked_source is None and choice.label in service.model_names.adapters
        is_single = len(choice.refs) == 1  # callers can make up merges, also of known names
        record.is_known = is_single and (is_listed or bool(service.adapter_index.latest(choice.names[0])))

    async def admit(self, count: int, is_streamed: bool) -> None:
        """Let `count` answers in, or refuse them all."""
        self.record.num_choices, self.record.is_streamed = count, is_streamed
        self._permit = self.service.rate_limits.acquire(self.key, count)

    @cached_property
    def lookup(self) -> AdapterLookup:
        """The lookup for this caller. On a server without keys, the bearer token is meant for the adapter source."""
        authorization, is_open = self._http.headers.get("authorization", ""), self.service.keys.is_open
        is_for_source = is_open and not self.key.is_admin and authorization.lower().startswith(BEARER)
        bearer = authorization[len(BEARER) :].strip() if is_for_source else ""
        return AdapterLookup(self.service, self.key, bearer or None, self.path)

    async def resolve(self, choice: Choice) -> ResolvedModel:
        """Find the model that a request chose, if the caller may use it."""
        adapter = await self.lookup.resolve(choice)
        self.record.identity, self._adapter_tier = adapter.identity, adapter.tier
        self._is_stale = adapter.stale is not None
        return ResolvedModel(adapter, await self.service.tokenizers.find(adapter))

    async def prepare(self, model: ResolvedModel, prompt: Prompt, options: RequestOptions) -> list[RemoteGeneration]:
        """Make a generation for each answer; none is sent to the engine yet."""
        service, record = self.service, self.record
        if isinstance(prompt, str):
            self._num_characters += len(prompt)
        ids = await encode_prompt(service, model.tokenizer, prompt, options)
        stop = fit_stop(service, model.tokenizer, options, len(ids))
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
                salt=self.key.salt(options.salt),
                prompt_logprobs=options.prompt_logprobs,
                structure=structure,
                vocabulary=vocabulary,
            )
            generations.append(RemoteGeneration(service.engine, request, model.tokenizer))
            self.generations.append(generations[-1])
        self._is_scoring = options.is_scoring
        record.max_new_tokens = 0 if options.is_scoring else stop.max_new_tokens
        record.prompt_tokens += len(ids)
        record.validation_s = time.monotonic() - self._began
        if service.config.log_prompts:
            text = prompt if isinstance(prompt, str) else str(list(prompt))
            record.prompt = text if record.prompt is None else f"{record.prompt}\n{text}"
        return generations

    # --- Responses ----------------------------------------------------------------------------------------------------

    async def write(self, make: Callable[[], Response]) -> Response:
        """Make a whole response, on another thread if it is large, so that other requests do not wait."""
        size = 0
        for generation in self.generations:
            completion, sampling = generation.completion, generation.request.sampling
            size += len(completion.token_ids) * (1 + sampling.num_alternatives)
            size += len(completion.prompt_logprobs or ())
        return make() if size <= SMALL else await asyncio.to_thread(make)

    async def stream(self, write: WriteEvents, write_end: Callable[[], bytes] = lambda: b"") -> EventStream:
        """Respond with the events of all generations as they arrive, and `write_end` after the last."""
        shortcut, keep_alive_s = Shortcut(), self.service.config.keep_alive_s
        if len(self.generations) == 1:  # several alternate, which the shortcut does not support
            self.generations[0].use(shortcut, lambda token_events: write(0, token_events, False))
        events = await self.open_stream(self._write_events(write, write_end))
        return EventStream(events, keep_alive_s, self.stream_headers(), shortcut=shortcut)

    async def _write_events(self, write: WriteEvents, write_end: Callable[[], bytes]) -> AsyncGenerator[bytes, None]:
        begun = set[int]()
        async with aclosing(interleave(self.generations)) as stream:
            async for index, token_events in stream:
                piece = write(index, token_events, index not in begun)
                begun.add(index)
                if piece:
                    yield piece
        if end := write_end():
            yield end

    async def open_stream(self, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        """Return the same events when the first is there, or takes long.

        An error before that has a status of its own. A later error becomes the last event.
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
        stream = self._with_errors(first, events)
        await anext(stream)  # a generator that has not begun would close nothing when it is closed
        return stream

    async def _with_errors(
        self, first: "asyncio.Future[bytes]", events: AsyncGenerator[bytes, None]
    ) -> AsyncGenerator[bytes, None]:
        try:
            yield b""
            yield await first
            async for piece in events:
                yield piece
        except Exception as error:
            problem = self._note(error)
            yield event(problem.body(self.path)) if self.write_failure is None else self.write_failure(problem)
        finally:
            first.cancel()
            await events.aclose()

    def _note(self, error: Exception) -> Problem:
        if not isinstance(error, LoraxError):
            logger.exception("request %s failed because of a mistake of the server", self.record.request_id)
        problem = describe(error, self.path)
        self.record.error_type, self.record.error = problem.error_type, str(error)
        return problem

    # --- The end ------------------------------------------------------------------------------------------------------

    def _end(self, has_left: bool) -> None:
        """Give back what the request holds, and write down how it went."""
        self.service.running.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        record = self.record
        record.is_dropped = has_left
        record.total_s = time.monotonic() - self._began
        self._finish_record()
        if self._permit is not None:
            self._permit.release(record.prompt_tokens + record.generated_tokens)
        self.service.metrics.end(record)
        self.service.tracer.end(record)
        log_request(record)

    def _finish_record(self) -> None:
        record, generations = self.record, self.generations
        completions = [generation.completion for generation in generations]
        num_generated = sum(len(completion.token_ids) for completion in completions)
        record.generated_tokens = 0 if self._is_scoring else num_generated
        reasons = [completion.finish_reason for completion in completions]
        record.finish_reasons = [reason.name.lower() for reason in reasons if reason is not None]
        if self.service.config.log_prompts:
            record.text = "\n".join(generation.text for generation in generations)
        record.cached_tokens = count_cached(generations)
        for generation in generations:
            started, sent_at, first_at = generation.started, generation.sent_at, generation.first_at
            if started is not None and sent_at is not None and first_at is not None:
                record.queue_s, record.adapter_s = started.queue_s, started.adapter_s
                record.first_token_s = max(0.0, first_at - sent_at - started.queue_s)
                record.inference_s = max(0.0, time.monotonic() - sent_at - started.queue_s)
                return

    # --- Headers ------------------------------------------------------------------------------------------------------

    def _adapter_headers(self) -> dict[str, str]:
        record = self.record
        if not record.identity:
            return {}
        return {
            "x-adapter-id": quote(record.adapter_id or "", safe=SAFE),
            "x-adapter-source": quote(record.source),
            "x-adapter-hash": record.identity,
            **({"x-adapter-tier": self._adapter_tier} if self._adapter_tier else {}),
            **({"x-adapter-version": "previous"} if self._is_stale else {}),
        }

    @property
    def first_event(self) -> dict[str, str]:
        """Fields that only the first event of a stream has, beside its token."""
        return {"adapter_tier": self._adapter_tier} if self._adapter_tier else {}

    def stream_headers(self) -> dict[str, str]:
        return {
            "x-compute-type": f"{self.service.engine.info.device}+optimized",
            "x-compute-characters": str(self._num_characters),
            "x-model-id": quote(self.service.config.model_id, safe=SAFE),
            **self._adapter_headers(),
        }

    def headers(self, generated_tokens: int) -> dict[str, str]:
        """Return the headers of a whole answer, with its times in milliseconds."""
        self._finish_record()
        record = self.record
        total_s = time.monotonic() - self._began
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
            "x-skipped-tokens": 0,
            "x-total-tokens": record.prompt_tokens + generated_tokens,
        }
        values = {name: int(value * 1000) for name, value in milliseconds.items()} | counts
        return self.stream_headers() | {name: str(value) for name, value in values.items()}


# --- Prompts ----------------------------------------------------------------------------------------------------------


async def encode_prompt(
    service: Service, tokenizer: TextTokenizer, prompt: Prompt, options: RequestOptions
) -> list[int]:
    if isinstance(prompt, str):
        check_text(prompt)
        count = tokenizer.count_at_least(prompt)
        if options.truncate is None and count > service.max_input_length:
            fit_stop(service, tokenizer, options, count, at_least="at least ")  # before time is spent on its tokens
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


def fit_stop(
    service: Service, tokenizer: TextTokenizer, options: RequestOptions, num_ids: int, at_least: str = ""
) -> StopParams:
    """Return the stop rules of a prompt with so many tokens, or refuse it if it is too long for them."""
    total, max_new_tokens = service.max_total_tokens, options.stop.max_new_tokens
    if options.may_shorten:
        max_new_tokens = min(max_new_tokens, max(total - num_ids, 1))
    elif num_ids + max_new_tokens > total:
        raise ContextLengthError(
            f"`inputs` tokens + `max_new_tokens` must be <= {total}. "
            f"Given: {at_least}{num_ids} `inputs` tokens and {max_new_tokens} `max_new_tokens`"
        )
    if num_ids > service.max_input_length:
        raise ContextLengthError(
            f"`inputs` must have less than {service.max_input_length} tokens. Given: {at_least}{num_ids}"
        )
    eos_token_ids = service.defaults.eos_token_ids | tokenizer.eos_token_ids
    return replace(options.stop, max_new_tokens=max_new_tokens, eos_token_ids=eos_token_ids)
