"""Routes by which a replica on Ray speaks to its own server: the adapters it has, and changes made elsewhere.

They are there only for a server that is a replica, and open only to its key, which no client knows.
"""

import asyncio
import logging
from typing import Any, NamedTuple

import msgspec
from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from lorax_server.errors import ForbiddenError, InputError, LoraxError
from lorax_server.server.access.keys import REPLICA, Key
from lorax_server.server.access.model_names import HUB_NAME, Choice, Named
from lorax_server.server.generations import cancel_all
from lorax_server.server.http.sse import until_gone
from lorax_server.server.routes.adapters import load_adapter, pin_adapter, unload_adapter
from lorax_server.server.schemas.openai import AdapterRequest, LoadRequest, VllmLoadRequest, VllmUnloadRequest
from lorax_server.server.service import MAX_ASKED, Service
from lorax_server.types import AdapterStage

logger = logging.getLogger(__name__)

MAX_REPORTED = 2 * MAX_ASKED  # adapters, those found last
TIERS = {AdapterStage.DEVICE.value: "device", AdapterStage.LOADING.value: "device", AdapterStage.HOST.value: "host"}
TIERS |= {AdapterStage.DISK.value: "disk", AdapterStage.PREPARING.value: "disk"}


class FollowRequest(BaseModel):
    """A change that a replica has made: the path and the body of the admin's request."""

    path: str
    body: dict[str, Any]
    meant: tuple[str, str] | None = None  # what the name of an unload has stood for, if it may be gone here
    forgets: bool = True  # what the name of a load means here, so that the next request resolves it anew


class PlacedAdapter(BaseModel):
    """An adapter by its name at its source."""

    source: str
    name: str


class PinRequest(PlacedAdapter):
    """An adapter that was loaded, by the identity that the load has found."""

    identity: str
    pin: bool


class Followed(NamedTuple):
    """A change that was made here, and the adapter that it was about: what is left to do, the replica decides."""

    source: str
    name: str
    pin: bool | None = None  # what was asked for
    latest: str = ""  # the identity that the name has meant here last


def make_router(service: Service) -> APIRouter:
    router = APIRouter(include_in_schema=False)

    def check(http: Request) -> Key:
        key = service.keys.identify(http.headers.get("authorization"))
        if key.name != REPLICA:
            raise ForbiddenError("only the replica that this server belongs to may do this")
        return key

    @router.get("/replica/state")
    async def state(http: Request) -> Response:
        """Tell what a router and an autoscaler need to know."""
        check(http)
        return _json(await describe_state(service))

    @router.post("/replica/follow")
    async def follow(http: Request, body: FollowRequest) -> Response:
        """Make a change of names, at once. The adapter is loaded by another request."""
        return _json((await follow_change(service, check(http), body))._asdict())

    @router.post("/replica/load")
    async def load(http: Request, body: PlacedAdapter) -> Response:
        """Load an adapter without a pin, for as long as the replica waits for it."""
        key, choice = check(http), service.model_names.find(body.name, body.source)
        loading = asyncio.create_task(load_adapter(service, key, choice, None))
        leaving = asyncio.create_task(until_gone(http.receive))
        try:
            await asyncio.wait((loading, leaving), return_when=asyncio.FIRST_COMPLETED)
            return _json({"identity": loading.result()}) if loading.done() else Response()
        finally:
            await cancel_all([loading, leaving])

    @router.post("/replica/pin")
    async def pin(http: Request, body: PinRequest) -> Response:
        """Pin or unpin an adapter that was loaded."""
        check(http)
        await pin_adapter(service, body.identity, Named(body.source, body.name), body.pin)
        return Response()

    return router


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


async def describe_state(service: Service) -> dict[str, Any]:
    status, info = await service.engine.status(), service.engine.info
    return {
        "is_draining": service.is_draining,
        "running": status.running,
        "waiting": status.waiting + status.waiting_for_adapters,
        "tokens": (status.num_blocks - status.free_blocks) * info.block_size,
        "on_device": status.adapters_on_device,
        "evictions": status.adapters_evicted_from_device,
        "names": await _list_names(service),
    }


async def _list_names(service: Service) -> dict[str, list[str]]:
    """List the names of adapters by where they are: each adapter by all names that requests may give it."""
    seen, listed = service.adapter_index, dict[str, list[str]]()
    aliases: dict[Any, list[str]] = {}
    for alias, named in service.model_names.aliases.items():
        aliases.setdefault(named, []).append(alias)
    identities = seen.newest(MAX_REPORTED)
    for start in range(0, len(identities), MAX_ASKED):
        for state in await service.engine.list_adapters(identities[start : start + MAX_ASKED]):
            names = [name for name in seen.names(state.identity) if seen.latest(name) == state.identity]
            for name in names:
                tier = TIERS.get(state.state, "broken")
                listed.setdefault(tier, []).extend((name.name, *aliases.get(name, ())))
    for name in seen.failed_names():
        listed.setdefault("broken", []).extend((name.name, *aliases.get(name, ())))
    return listed


async def follow_change(service: Service, key: Key, change: FollowRequest) -> Followed:
    """Make a change of names. Making it again changes nothing more."""
    names, pin, body = service.model_names, None, change.body
    match change.path:
        case "/v1/adapters/load":
            load = LoadRequest.model_validate(body)
            choice, alias, pin = names.find(load.adapter_id, load.adapter_source), load.name, load.pin
        case "/v1/load_lora_adapter":
            added = VllmLoadRequest.model_validate(body)
            is_hub = HUB_NAME.fullmatch(added.lora_path) and service.config.engine.sources.hub
            choice, alias = names.find(added.lora_path, "hub" if is_hub else "local"), added.lora_name
        case "/v1/adapters/unload":
            unload = AdapterRequest.model_validate(body)
            return await _unload(service, key, unload.adapter_id, unload.adapter_source, change.meant)
        case "/v1/unload_lora_adapter":
            return await _unload(service, key, VllmUnloadRequest.model_validate(body).lora_name, None, change.meant)
        case _:
            raise InputError(f"there is nothing to follow at {change.path[:64]!r}")
    return await _load(service, choice, alias, pin, change.forgets)


async def _load(service: Service, choice: Choice, alias: str | None, pin: bool | None, forgets: bool) -> Followed:
    (name,) = choice.names
    if alias:
        service.model_names.add(alias, *name)
    if forgets:
        await service.engine.forget(*name)
    return Followed(*name, pin, service.adapter_index.latest(name))


async def _unload(
    service: Service, key: Key, adapter_id: str, source: str | None, meant: tuple[str, str] | None
) -> Followed:
    (name,) = service.model_names.find(adapter_id, source).names  # before its alias goes
    called = [(adapter_id, source)]
    if meant is not None and meant != name:
        called.append((meant[1], meant[0]))
    for label, at in called:
        try:
            await unload_adapter(service, key, label, at)
        except LoraxError as error:  # it may be here by another name, or not at all
            logger.info("adapter %r was unloaded; here: %s", label[:64], error)
    return Followed(*name)
