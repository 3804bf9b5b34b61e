"""The server as a whole: what all requests share, from its start to its end."""

import asyncio
import logging
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Protocol, Self

from starlette.datastructures import Headers
from starlette.requests import Request

from lorax_server.config import ServerConfig
from lorax_server.engine.remote.client import EngineClient
from lorax_server.errors import AdapterError, ConfigError, EngineError, InputError, LoraxError
from lorax_server.server.access.keys import Key, KeyRing
from lorax_server.server.access.model_names import ModelNames, Named
from lorax_server.server.access.rate_limits import RateLimits
from lorax_server.server.checks import pick_sampling
from lorax_server.server.generations import cancel_all
from lorax_server.server.seen_adapters import IN_MEMORY, SeenAdapters, blames_adapter
from lorax_server.server.telemetry.audit import AdminAction, AuditLog
from lorax_server.server.telemetry.metrics import Metrics, RequestMetrics
from lorax_server.server.telemetry.tracing import Tracer
from lorax_server.server.tokenizers import Tokenizers
from lorax_server.server.workers.changes import Changes, NameFailed, NameForgotten, make_change
from lorax_server.server.workers.common import make_names, note_preloaded, scrape, watch_folder
from lorax_server.text.generation_defaults import GenerationDefaults, load_generation_defaults
from lorax_server.text.tokenizer import load_tokenizer
from lorax_server.types import AdapterRef, SamplingParams

logger = logging.getLogger(__name__)

RETRY_S = 1.0
MAX_ASKED = 1000  # identities in one question to the engine


class Stoppable(Protocol):
    def stop(self, error: LoraxError) -> None: ...


