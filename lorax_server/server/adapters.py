"""Routes for what is loaded: everybody may see the adapters that have names, an admin sees and changes all."""

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from lorax_server.errors import AdapterNotFoundError, LoraxError
from lorax_server.server.completions import ERRORS
from lorax_server.server.keys import HUB
from lorax_server.server.names import HUB_NAME, Choice, Named
from lorax_server.server.openai_schemas import (
    Adapter,
    AdapterList,
    AdapterRequest,
    LoadRequest,
    VllmLoadRequest,
    VllmUnloadRequest,
)
from lorax_server.server.problems import json_response
from lorax_server.server.service import Service
from lorax_server.types import AdapterState

TAG = "Adapters"
ON_DISK = "on disk"
Also = Annotated[
    list[str],
    Query(default_factory=list, max_length=100, description="Names of further adapters that may have been used."),
]


def make_router(service: Service) -> APIRouter:
    router = APIRouter(tags=[TAG])
    _add_ours(router, service)
    _add_vllm(router, service)
    return router


def _add_ours(router: APIRouter, service: Service) -> None:
    @router.get("/v1/adapters", response_model=AdapterList, responses=ERRORS)
    async def adapters(http: Request, also: Also) -> Response:
        """Where adapters are, and what they are used for. An admin sees all, others those with a name they may use, and
        those that they name by `also`."""
        return json_response({"object": "list", "data": await _list(service, http, also)})

    @router.post("/v1/adapters/load", response_model=Adapter, responses=ERRORS)
    async def load(http: Request, body: LoadRequest) -> Response:
        """Bring an adapter to the device, its latest version if it was here before, and pin it there if asked to."""
        service.check_admin(http, "load", body.adapter_id)
        names = service.parts.names
        choice = names.find(body.adapter_id, body.adapter_source, body.api_token or None)
        identity = await _load(service, choice, body.pin)
        if body.name:
            names.add(body.name, choice.refs[0].source, choice.refs[0].name)
        return json_response(await _one(service, identity, body.name or body.adapter_id))

    @router.post("/v1/adapters/unload", response_model=AdapterList, responses=ERRORS)
    async def unload(http: Request, body: AdapterRequest) -> Response:
        """Let an adapter go as soon as no request needs it, also if it is pinned. Who names it again gets it again,
        unless it had its name from here."""
        service.check_admin(http, "unload", body.adapter_id)
        await _unload(service, body.adapter_id, body.adapter_source)
        return json_response({"object": "list", "data": await _list(service, http)})


def _add_vllm(router: APIRouter, service: Service) -> None:
    as_text: dict[int | str, dict[str, Any]] = {
        **ERRORS,
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
    }

    @router.post("/v1/load_lora_adapter", response_model=None, responses=as_text)
    async def load(http: Request, body: VllmLoadRequest) -> Response:
        """As in vLLM: give a name to a folder, or to a repository of the hub, and load it."""
        service.check_admin(http, "load", f"{body.lora_name}={body.lora_path}")
        source = "hub" if HUB_NAME.fullmatch(body.lora_path) and service.parts.config.engine.sources.hub else "local"
        choice = service.parts.names.find(body.lora_path, source)
        await _load(service, choice, None)
        service.parts.names.add(body.lora_name, source, body.lora_path)
        return Response(f"Success: LoRA adapter '{body.lora_name}' added successfully.", media_type="text/plain")

    @router.post("/v1/unload_lora_adapter", response_model=None, responses=as_text)
    async def unload(http: Request, body: VllmUnloadRequest) -> Response:
        """As in vLLM: let an adapter go, and its name with it."""
        service.check_admin(http, "unload", body.lora_name)
        await _unload(service, body.lora_name, None)
        return Response(f"Success: LoRA adapter '{body.lora_name}' removed successfully.", media_type="text/plain")


async def _load(service: Service, choice: Choice, pin: bool | None) -> str:
    """Its source is asked again, whatever was known. What the name meant before is let go."""
    engine, (ref,) = service.engine, choice.refs
    place = Named(ref.source, ref.name)
    before = service.parts.seen.identities(place)
    await engine.forget(ref.source, ref.name)
    identity = (await engine.resolve([ref])).identity
    service.parts.seen.note(identity, place)
    await engine.load(identity, pin)
    for old in before:
        if old != identity and not service.parts.seen.is_meant_by_others(old, place):
            await engine.unload(old)
    return identity


async def _unload(service: Service, name: str, source: str | None) -> None:
    parts = service.parts
    (ref,) = parts.names.find(name, source).refs
    place = Named(ref.source, ref.name)
    identities = parts.seen.identities(place)
    if not identities and parts.names.adapters.get(name) is None:
        raise AdapterNotFoundError(f"adapter {name[:64]!r} is not loaded; /v1/adapters lists those that are")
    for identity in identities:
        if not parts.seen.is_meant_by_others(identity, place):
            await service.engine.unload(identity)
    if source is None:
        parts.names.remove(name)


async def _list(service: Service, http: Request, also: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Those with names first, then those that were asked for; then, for an admin, the others that the engine knows."""
    parts, key = service.parts, service.identify(http)
    states = {state.identity: state for state in await service.engine.list_adapters()}
    listed, shown = [], set()
    named = sorted(parts.names.adapters)
    for name in (*named, *dict.fromkeys(name for name in also if name not in named)):
        choice = parts.names.find(name, None)
        (ref,), (allowed,) = choice.refs, choice.named
        if not key.may_use(*allowed, parts.names.default_source, ref.source == HUB):
            continue
        place = Named(ref.source, ref.name)
        found = [identity for identity in parts.seen.identities(place) if identity in states]
        if found or name in named:
            shown.update(found)
            listed.append(_describe(name, place, states[found[-1]] if found else None))
    if key.is_admin:
        others = [state for identity, state in states.items() if identity not in shown]
        listed += [_describe(state.name, parts.seen.name(state.identity), state) for state in others]
    return listed


async def _one(service: Service, identity: str, name: str) -> dict[str, Any]:
    for state in await service.engine.list_adapters():
        if state.identity == identity:
            return _describe(name, service.parts.seen.name(identity), state)
    raise LoraxError("the adapter has gone again")


def _describe(name: str, place: Named | None, state: AdapterState | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "adapter",
        "source": place.source if place else None,
        "hash": state.identity if state else None,
        "state": state.state if state else ON_DISK,
        "bytes": state.num_bytes if state else None,
        "pinned": state.is_pinned if state else False,
        "requests": state.num_requests if state else 0,
        "uses": state.num_uses if state else 0,
        "error": state.error if state else None,
    }
