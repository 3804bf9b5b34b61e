"""One HTTP request for an answer, from its arrival to its last byte: who asks, what is asked of the engine, how it
went.

`Service.answer` makes one for each; a route then says what it wants in three steps, `admit`, `find` and `ask`.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple
from urllib.parse import quote

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from lorax_server.errors import (
    AdapterAccessError,
    AdapterError,
    AdapterNotFoundError,
    ContextLengthError,
    DeadlineError,
    EngineError,
    ForbiddenError,
    InputError,
    LoraxError,
    OverloadedError,
    SourceError,
)
from lorax_server.server.access.keys import HUB, Key
from lorax_server.server.access.model_names import Choice, Named, unknown_model
from lorax_server.server.access.nearest import with_nearest
from lorax_server.server.access.rate_limits import Permit
from lorax_server.server.generations import Job, count_cached
from lorax_server.server.http.connections import network
from lorax_server.server.http.problems import OPENAI_PREFIX, Problem, describe
from lorax_server.server.http.sse import event
from lorax_server.server.parts import MERGES, Parts
from lorax_server.server.routes.checks import check_logprobs, check_text
from lorax_server.server.telemetry.logs import log_request
from lorax_server.server.telemetry.request_record import RequestRecord
from lorax_server.text.tokenizer import TextTokenizer
from lorax_server.types import AdapterRef, Request, Resolved, SamplingParams, StopParams

logger = logging.getLogger(__name__)

TIMEOUT_HEADER = "x-request-timeout"
BEARER = "bearer "
LOCAL, FETCHED = "local", "fetched"  # the source that fetches nothing; the tier of what was fetched just now
NOT_GIVEN = (SourceError, OverloadedError, EngineError)  # an adapter that may be given to who tries again
MAX_LABEL = 256  # characters of a merge's label that are remembered
SMALL = 2000  # tokens, with their alternatives, that are written sooner than another thread has begun


class Found(NamedTuple):
    """What answers: an adapter, or the base model by an empty identity, and the tokenizer that goes with it."""

    adapter: Resolved
    tokenizer: TextTokenizer


@dataclass(frozen=True)
class Question:
    """A prompt and how it is to be answered, whichever route it came by."""

    prompt: str | Sequence[int]
    sampling: SamplingParams
    seeds: Sequence[int]  # one for each answer that is wanted
    max_new_tokens: int | None = None
    default_new_tokens: int | None = None  # if that is None: so many, or fewer if they do not fit; None: all that do
    min_new_tokens: int = 0
    ignore_eos: bool = False
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    include_stop: bool = True
    add_special_tokens: bool = True
    truncate: int | None = None
    logprobs: bool = False  # the answer lists those of its tokens
    prompt_logprobs: bool = False
    is_scoring: bool = False  # only the prompt matters, and the token that is drawn all the same is nobody's
    salt: str = ""


class Exchange:
    """What is known of it, and all that it holds until it ends."""

    def __init__(self, parts: Parts, http: HttpRequest) -> None:
        self.parts = parts
        self.path = http.url.path
        self.key = Key()
        self.jobs: list[Job] = []
        self.record = RequestRecord(http.state.request_id, self.path, started_at=time.time())
        self.record.trace_parent = http.headers.get("traceparent")
        self._http = http
        self._address = http.client.host if http.client is not None else ""
        self._began = time.monotonic()
        self._bearer: str | None = None
        self._permit: Permit | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.stopped: asyncio.Future[LoraxError] = asyncio.get_running_loop().create_future()  # from outside, and why
        self.timeout_s = parts.config.request_timeout_s
        self.num_characters = 0
        self.adapter_tier = ""  # where the adapter was when the request named it
        self._is_stale = False  # the adapter is what was there before what is there now and cannot be served
        self._is_scoring = False
        self._num_logprobs = 0  # that its answers may list

    # --- What a route does, in this order -----------------------------------------------------------------------------

    def identify(self) -> None:
        """Who asks, and for how long. Where the server has no keys of its own, a bearer is meant for a source."""
        self.timeout_s = _shorter(self.timeout_s, self._http.headers.get(TIMEOUT_HEADER))
        authorization = self._http.headers.get("authorization")
        self.key = self.parts.keys.identify(authorization)
        self.record.key = self.key.name
        is_bearer = authorization is not None and authorization.lower().startswith(BEARER)
        if authorization is not None and is_bearer and self.parts.keys.is_open and not self.key.is_admin:
            self._bearer = authorization[len(BEARER) :].strip() or None

    def admit(self, count: int, is_streamed: bool) -> None:
        """Let so many answers in, or refuse them all."""
        self.record.num_choices, self.record.is_streamed = count, is_streamed
        self._permit = self.parts.rate_limits.enter(self.key, count)

    def expect(self, choice: Choice) -> None:
        """Note whom the request names, before anything else of it is looked at: who is refused is counted there too."""
        record, parts = self.record, self.parts
        record.adapter_id, record.source = choice.label, choice.source
        is_listed = choice.asked_source is None and choice.label in parts.model_names.adapters
        is_single = len(choice.refs) == 1  # anybody can make up merges, of names that are known too
        record.is_known = is_single and (is_listed or bool(parts.seen.latest(Named(*choice.refs[0][:2]))))

    async def find(self, choice: Choice) -> Found:
        """Whoever is named, if the caller may use it."""
        self.expect(choice)
        record = self.record
        if not choice.refs:
            self.key.check_may_use_base()
            return Found(Resolved(""), self.parts.tokenizers.base)
        for ref, named in zip(choice.refs, choice.named, strict=True):
            await self.check_may_use(named, ref.source == HUB, choice.asked_source)
        resolved = await self._resolve(choice)
        record.identity, self.adapter_tier = resolved.identity, resolved.tier
        self._is_stale = resolved.stale is not None
        return Found(resolved, await self.parts.tokenizers.find(resolved))

    async def ask(self, found: Found, question: Question) -> list[Job]:
        """Requests to the engine, one for each answer; none is sent yet."""
        prompt_ids = await self._to_ids(found.tokenizer, question)
        stop = self._stop_params(found.tokenizer, question, len(prompt_ids))
        self._count_logprobs(question, len(prompt_ids), stop.max_new_tokens)
        jobs = []
        for seed in question.seeds:
            jobs.append(self._make_job(found, question, prompt_ids, stop, seed))
            self.jobs.append(jobs[-1])
        self._is_scoring = question.is_scoring
        self.record.max_new_tokens = 0 if question.is_scoring else stop.max_new_tokens
        self.record.prompt_tokens += len(prompt_ids)
        self.record.validation_s = time.monotonic() - self._began
        if self.parts.config.log_prompts:
            prompt = question.prompt if isinstance(question.prompt, str) else str(list(question.prompt))
            self.record.prompt = prompt if self.record.prompt is None else f"{self.record.prompt}\n{prompt}"
        self._set_timer()
        return jobs

    def _count_logprobs(self, question: Question, num_prompt_tokens: int, num_tokens: int) -> None:
        """A stream lists those of its tokens as they come, but those of its prompt at once."""
        each, alternatives = 0, question.sampling.num_alternatives
        if not self.record.is_streamed and (question.logprobs or alternatives):
            each += num_tokens * (1 + alternatives)
        if question.prompt_logprobs:
            each += num_prompt_tokens * (1 + alternatives)
        self._num_logprobs += each * len(question.seeds)
        check_logprobs(self._num_logprobs)

    async def check_may_use(self, named: Named, has_revisions: bool, source: str | None) -> None:
        """Refuse what the key may not use, in the same words whether it exists or not."""
        try:
            self.key.check_may_use(*named, self.parts.model_names.default_source, has_revisions)
        except ForbiddenError as error:
            raise await self.with_nearest(error, named.name, source) from None

    async def with_nearest(self, error: LoraxError, name: str, source: str | None) -> LoraxError:
        """The error of a name that may be misspelt, with those that may have been meant."""
        return await with_nearest(error, name, source, self.parts.model_names, self.key)

    def _make_job(self, found: Found, question: Question, ids: list[int], stop: StopParams, seed: int) -> Job:
        """A request of whoever has the key; without keys, of whoever is at the address."""
        identity = found.adapter.identity
        request = Request(
            self.parts.engine.new_id(),
            ids,
            replace(question.sampling, seed=seed),
            stop,
            identity,
            tenant=self.key.name or network(self._address),
            first_id=self.jobs[0].request.request_id if self.jobs else None,
            salt=self.key.salt(question.salt),
            prompt_logprobs=question.prompt_logprobs,
        )
        return Job(self.parts.engine, request, found.tokenizer)

    async def _resolve(self, choice: Choice) -> Resolved:
        found = []
        for ref, named in zip(choice.refs, choice.named, strict=True):
            try:
                found.append(await self._resolve_one(ref))
            except AdapterNotFoundError as error:
                told = self._in_words_of_models(error, ref, named)
                raise await self.with_nearest(told, named.name, choice.asked_source) from None
        if choice.merge is None:
            return found[0][1]
        merged = await self.parts.engine.resolve([ref for ref, _ in found], choice.merge)
        self.parts.seen.note(merged.identity, Named(MERGES, choice.label[:MAX_LABEL]))
        is_fetched = any(part.tier == FETCHED for _, part in found)  # by now the engine has them all
        return merged._replace(tier=FETCHED) if is_fetched else merged

    def _in_words_of_models(self, error: AdapterNotFoundError, ref: AdapterRef, named: Named) -> AdapterNotFoundError:
        """OpenAI's callers know of models and not of folders. What a hub says of a name, they understand."""
        is_folder = ref.source == LOCAL and self.path.startswith(OPENAI_PREFIX)
        return unknown_model(named.name) if is_folder else error

    async def _resolve_one(self, ref: AdapterRef) -> tuple[AdapterRef, Resolved]:
        """A name that is new here counts against the caller's quota, unless it could not be given now."""
        place = Named(ref.source, ref.name)
        with self.parts.rate_limits.fare(self.key, place) as fare:
            if ref.source != LOCAL and not self.parts.seen.latest(place):
                fare.take()
            try:
                ref, resolved = await self._ask_source(ref)
            except NOT_GIVEN:
                fare.give_back()
                raise
            except AdapterNotFoundError:
                await self.parts.forget_unloaded(place)
                raise
            except AdapterError as error:
                self.parts.note_failure(ref, error)
                raise
            if resolved.tier == FETCHED:
                fare.owe()
        self.parts.seen.note(resolved.identity, place)
        if resolved.stale is not None:
            self.parts.seen.fail(place, resolved.stale.message)
        return ref, resolved

    async def _ask_source(self, ref: AdapterRef) -> tuple[AdapterRef, Resolved]:
        """The bearer is shown only to a source that refuses who comes without."""
        try:
            return ref, await self.parts.engine.resolve([ref])
        except AdapterAccessError:
            if ref.token is not None or self._bearer is None:
                raise
            ref = ref._replace(token=self._bearer)
            return ref, await self.parts.engine.resolve([ref])

    async def _to_ids(self, tokenizer: TextTokenizer, question: Question) -> list[int]:
        if isinstance(question.prompt, str):
            check_text(question.prompt)
            self.num_characters += len(question.prompt)
            self._refuse_too_long(tokenizer, question, question.prompt)
            ids = await self.parts.tokenizers.encode(
                tokenizer, question.prompt, question.add_special_tokens, question.truncate
            )
        else:
            ids = list(question.prompt)
            most = max(int(self.parts.engine.info.get("vocab_size") or 0), tokenizer.num_ids)
            if ids and not 0 <= min(ids) <= max(ids) < most:
                raise InputError(f"`inputs` has tokens beyond the vocabulary of {most}")
            if question.truncate is not None:
                ids = ids[-question.truncate :]
        if not ids:
            raise InputError("`inputs` cannot be empty")
        return ids

    def _refuse_too_long(self, tokenizer: TextTokenizer, question: Question, text: str) -> None:
        """Refuse a text that cannot fit before time and memory are spent on its tokens."""
        count = tokenizer.count_at_least(text)
        if question.truncate is None and count > self.parts.max_input_length:
            self._stop_params(tokenizer, question, count, given="at least ")

    def _stop_params(self, tokenizer: TextTokenizer, question: Question, num_ids: int, given: str = "") -> StopParams:
        total, most = self.parts.max_total_tokens, self.parts.max_input_length
        left = max(total - num_ids, 1)
        wanted = question.max_new_tokens or min(left, question.default_new_tokens or left)
        if question.max_new_tokens is not None and num_ids + wanted > total:
            raise ContextLengthError(
                f"`inputs` tokens + `max_new_tokens` must be <= {total}. "
                f"Given: {given}{num_ids} `inputs` tokens and {wanted} `max_new_tokens`"
            )
        if num_ids > most:
            raise ContextLengthError(f"`inputs` must have less than {most} tokens. Given: {given}{num_ids}")
        return StopParams(
            max_new_tokens=wanted,
            min_new_tokens=question.min_new_tokens,
            eos_token_ids=self.parts.defaults.eos_token_ids | tokenizer.eos_token_ids,
            ignore_eos=question.ignore_eos,
            stop_token_ids=question.stop_token_ids,
            stop_strings=question.stop_strings,
            include_stop=question.include_stop,
        )

    async def write(self, make: Callable[[], Response]) -> Response:
        """A whole answer, which may be large: others are not to wait while it is put together."""
        size = sum(len(job.completion.token_ids) * (1 + job.request.sampling.num_alternatives) for job in self.jobs)
        size += sum(len(job.completion.prompt_logprobs or ()) for job in self.jobs)
        return make() if size <= SMALL else await asyncio.to_thread(make)

    # --- A stream -----------------------------------------------------------------------------------------------------

    async def open_stream(self, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        """The same events, of which the first is there already or takes long. So what goes wrong at once has a status
        of its own; what goes wrong later becomes the last event."""
        first = asyncio.ensure_future(anext(events))
        try:
            await asyncio.wait((first,), timeout=self.parts.config.keep_alive_s)
            if first.done():
                first.result()
        except BaseException:
            first.cancel()
            with suppress(BaseException):
                await first
            await events.aclose()
            raise
        stream = self._with_errors(first, events)
        await anext(stream)  # one that has not begun would close nothing when it is closed
        return stream

    async def _with_errors(
        self, first: "asyncio.Future[bytes]", events: AsyncGenerator[bytes, None]
    ) -> AsyncGenerator[bytes, None]:
        try:
            yield b""
            yield await first
            async for piece in events:
                yield piece
        except LoraxError as error:
            yield event(self._note(error).body(self.path))
        except Exception as error:
            logger.exception("request %s failed because of a mistake of the server", self.record.request_id)
            yield event(self._note(error).body(self.path))
        finally:
            first.cancel()
            await events.aclose()

    # --- How it ends --------------------------------------------------------------------------------------------------

    def stop(self, error: LoraxError) -> None:
        """End whatever is done for it, also before the engine is asked; who reads it gets the error."""
        if not self.stopped.done():
            self.stopped.set_result(error)
        for job in self.jobs:
            job.stop(error)

    def fail(self, error: Exception) -> Response:
        problem = self._note(error)
        self.record.status = problem.status
        response = problem.response(self.path)
        response.headers.update(self.adapter_headers())
        return response

    def end(self, has_left: bool = False) -> None:
        """Give back what it holds, and write down how it went."""
        if self._timer is not None:
            self._timer.cancel()
        record = self.record
        record.is_dropped = has_left
        record.total_s = time.monotonic() - self._began
        self._sum_up()
        if self._permit is not None:
            self._permit.leave(record.prompt_tokens + record.generated_tokens)
        self.parts.metrics.end(record)
        self.parts.tracer.end(record)
        log_request(record)

    def _note(self, error: Exception) -> Problem:
        problem = describe(error, self.path)
        self.record.error_type, self.record.error = problem.error_type, str(error)
        return problem

    def _sum_up(self) -> None:
        record, jobs = self.record, self.jobs
        record.generated_tokens = 0 if self._is_scoring else sum(len(job.completion.token_ids) for job in jobs)
        reasons = [job.completion.finish_reason for job in jobs]
        record.finish_reasons = [reason.name.lower() for reason in reasons if reason is not None]
        if self.parts.config.log_prompts:
            record.text = "\n".join(job.text for job in jobs)
        begun = [(job, job.started) for job in jobs if job.started is not None]
        if not begun:
            return
        job, started = begun[0]
        record.cached_tokens = count_cached(jobs)
        record.queue_s, record.adapter_s = started.queue_s, started.adapter_s
        assert job.sent_at is not None
        assert job.first_at is not None
        record.first_token_s = max(0.0, job.first_at - job.sent_at - started.queue_s)
        record.inference_s = max(0.0, time.monotonic() - job.sent_at - started.queue_s)

    def _set_timer(self) -> None:
        if self.timeout_s is not None and self._timer is None:
            left = self.timeout_s - (time.monotonic() - self._began)
            error = DeadlineError(f"there was no answer within {self.timeout_s:g} s")
            self._timer = asyncio.get_running_loop().call_later(max(0.0, left), self.stop, error)

    # --- Headers ------------------------------------------------------------------------------------------------------

    def adapter_headers(self) -> dict[str, str]:
        record = self.record
        if not record.identity:
            return {}
        return {
            "x-adapter-id": quote(record.adapter_id or "", safe="/@:,.-_ +"),
            "x-adapter-source": quote(record.source),
            "x-adapter-hash": record.identity,
            **({"x-adapter-tier": self.adapter_tier} if self.adapter_tier else {}),
            **({"x-adapter-version": "previous"} if self._is_stale else {}),
        }

    @property
    def first_event(self) -> dict[str, str]:
        """Fields that only the first event of a stream has, beside its token."""
        return {"adapter_tier": self.adapter_tier} if self.adapter_tier else {}

    def stream_headers(self) -> dict[str, str]:
        return {
            "x-compute-type": f"{self.parts.engine.info.get('device')}+optimized",
            "x-compute-characters": str(self.num_characters),
            "x-model-id": quote(self.parts.config.model_id, safe="/@:,.-_ +"),
            **self.adapter_headers(),
        }

    def headers(self, generated_tokens: int) -> dict[str, str]:
        """Of a whole answer, with its times in milliseconds."""
        self._sum_up()
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
        return (
            self.stream_headers()
            | {name: str(int(value * 1000)) for name, value in milliseconds.items()}
            | {name: str(value) for name, value in counts.items()}
        )


def _shorter(limit_s: float | None, asked: str | None) -> float | None:
    if asked is None:
        return limit_s
    try:
        asked_s = float(asked)
    except ValueError:
        asked_s = math.nan
    if not 0 < asked_s < math.inf:
        raise InputError(f"{TIMEOUT_HEADER} is a number of seconds above 0, not {asked[:32]!r}")
    return asked_s if limit_s is None else min(asked_s, limit_s)
