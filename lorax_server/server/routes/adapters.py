"""Routes for adapters: callers see those that have names, an admin sees and changes all."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from lorax_server.errors import AdapterError, AdapterNotFoundError, ConflictError, LoraxError
from lorax_server.server.access.keys import Key
from lorax_server.server.access.model_names import HUB_NAME, Choice, Named, with_nearest
from lorax_server.server.adapter_listing import (
    BY_NAME,
    MARK,
    MAX_ALSO,
    MAX_LIMIT,
    MAX_TEXT,
    PageQuery,
    describe,
    list_page,
)
from lorax_server.server.http.problems import json_response
from lorax_server.server.http.replica_protocol import AdapterChange
from lorax_server.server.routes.openai import ERRORS
from lorax_server.server.schemas.openai import (
    Adapter,
    AdapterList,
    AdapterRequest,
    LoadRequest,
    OpenAIErrorResponse,
    VllmLoadRequest,
    VllmUnloadRequest,
)
from lorax_server.server.service import Service

TAG = "Adapters"
MAX_HOLDERS = 5  # names in a message
HELD: dict[int | str, dict[str, Any]] = {**ERRORS, 409: {"model": OpenAIErrorResponse}}
Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT, description="Adapters of a page.")]
After = Annotated[
    str,
    Query(max_length=MAX_TEXT, pattern=MARK, description="`next` of the page before; left out: the first page."),
]
Search = Annotated[str, Query(max_length=MAX_TEXT, description="Only adapters whose name has this text.")]
Also = Annotated[
    list[str],
    Query(
        default_factory=list,
        max_length=MAX_ALSO,
        description="Names of further adapters that may have been used; they are on the first page.",
    ),
]


def make_router(service: Service) -> APIRouter:
    router = APIRouter(tags=[TAG])
    _add_ours(router, service)
    _add_vllm(router, service)
    return router


def _add_ours(router: APIRouter, service: Service) -> None:
    @router.get("/v1/adapters", operation_id="list_adapters", response_model=AdapterList, responses=ERRORS)
    async def adapters(
        http: Request, also: Also, limit: Limit = MAX_LIMIT, after: After = BY_NAME, search: Search = ""
    ) -> Response:
        """List adapters in pages: their place and their use. An admin sees all, others those with a name they
        may use, and those that they name by `also`."""
        query = PageQuery(limit, after, search, also)
        return json_response(await list_page(service, http.state.key, query))

    @router.post("/v1/adapters/load", operation_id="load_adapter", response_model=Adapter, responses=ERRORS)
    async def load(http: Request, body: LoadRequest) -> Response:
        """Bring an adapter to the device, its latest version if it was here before, and pin it there if asked to."""
        key = service.check_admin(http, "load", body.adapter_id)
        names = service.model_names
        choice = names.find(body.adapter_id, body.adapter_source, body.api_token or None)
        identity = await load_adapter(service, key, choice, body.pin)
        if body.name:
            names.add(body.name, *choice.names[0])
        http.state.adapter_change = AdapterChange(True, *choice.names[0], body.name or "", body.pin)
        return json_response(await _describe(service, identity, body.name or body.adapter_id))

    @router.post("/v1/adapters/unload", operation_id="unload_adapter", response_model=AdapterList, responses=HELD)
    async def unload(http: Request, body: AdapterRequest) -> Response:
        """Unload an adapter as soon as no request needs it, also if it is pinned by this name. A request that names it
        loads it again, unless it had its name from here."""
        key = service.check_admin(http, "unload", body.adapter_id)
        http.state.adapter_change = await unload_adapter(service, key, body.adapter_id, body.adapter_source)
        return json_response(await list_page(service, key))


def _add_vllm(router: APIRouter, service: Service) -> None:
    as_text: dict[int | str, dict[str, Any]] = {
        **ERRORS,
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
    }

    @router.post("/v1/load_lora_adapter", operation_id="load_lora_adapter", response_class=Response, responses=as_text)
    async def load(http: Request, body: VllmLoadRequest) -> Response:
        """As in vLLM: give a name to a folder, or to a repository of the hub, and load it."""
        key = service.check_admin(http, "load", f"{body.lora_name}={body.lora_path}")
        source = "hub" if HUB_NAME.fullmatch(body.lora_path) and service.config.engine.sources.hub else "local"
        choice = service.model_names.find(body.lora_path, source)
        await load_adapter(service, key, choice, None)
        service.model_names.add(body.lora_name, source, body.lora_path)
        http.state.adapter_change = AdapterChange(True, *choice.names[0], body.lora_name)
        return Response(f"Success: LoRA adapter '{body.lora_name}' added successfully.", media_type="text/plain")

    @router.post(
        "/v1/unload_lora_adapter",
        operation_id="unload_lora_adapter",
        response_class=Response,
        responses={**HELD, **as_text},
    )
    async def unload(http: Request, body: VllmUnloadRequest) -> Response:
        """As in vLLM: unload an adapter, and remove its name."""
        key = service.check_admin(http, "unload", body.lora_name)
        http.state.adapter_change = await unload_adapter(service, key, body.lora_name, None)
        return Response(f"Success: LoRA adapter '{body.lora_name}' removed successfully.", media_type="text/plain")


async def load_adapter(service: Service, key: Key, choice: Choice, pin: bool | None) -> str:
    """Resolve a name anew and load its adapter. Adapters that the name meant before are unloaded."""
    engine, (ref,), (name,) = service.engine, choice.refs, choice.names
    earlier = service.adapter_index.identities(name)
    await engine.forget(ref.source, ref.name)
    try:
        identity = (await engine.resolve([ref])).identity
    except AdapterNotFoundError as error:
        raise await with_nearest(error, choice.label, choice.asked_source, service.model_names, key) from None
    except AdapterError as error:
        service.record_failure(ref, error)
        raise
    service.adapter_index.add(identity, name, ref.token is not None)
    await pin_adapter(service, identity, name, pin)
    for old in earlier:
        if old != identity and not await _find_holders(service, old, name):
            await _unload_identity(service, old)
    return identity


async def pin_adapter(service: Service, identity: str, name: Named, pin: bool | None) -> None:
    """Bring an adapter to the device, and pin or unpin it there; None leaves that as it is."""
    await service.engine.load(identity, pin)
    if pin:
        service.adapter_index.pin(identity, name)
    elif pin is not None:
        service.adapter_index.unpin(identity)


async def unload_adapter(service: Service, key: Key, adapter_id: str, source: str | None) -> AdapterChange:
    names, choice = service.model_names, service.model_names.find(adapter_id, source)
    (name,) = choice.names
    identities = service.adapter_index.identities(name)
    if not identities and choice.label not in names.adapters:
        error = AdapterNotFoundError(f"adapter {adapter_id[:64]!r} is not loaded; /v1/adapters lists those that are")
        raise await with_nearest(error, adapter_id, source, names, key)
    holders = {identity: await _find_holders(service, identity, name) for identity in identities}
    if identities and holders[identities[-1]]:
        raise _conflict(choice.label, holders[identities[-1]])
    for identity in identities:
        if not holders[identity]:
            await _unload_identity(service, identity)
    await service.forget_unloaded(name)
    if source is None:
        names.remove(choice.label)
    return AdapterChange(False, *name, "" if source else choice.label)


async def _find_holders(service: Service, identity: str, name: Named) -> list[str]:
    """List other names that have pinned an adapter, if it still is pinned: an engine that starts anew has no pins."""
    others = service.adapter_index.pinned_by(identity) - {name}
    if not others or not any(state.is_pinned for state in await service.engine.list_adapters([identity])):
        return []
    aliases = {alias for alias, named in service.model_names.adapters.items() if named in others}
    return sorted(aliases or {other.name for other in others})


async def _unload_identity(service: Service, identity: str) -> None:
    await service.engine.unload(identity)
    service.adapter_index.unpin(identity)


def _conflict(adapter_id: str, holders: list[str]) -> ConflictError:
    listed = ", ".join(map(repr, holders[:MAX_HOLDERS]))
    return ConflictError(
        f"adapter {adapter_id[:64]!r} has the same content as {listed}, which is pinned, so that it stays. Unload that "
        'one, or load it with "pin": false, and then unload this one'
    )


async def _describe(service: Service, identity: str, alias: str) -> dict[str, Any]:
    for state in await service.engine.list_adapters([identity]):
        return describe(alias, service.adapter_index.first_name(identity), state, None)
    raise LoraxError("the adapter has gone again")
