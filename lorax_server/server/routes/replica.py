"""Internal routes for a replica's Ray actor: load reports, and adapter changes from other replicas.

`ReplicaAccess` rejects requests from clients.
"""

import asyncio
import logging
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lorax_server.errors import BusyError, EngineError, LoraxError
from lorax_server.server.access.keys import Key
from lorax_server.server.access.model_names import AdapterKey
from lorax_server.server.http.error_responses import json_response
from lorax_server.server.http.replica_protocol import AdapterChange
from lorax_server.server.routes.adapters import load_adapter, pin_adapter, unload_adapter
from lorax_server.server.service import MAX_IDENTITIES_PER_QUERY, Service
from lorax_server.types import AdapterStage

logger = logging.getLogger(__name__)

LOAD_RETRY_S = 0.5
MAX_LOAD_ATTEMPTS = 20  # enough for an engine restart
UNAVAILABLE_ERRORS = (EngineError, BusyError)
REPLICA_KEY = Key("replica")
MAX_REPORTED_ADAPTERS = 2 * MAX_IDENTITIES_PER_QUERY  # only the most recently resolved adapters are reported
TIER_BY_STATE = {
    AdapterStage.DEVICE.value: "device",
    AdapterStage.LOADING.value: "device",
    AdapterStage.HOST.value: "host",
}
TIER_BY_STATE |= {AdapterStage.DISK.value: "disk", AdapterStage.PREPARING.value: "disk"}


def make_control_app(service: Service) -> Starlette:
    """Create the control app that the replica's Ray actor calls.

    Its routes need no API key and stay available while the server drains.
    """
    replicator = ChangeReplicator(service)

    async def state(_: Request) -> Response:
        """Return the load for the autoscaler, and the adapters in each tier for the request router."""
        status, info = await service.engine.status(), service.engine.info
        content = {
            "running": status.running,
            "waiting": status.waiting + status.waiting_for_adapters,
            "tokens": (status.num_blocks - status.free_blocks) * info.block_size,
            "evictions": status.adapters_evicted_from_device,
            "names": await _list_names_by_tier(service),
        }
        return json_response(content)

    async def apply_change(request: Request) -> Response:
        """Apply an adapter load or unload. The response is sent before the adapter is loaded."""
        body = await request.json()
        await replicator.apply(AdapterChange(**body["change"]), body["is_own"])
        return Response()

    async def fail(_: Request, error: Exception) -> Response:
        return Response(str(error), 503)

    routes = [Route("/replica/state", state), Route("/replica/changes", apply_change, methods=["POST"])]
    return Starlette(routes=routes, exception_handlers={LoraxError: fail})


async def _list_names_by_tier(service: Service) -> dict[str, list[str]]:
    """Return adapter names and aliases, keyed by tier."""
    seen, listed = service.adapter_index, dict[str, list[str]]()
    aliases: dict[Any, list[str]] = {}
    for alias, named in service.model_names.aliases.items():
        aliases.setdefault(named, []).append(alias)
    identities = seen.newest_identities(MAX_REPORTED_ADAPTERS)
    for start in range(0, len(identities), MAX_IDENTITIES_PER_QUERY):
        for state in await service.engine.list_adapters(identities[start : start + MAX_IDENTITIES_PER_QUERY]):
            names = [name for name in seen.names_of(state.identity) if seen.latest_identity(name) == state.identity]
            for name in names:
                tier = TIER_BY_STATE.get(state.state, "broken")
                listed.setdefault(tier, []).extend((name.name, *aliases.get(name, ())))
    for name in seen.failed_names():
        listed.setdefault("broken", []).extend((name.name, *aliases.get(name, ())))
    return listed


# --- Adapter changes from other replicas ------------------------------------------------------------------------------


class PendingLoad(NamedTuple):
    """An adapter load that runs in the background."""

    task: asyncio.Task[None]
    pin: bool | None  # whether to pin the adapter after the load; None leaves the pin as it is
    known_identity: str  # identity that this server has already loaded; "" if the name must be resolved


class ChangeReplicator:
    """Applies adapter changes one at a time, in the registry's order. Adapters load in the background.

    A server also re-applies the changes that it processed itself. Otherwise, replicas could have different states after
    two concurrent changes. Applying a change twice is harmless. The server does not resolve an adapter that it has just
    loaded, because only the admin's request contained the token for the source.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lock = asyncio.Lock()  # held while a change or a pin is applied
        self._loads: dict[AdapterKey, PendingLoad] = {}

    async def apply(self, change: AdapterChange, is_own: bool) -> None:
        """Apply an adapter change, or log why it cannot be applied. Raise if the engine is unavailable."""
        name = AdapterKey(change.source, change.name)
        async with self._lock:
            pending = self._loads.pop(name, None)
            if pending is not None:
                pending.task.cancel()
            try:
                if change.is_load:
                    await self._load(change, name, is_own, pending)
                else:
                    await self._unload(change)
            except UNAVAILABLE_ERRORS:
                raise
            except LoraxError as error:
                action = "load" if change.is_load else "unload"
                logger.warning("cannot apply the %s of adapter %r: %s", action, change.name[:64], error)

    async def _load(self, change: AdapterChange, name: AdapterKey, is_own: bool, pending: PendingLoad | None) -> None:
        """Assign the change's alias. Start a background load if the adapter must be pinned or updated."""
        if change.alias:
            self._service.model_names.add_alias(change.alias, *name)
        if not is_own:
            await self._service.engine.forget(*name)
        latest, pin = self._service.adapter_index.latest_identity(name), change.pin
        if pin is None and pending is not None:
            pin = pending.pin
        # A pending load may find a newer version than this server has loaded, so its name must be resolved again.
        known = latest if is_own and (pending is None or pending.known_identity) else ""
        if pin is not None or (latest and not is_own):
            self._loads[name] = PendingLoad(asyncio.create_task(self._load_and_pin(name, known, pin)), pin, known)

    async def _unload(self, change: AdapterChange) -> None:
        if change.alias:
            self._service.model_names.remove_alias(change.alias)
        await unload_adapter(self._service, REPLICA_KEY, change.name, change.source)

    async def _load_and_pin(self, name: AdapterKey, known_identity: str, pin: bool | None) -> None:
        for _ in range(MAX_LOAD_ATTEMPTS):
            try:
                identity = known_identity or await self._resolve(name)
                if pin is not None:
                    async with self._lock:
                        await pin_adapter(self._service, identity, name, pin)
                break
            except UNAVAILABLE_ERRORS:
                await asyncio.sleep(LOAD_RETRY_S)
            except LoraxError as error:
                if not known_identity:
                    logger.warning("cannot load adapter %r, which another replica loaded: %s", name.name[:64], error)
                    break
                known_identity = ""  # the engine has restarted and lost the adapter
        if self._loads[name].task is asyncio.current_task():
            del self._loads[name]

    async def _resolve(self, name: AdapterKey) -> str:
        choice = self._service.model_names.select_adapter(name.name, name.source)
        return await load_adapter(self._service, REPLICA_KEY, choice, None)
