"""Defines `Service`, the state that all requests share, with its startup and shutdown."""

import asyncio
import logging
import time
from collections.abc import Set
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Protocol

from starlette.datastructures import Headers
from starlette.requests import Request

from lorax_server.config import ServerConfig
from lorax_server.engine.remote.remote_engine import RemoteEngine
from lorax_server.errors import AdapterError, ConfigError, EngineError, InputError, LoraxError, SourceError
from lorax_server.pooling import GENERATE, read_pooling
from lorax_server.server.access.folder_watcher import FolderWatcher
from lorax_server.server.access.keys import Key, KeyRing
from lorax_server.server.access.model_names import AdapterKey, ModelNames
from lorax_server.server.access.rate_limits import AdapterQuota, RateLimits
from lorax_server.server.adapter_name_index import IN_MEMORY_STAGES, AdapterNameIndex, is_adapter_fault
from lorax_server.server.adapter_versions import AdapterVersions
from lorax_server.server.checks import collect_sampling_fields
from lorax_server.server.generations import InputWindow, cancel_all
from lorax_server.server.http.hosts import is_loopback
from lorax_server.server.telemetry.audit import AdminAction, AuditLog
from lorax_server.server.telemetry.metrics import Metrics
from lorax_server.server.telemetry.tracing import Tracer
from lorax_server.server.tokenizers import Tokenizers
from lorax_server.text.generation_defaults import GenerationDefaults, load_generation_defaults
from lorax_server.text.tokenizer import load_tokenizer
from lorax_server.text.tools.formats import renders_tools
from lorax_server.types import AdapterRef, SamplingParams

logger = logging.getLogger(__name__)

SHUTDOWN_RETRY_S = 1.0
FORWARDING_HEADERS = ("forwarded", "via", "x-forwarded-for", "x-real-ip")  # a proxy may add them
MAX_IDENTITIES_PER_QUERY = 1000  # identities in one query to the engine


class StoppableRequest(Protocol):
    @property
    def adapter_keys(self) -> Set[AdapterKey]: ...

    def stop(self, error: LoraxError) -> None: ...


