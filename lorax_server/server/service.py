"""The server as a whole: starts and ends what it is made of, and surrounds each request with what all have in common:
who asks, for how long, and what is noted of it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import cached_property

from starlette.requests import Request
from starlette.responses import Response

from lorax_server.config import ServerConfig
from lorax_server.engine.remote.client import EngineClient
from lorax_server.errors import ConfigError, DeadlineError, EngineError, InputError, LoraxError, SourceError
from lorax_server.server.access.folder import FolderWatch
from lorax_server.server.access.keys import Key, KeyRing
from lorax_server.server.access.model_names import ModelNames
from lorax_server.server.access.rate_limits import RateLimits
from lorax_server.server.exchange import Exchange
from lorax_server.server.http.sse import EventStream, until_gone
from lorax_server.server.parts import Parts, Seen
from lorax_server.server.telemetry.audit import AdminAction, AuditLog
from lorax_server.server.telemetry.metrics import Metrics
from lorax_server.server.telemetry.tracing import Tracer
from lorax_server.server.tokenizers import Tokenizers
from lorax_server.text.generation_defaults import GenerationDefaults, load_generation_defaults
from lorax_server.text.tokenizer import load_tokenizer
from lorax_server.types import AdapterRef, SamplingParams

logger = logging.getLogger(__name__)

CLIENT_LEFT = 499  # nobody reads it; it is for the log
RETRY_S = 1.0
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")

Work = Callable[[Exchange], Awaitable[Response]]


class Service:
    """From `start` to `close`; all of it belongs to one event loop."""

    def __init__(self, config: ServerConfig, engine: EngineClient, keys: KeyRing) -> None:
        self.config = config
        self.engine = engine
        self.is_draining = False
        self._keys = keys
        self._tracer = Tracer(config.otlp_endpoint, model=config.model_id)
        self._names = ModelNames(
            config.model_id,
            config.served_names,
            config.default_source,
            config.static_adapter,
            config.engine.sources.roots,
        )
        for source, name in config.engine.preload:
            self._names.add(name, source, name)
        self._folder = FolderWatch(config.adapters_dir, self._names.set_folder) if config.adapters_dir else None
        self._tokenizers: Tokenizers | None = None
        self._parts: Parts | None = None
        self._calls: set[Exchange] = set()

    @property
    def parts(self) -> Parts:
        assert self._parts is not None, "the server is not started"
        return self._parts

    @cached_property
    def audit_log(self) -> AuditLog:
        return AuditLog(self.parts.metrics)

    @property
    def is_ready(self) -> bool:
        return self.engine.is_healthy and not self.is_draining

    # --- Coming and going ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Ready when this returns: the engine has answered a request of its own by then."""
        starting = asyncio.create_task(self.engine.start())
        try:
            self._parts = await self._prepare(starting)
        except BaseException:
            starting.cancel()
            await asyncio.wait((starting,))
            await self.close()
            raise

    async def _prepare(self, starting: "asyncio.Task[None]") -> Parts:
        """What can be done while the engine loads the model, then wait for it."""
        config, folder = self.config, self.config.engine.model.path
        base = await asyncio.to_thread(load_tokenizer, folder, template_config=config.tokenizer_config_path)
        defaults = await asyncio.to_thread(load_generation_defaults, folder)
        _check_defaults(defaults)
        self._tokenizers = Tokenizers(base, folder)
        await self._tokenizers.start()
        if self._folder is not None:
            await asyncio.to_thread(self._folder.start)
        await starting
        seen = await self._find_preloaded()
        total = self.engine.info.max_length
        most = min(config.max_input_length or total, total - 1)
        return Parts(
            config=config,
            engine=self.engine,
            keys=self._keys,
            model_names=self._names,
            rate_limits=RateLimits(
                config.max_concurrent_requests, new_adapters_per_minute=config.new_adapters_per_minute
            ),
            tokenizers=self._tokenizers,
            defaults=defaults,
            metrics=Metrics(max_input_length=most, max_total_tokens=total),
            tracer=self._tracer,
            max_total_tokens=total,
            max_input_length=most,
            seen=seen,
        )

    async def _find_preloaded(self) -> Seen:
        """Who they are, which the engine knows by now."""
        seen = Seen()
        for source, name in self.config.engine.preload:
            with suppress(SourceError):  # of which the engine has told already
                resolved = await self.engine.resolve([AdapterRef(source, name)])
                seen.note(resolved.identity, self._names.place(source, name))
                seen.pin(resolved.identity, self._names.place(source, name))
        return seen

    def drain(self) -> None:
        """Take nothing new. What is under way has until the deadline, and is then told why it ends."""
        if not self.is_draining:
            self.is_draining = True
            logger.info("stopping: %d requests may take up to %g s", len(self._calls), self.config.drain_s)
            asyncio.get_running_loop().call_later(self.config.drain_s, self._end_all)

    def _end_all(self) -> None:
        for call in list(self._calls):
            call.stop(_shutting_down())

    async def close(self) -> None:
        if self._folder is not None:
            self._folder.close()
        await self.engine.close()
        if self._tokenizers is not None:
            await self._tokenizers.close()
        await asyncio.to_thread(self._tracer.close)

    # --- Requests -----------------------------------------------------------------------------------------------------

    async def answer(self, http: Request, work: Work) -> Response:
        """What a route does about a request, with all that surrounds it: who asks, how long it may take, what is noted.

        A stream goes on after this has returned, and ends the call itself.
        """
        self.parts.metrics.begin()
        call = Exchange(self.parts, http)
        self._calls.add(call)
        response: Response | None = None
        try:
            self._check_is_open()
            call.identify()
            response = await _while_connected(http, call, work)
        except LoraxError as error:
            response = call.fail(error)
        except Exception as error:
            logger.exception("request %s failed because of a mistake of the server", call.record.request_id)
            response = call.fail(error)
        finally:
            if isinstance(response, EventStream):
                response.on_end = lambda has_left: self._end(call, has_left)
            else:
                self._end(call, has_left=response is None)
        return Response(status_code=CLIENT_LEFT) if response is None else response

    def identify(self, http: Request) -> Key:
        """Who asks for something that needs no answer of the model."""
        return self.check_caller(http.headers.get("authorization"))

    def check_caller(self, authorization: str | None) -> Key:
        """Find the caller by a header, before anything else of a request is looked at."""
        self._check_is_open()
        return self._keys.identify(authorization)

    def check_admin(self, http: Request, action: str, adapter: str) -> None:
        """Let only admins do something. Who did, and how it went, is written down when the request has ended."""
        act = http.state.admin_action = AdminAction(action, adapter)
        self._check_is_open()
        act.key = self._keys.check_admin(http.headers.get("authorization")).name

    def _end(self, call: Exchange, has_left: bool) -> None:
        self._calls.discard(call)
        call.end(has_left)

    def _check_is_open(self) -> None:
        if self.is_draining:
            raise _shutting_down()


def _shutting_down() -> EngineError:
    error = EngineError("the server is shutting down")
    error.retry_after_s = RETRY_S  # another one may take its place
    return error


def _check_defaults(defaults: GenerationDefaults) -> None:
    """What the model's own settings ask for is asked for by every request that does not say otherwise."""
    named = {name: value for name, value in defaults._asdict().items() if name in SAMPLING and value is not None}
    try:
        SamplingParams(**named)
    except InputError as error:
        raise ConfigError(f"generation_config.json: {error}; mend the model's file") from error


async def _while_connected(http: Request, call: Exchange, work: Work) -> Response | None:
    """None if the client has gone before there was a response."""
    working = asyncio.ensure_future(work(call))
    leaving = asyncio.create_task(until_gone(http.receive))
    try:
        ends = (working, leaving, call.stopped)
        await asyncio.wait(ends, timeout=call.timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if leaving.done():
            return None
        if call.stopped.done():
            raise call.stopped.result()
        raise DeadlineError(f"there was no answer within {call.timeout_s:g} s")
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.wait((working, leaving))
