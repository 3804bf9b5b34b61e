"""The server as a whole: what all requests share, from its start to its end."""

import asyncio
import logging
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Protocol

from starlette.datastructures import Headers
from starlette.requests import Request

from lorax_server.config import ServerConfig
from lorax_server.engine.remote.client import EngineClient
from lorax_server.errors import ConfigError, EngineError, InputError, LoraxError, SourceError
from lorax_server.server.access.folder import FolderWatch
from lorax_server.server.access.keys import Key, KeyRing
from lorax_server.server.access.model_names import ModelNames, Named
from lorax_server.server.access.rate_limits import RateLimits
from lorax_server.server.checks import pick_sampling
from lorax_server.server.generations import cancel_all
from lorax_server.server.seen_adapters import IN_MEMORY, SeenAdapters
from lorax_server.server.telemetry.audit import AdminAction, AuditLog
from lorax_server.server.telemetry.metrics import Metrics
from lorax_server.server.telemetry.tracing import Tracer
from lorax_server.server.tokenizers import Tokenizers
from lorax_server.text.generation_defaults import GenerationDefaults, load_generation_defaults
from lorax_server.text.tokenizer import load_tokenizer
from lorax_server.types import AdapterRef, SamplingParams

logger = logging.getLogger(__name__)

RETRY_S = 1.0
MAX_ASKED = 1000  # identities in one question to the engine


class Stoppable(Protocol):
    def stop(self, error: LoraxError) -> None: ...


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
        self.metrics = Metrics(max_input_length=self.max_input_length, max_total_tokens=total)
        self.audit_log = AuditLog(self.metrics)

    @property
    def is_ready(self) -> bool:
        return self.engine.is_healthy and not self.is_draining

    # --- Start and end ------------------------------------------------------------------------------------------------

    @classmethod
    async def start(cls, config: ServerConfig, engine: EngineClient, keys: KeyRing) -> "Service":
        """Start a service and return it when it is ready: the engine has answered a request of its own by then.

        Files are read while the engine loads the model.
        """
        names, folder = _make_names(config), config.engine.model.path
        async with AsyncExitStack() as closing:
            tracer = Tracer(config.otlp_endpoint, model=config.model_id)
            closing.push_async_callback(asyncio.to_thread, tracer.close)
            starting = asyncio.create_task(engine.start())
            closing.push_async_callback(engine.close)
            closing.push_async_callback(cancel_all, [starting])
            base = await asyncio.to_thread(load_tokenizer, folder, template_config=config.tokenizer_config_path)
            defaults = await asyncio.to_thread(load_generation_defaults, folder)
            _check_defaults(defaults)
            tokenizers = Tokenizers(base, folder)
            closing.push_async_callback(tokenizers.close)
            await tokenizers.start()
            if config.adapters_dir:
                watch = FolderWatch(config.adapters_dir, names.set_folder)
                closing.callback(watch.close)
                await asyncio.to_thread(watch.start)
            await starting
            service = cls(config, engine, keys, names, tokenizers, defaults, tracer)
            await service._note_preloaded()
            service._closing = closing.pop_all()
        return service

    async def _note_preloaded(self) -> None:
        for source, name in self.config.engine.preload:
            with suppress(SourceError):  # the engine has logged it already
                identity = (await self.engine.resolve([AdapterRef(source, name)])).identity
                named = self.model_names.tidy(source, name)
                self.seen.note(identity, named)
                self.seen.pin(identity, named)

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

    # --- Adapters -----------------------------------------------------------------------------------------------------

    async def forget_unloaded(self, name: Named) -> None:
        """Forget those adapters that a name has meant and that are in memory no longer."""
        identities = self.seen.identities(name)[-MAX_ASKED:]
        if identities:
            states = await self.engine.list_adapters(identities)
            in_memory = {state.identity for state in states if state.state in IN_MEMORY}
            for identity in identities:
                if identity not in in_memory:
                    self.seen.forget_name(identity, name)


def _make_names(config: ServerConfig) -> ModelNames:
    names = ModelNames(
        config.model_id,
        config.served_names,
        config.default_source,
        config.static_adapter,
        config.engine.sources.roots,
    )
    for source, name in config.engine.preload:
        names.add(name, source, name)
    return names


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