class Payable(Protocol):
    """The price of a new adapter: `Fare`, or one at another process."""

    async def ask(self) -> None: ...
    def owe(self) -> None: ...
    def give_back(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None: ...


class Leavable(Protocol):
    """The right to be answered: a `Permit`, or one at another process."""

    def leave(self, tokens: int = 0) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...


@dataclass(eq=False)
class Service:
    """Everything that requests share. It belongs to one event loop, and `start` makes it."""

    config: ServerConfig
    engine: EngineClient
    keys: KeyRing
    model_names: ModelNames
    tokenizers: Tokenizers
    defaults: GenerationDefaults
    tracer: Tracer
    seen: SeenAdapters = field(default_factory=SeenAdapters)
    created: int = field(default_factory=lambda: int(time.time()))  # when the models of this server came to be
    is_draining: bool = False
    exchanges: set[Stoppable] = field(default_factory=set)
    _closing: AsyncExitStack = field(default_factory=AsyncExitStack)

    def __post_init__(self) -> None:
        config, total = self.config, self.engine.info.max_length
        self.max_total_tokens = total
        self.max_input_length = min(config.max_input_length or total, total - 1)
        self.rate_limits = RateLimits(
            config.max_concurrent_requests, new_adapters_per_minute=config.new_adapters_per_minute
        )
        self.metrics = self._make_metrics()
        self.audit_log = AuditLog(self.metrics)

    def _make_metrics(self) -> RequestMetrics:
        return Metrics(max_input_length=self.max_input_length, max_total_tokens=self.max_total_tokens)

    @property
    def is_ready(self) -> bool:
        return self.engine.is_healthy and not self.is_draining

    # --- Start and end ------------------------------------------------------------------------------------------------

    @classmethod
    async def start(cls, config: ServerConfig, engine: EngineClient, keys: KeyRing) -> "Service":
        """Start a service and return it when it is ready: the engine has answered a request of its own by then.

        Files are read while the engine loads the model.
        """
        names = make_names(config)
        async with AsyncExitStack() as closing:
            starting = asyncio.create_task(engine.start())
            closing.push_async_callback(engine.close)
            closing.push_async_callback(cancel_all, [starting])
            parts = await cls._read_files(config, closing)
            await watch_folder(config, names.set_folder, closing)
            await starting
            service = cls(config, engine, keys, names, *parts)
            await note_preloaded(config, engine, names, service.change)
            service._closing = closing.pop_all()
        return service

    @staticmethod
    async def _read_files(
        config: ServerConfig, closing: AsyncExitStack
    ) -> tuple[Tokenizers, GenerationDefaults, Tracer]:
        """Read the files that every API process needs for itself."""
        folder = config.engine.model.path
        tracer = Tracer(config.otlp_endpoint, model=config.model_id)
        closing.push_async_callback(asyncio.to_thread, tracer.close)
        base = await asyncio.to_thread(load_tokenizer, folder, template_config=config.tokenizer_config_path)
        defaults = await asyncio.to_thread(load_generation_defaults, folder)
        _check_defaults(defaults)
        tokenizers = Tokenizers(base, folder)
        closing.push_async_callback(tokenizers.close)
        await tokenizers.start()
        return tokenizers, defaults, tracer

    def drain(self) -> None:
        """Refuse new requests. Those under way have until the deadline, and then get an error that says why."""
        if not self.is_draining:
            self.is_draining = True
            logger.info("stopping: %d requests may take up to %g s", len(self.exchanges), self.config.drain_s)
            asyncio.get_running_loop().call_later(self.config.drain_s, self._stop_exchanges)

    def _stop_exchanges(self) -> None:
        for exchange in list(self.exchanges):
            exchange.stop(_shutting_down())

    async def close(self) -> None:
        await self._closing.aclose()

    # --- Callers ------------------------------------------------------------------------------------------------------

    def identify(self, headers: Headers) -> Key:
        """Return the key of a request, before anything else of it is looked at."""
        self.check_is_open()
        return self.keys.identify(headers.get("authorization"))

    def check_admin(self, http: Request, action: str, adapter_id: str) -> Key:
        """Return an admin's key, or refuse the caller. The audit log tells who did it, and how it ended."""
        act = http.state.admin_action = AdminAction(action, adapter_id)
        self.check_is_open()
        key = self.keys.check_admin(http.headers.get("authorization"))
        act.key = key.name
        return key

    def check_is_open(self) -> None:
        if self.is_draining:
            raise _shutting_down()

    # --- State that is one for all API processes, here where there is one -------------------------------------------

    async def enter(self, key: Key, count: int = 1) -> Leavable:
        """Let in `count` answers to one request, or refuse them all."""
        return self.rate_limits.enter(key, count)

    def fare(self, key: Key, name: Named) -> Payable:
        """Return what the requests of a key that wait for one adapter share."""
        return self.rate_limits.fare(key, name)

    async def change(self, change: Changes) -> None:
        """Change what is known of names and adapters, everywhere."""
        make_change(change, self.model_names, self.seen)

    async def scrape(self, as_json: bool = False) -> bytes:
        """Write the metrics of all."""
        assert isinstance(self.metrics, Metrics)
        return await scrape(self.metrics, self.engine, as_json)

    # --- Adapters -----------------------------------------------------------------------------------------------------

    async def note_failure(self, ref: AdapterRef, error: AdapterError) -> None:
        """Note why a name cannot be served, if that is the adapter's fault."""
        if blames_adapter(ref, error):
            await self.change(NameFailed(Named(ref.source, ref.name), str(error)))

    async def forget_unloaded(self, name: Named) -> None:
        """Forget those adapters that a name has meant and that are in memory no longer."""
        identities = self.seen.identities(name)[-MAX_ASKED:]
        if identities:
            states = await self.engine.list_adapters(identities)
            in_memory = {state.identity for state in states if state.state in IN_MEMORY}
            for identity in identities:
                if identity not in in_memory:
                    await self.change(NameForgotten(identity, name))


def _shutting_down() -> EngineError:
    error = EngineError("the server is shutting down")
    error.retry_after_s = RETRY_S  # another server may take its place
    return error


def _check_defaults(defaults: GenerationDefaults) -> None:
    """Refuse settings of the model that no request could use."""
    try:
        SamplingParams(**pick_sampling(defaults))
    except InputError as error:
        raise ConfigError(f"generation_config.json: {error}; mend the model's file") from error