@dataclass(eq=False)
class Service:
    """The state that all requests share. Create it with `start`. It belongs to one event loop."""

    config: ServerConfig
    engine: RemoteEngine
    keys: KeyRing
    model_names: ModelNames
    tokenizers: Tokenizers
    defaults: GenerationDefaults
    tracer: Tracer
    adapter_index: AdapterNameIndex = field(default_factory=AdapterNameIndex)
    created: int = field(default_factory=lambda: int(time.time()))  # the `created` field of all models
    is_draining: bool = False
    running: set[StoppableRequest] = field(default_factory=set)  # requests that `drain` may stop
    _exit_stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    _deletions: "set[asyncio.Task[None]]" = field(default_factory=set)  # of removed versions

    def __post_init__(self) -> None:
        config, total = self.config, self.engine.info.max_length
        self.pooling = read_pooling(config.engine.model)  # None if the model generates text
        self.task = GENERATE if self.pooling is None else self.pooling.task
        self.max_total_tokens = total
        self.max_input_length = min(config.max_input_length or total, total - 1)
        self.rate_limits = RateLimits(config.max_concurrent_requests)
        self.input_window = InputWindow(config.engine.max_waiting)
        self.adapter_quota = AdapterQuota(config.new_adapters_per_minute)
        self.metrics = Metrics(max_input_length=self.max_input_length, max_total_tokens=self.max_total_tokens)
        self.audit_log = AuditLog(self.metrics)
        self.versions = AdapterVersions(self.model_names, config.engine.sources.uploads)
        self.metrics.versions.list_adapters = lambda: self.versions

    @property
    def is_ready(self) -> bool:
        return self.engine.is_healthy and not self.is_draining

    @property
    def allows_local_admin(self) -> bool:
        """Return True if callers may change adapters without a key, because all of them run on this machine."""
        return self.keys.is_empty and is_private_to_machine(self.config)

    # --- Startup and shutdown -----------------------------------------------------------------------------------------

    @classmethod
    async def start(cls, config: ServerConfig, engine: RemoteEngine, keys: KeyRing) -> "Service":
        """Create a service that is ready for requests. Reads tokenizer files while the engine loads the model."""
        folder, names = config.engine.model.path, _make_names(config)
        async with AsyncExitStack() as closing:
            starting = asyncio.create_task(engine.start())
            closing.push_async_callback(engine.close)
            closing.push_async_callback(cancel_all, [starting])
            tracer = Tracer(config.otlp_endpoint, model=config.model_id)
            closing.push_async_callback(asyncio.to_thread, tracer.close)
            try:
                base = await asyncio.to_thread(load_tokenizer, folder, template_config=config.tokenizer_config_path)
            except LoraxError:
                if starting.done():
                    await starting  # an error in the model is more important
                raise
            defaults = await asyncio.to_thread(load_generation_defaults, folder)
            _check_defaults(defaults)
            tokenizers = Tokenizers(base, folder)
            _log_tool_prompt(config, tokenizers.find_template(base, has_tools=True))
            closing.push_async_callback(tokenizers.close)
            await tokenizers.start()
            if config.adapters_dir:
                watch = FolderWatcher(config.adapters_dir, names.set_folder_names)
                closing.callback(watch.close)
                await asyncio.to_thread(watch.start)
            await starting
            service = cls(config, engine, keys, names, tokenizers, defaults, tracer)
            await asyncio.to_thread(service.versions.load)
            await service._index_preloaded()
            service._exit_stack = closing.pop_all()
        return service

    async def _index_preloaded(self) -> None:
        """Add preloaded adapters to the index. The engine has already pinned them."""
        for source, name in self.config.engine.preload:
            with suppress(SourceError):  # the engine has logged the error
                identity = (await self.engine.resolve([AdapterRef(source, name)])).identity
                named = self.model_names.normalize(source, name)
                self.adapter_index.add(identity, named)
                self.adapter_index.pin(identity, named)

    def drain(self) -> None:
        """Reject new requests, and wait for running requests. Requests that still run after `drain_s` fail with "the
        server is shutting down".
        """
        if not self.is_draining:
            self.is_draining = True
            logger.info("shutting down: waiting up to %g s for %d requests", self.config.drain_s, len(self.running))
            asyncio.get_running_loop().call_later(self.config.drain_s, self._stop_requests)

    def _stop_requests(self) -> None:
        for request in list(self.running):
            request.stop(_make_shutdown_error())

    async def close(self) -> None:
        await self._exit_stack.aclose()

    # --- Callers ------------------------------------------------------------------------------------------------------

    def identify(self, headers: Headers) -> Key:
        """Return the caller's key from the request headers. This runs before the body is read."""
        if self.is_draining:
            raise _make_shutdown_error()
        return self.keys.identify(headers.get("authorization"))

    def check_admin(self, request: Request, action: str, adapter_id: str) -> Key:
        """Return the caller's key, or raise if it may not change adapters. Store the action for the audit log."""
        key: Key = request.state.key
        admin_action = request.state.admin_action = AdminAction(action, adapter_id)
        is_forwarded = any(name in request.headers for name in FORWARDING_HEADERS)
        if is_forwarded or not self.allows_local_admin:
            self.keys.check_admin(key)
        admin_action.key = key.name
        return key

    # --- Adapters -----------------------------------------------------------------------------------------------------

    def record_failure(self, ref: AdapterRef, error: AdapterError) -> None:
        """Record in the index why an adapter cannot be served, if the adapter's files are the cause."""
        if is_adapter_fault(ref, error):
            self.adapter_index.set_error(AdapterKey(ref.source, ref.name), str(error))

    async def forget_unloaded(self, name: AdapterKey) -> None:
        """Remove adapter versions of this name from the index if they are no longer in memory."""
        identities = self.adapter_index.identities_of(name)[-MAX_IDENTITIES_PER_QUERY:]
        if identities:
            states = await self.engine.list_adapters(identities)
            in_memory = {state.identity for state in states if state.state in IN_MEMORY_STAGES}
            for identity in identities:
                if identity not in in_memory:
                    self.adapter_index.remove(identity, only=name)

    def finish(self, request: StoppableRequest) -> None:
        """Remove a finished request, and delete removed adapter versions that it used."""
        self.running.discard(request)
        if any(version.key in request.adapter_keys for version in self.versions.retired):
            task = asyncio.create_task(self.try_delete_retired())
            self._deletions.add(task)
            task.add_done_callback(self._deletions.discard)

    async def try_delete_retired(self) -> None:
        """Call `delete_retired`, and ignore engine and adapter errors."""
        with suppress(LoraxError):  # the next upload or unload tries again
            await self.delete_retired()

    async def delete_retired(self) -> None:
        """Unload removed versions and delete their files, except for versions with unfinished requests or uploads."""
        index, versions = self.adapter_index, self.versions
        for version in list(versions.retired):
            if version.key in versions.in_use or any(version.key in each.adapter_keys for each in self.running):
                continue
            identity = index.latest_identity(version.key)
            states = await self.engine.list_adapters([identity]) if identity else []
            if any(state.num_requests for state in states) or version not in versions.retired:
                continue
            versions.retired.remove(version)
            if set(index.names_of(identity)) == {version.key}:
                await self.unload(identity)
            index.remove(identity, only=version.key)
            await asyncio.to_thread(versions.delete_folder, version.key.name)

    async def unload(self, identity: str) -> None:
        """Unload an adapter once no request uses it."""
        await self.engine.unload(identity)
        self.adapter_index.unpin(identity)


def is_private_to_machine(config: ServerConfig) -> bool:
    """Return True if only programs on this machine, and no web pages of other hosts, can send requests."""
    is_exposed = config.allowed_hosts or config.cors.allow_origins or config.replica_secret is not None
    return is_loopback(config.host) and not is_exposed


def _make_names(config: ServerConfig) -> ModelNames:
    names = ModelNames(
        config.model_id,
        config.served_names,
        config.default_source,
        config.static_adapter,
        config.engine.sources.roots,
    )
    for source, name in config.engine.preload:
        names.add_alias(name, source, name)
    return names


def _log_tool_prompt(config: ServerConfig, template: str | None) -> None:
    if config.tool_parsers and config.describe_tools and template is not None and not renders_tools(template):
        logger.info(
            "the chat template does not render tools, so their definitions are written into the system message for %s; "
            "--describe-tools false disables this",
            ", ".join(f"--tool-parser {parser}" for parser in config.tool_parsers),
        )


def _make_shutdown_error() -> EngineError:
    # Another server may be running by the time of the retry.
    return EngineError("the server is shutting down", retry_after_s=SHUTDOWN_RETRY_S)


def _check_defaults(defaults: GenerationDefaults) -> None:
    """Raise `ConfigError` if `generation_config.json` has invalid sampling values."""
    try:
        SamplingParams(**collect_sampling_fields(defaults))
    except InputError as error:
        raise ConfigError(f"generation_config.json: {error}; correct the file") from error
