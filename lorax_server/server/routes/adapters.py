"""The routes to list, load and unload adapters, including vLLM's routes. Loading and unloading require an admin key,
unless only this machine can reach a server without keys.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from lorax_server.errors import AdapterError, AdapterNotFoundError, ConflictError, LoraxError
from lorax_server.server.access.keys import Key
from lorax_server.server.access.model_names import HUB_NAME_PATTERN, AdapterKey, ModelSelection, with_suggestions
from lorax_server.server.adapter_listing import PageQuery, adapter_to_json, list_page
from lorax_server.server.adapter_versions import split_version
from lorax_server.server.checks import check_query
from lorax_server.server.http.error_responses import json_response
from lorax_server.server.http.replica_protocol import AdapterChange
from lorax_server.server.routes.openai import ERROR_RESPONSES
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

OPENAPI_TAG = "Adapters"
MAX_PIN_NAMES_IN_ERROR = 5
ERROR_RESPONSES_AND_CONFLICT: dict[int | str, dict[str, Any]] = {**ERROR_RESPONSES, 409: {"model": OpenAIErrorResponse}}


def make_router(service: Service) -> APIRouter:
    router = APIRouter(tags=[OPENAPI_TAG])
    _add_adapter_routes(router, service)
    _add_vllm_routes(router, service)
    return router


def _add_adapter_routes(router: APIRouter, service: Service) -> None:
    @router.get("/v1/adapters", operation_id="list_adapters", response_model=AdapterList, responses=ERROR_RESPONSES)
    async def adapters(request: Request, query: Annotated[PageQuery, Query()]) -> Response:
        """List adapters in pages, with their memory tier and usage. Admins see all adapters. Other callers see the
        named adapters that they may use, and the adapters in `also`."""
        check_query(request.query_params, PageQuery.model_fields)
        return json_response(await list_page(service, request.state.key, query))

    @router.post("/v1/adapters/load", operation_id="load_adapter", response_model=Adapter, responses=ERROR_RESPONSES)
    async def load(request: Request, body: LoadRequest) -> Response:
        """Load the latest adapter version to the device, and pin or unpin it if `pin` is set."""
        key = service.check_admin(request, "load", body.adapter_id)
        check_query(request.query_params)
        names = service.model_names
        _check_no_versions(service, body.name)
        choice = names.select_adapter(body.adapter_id, body.adapter_source, body.api_token or None)
        identity = await load_adapter(service, key, choice, body.pin)
        if body.name:
            await _add_alias(service, body.name, choice.adapter_keys[0])
        request.state.adapter_change = AdapterChange(True, *choice.adapter_keys[0], body.name or "", body.pin)
        return json_response(await _describe_adapter(service, identity, body.name or body.adapter_id))

    @router.post(
        "/v1/adapters/unload",
        operation_id="unload_adapter",
        response_model=AdapterList,
        responses=ERROR_RESPONSES_AND_CONFLICT,
    )
    async def unload(request: Request, body: AdapterRequest) -> Response:
        """Unload an adapter once no request uses it, even if it is pinned under this name. A later request
        loads it again, unless its name was assigned by the load route."""
        key = service.check_admin(request, "unload", body.adapter_id)
        check_query(request.query_params)
        request.state.adapter_change = await unload_adapter(service, key, body.adapter_id, body.adapter_source)
        if body.adapter_source is None:
            await remove_versions(service, body.adapter_id)
        return json_response(await list_page(service, key))


def _add_vllm_routes(router: APIRouter, service: Service) -> None:
    as_text: dict[int | str, dict[str, Any]] = {
        **ERROR_RESPONSES,
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
    }

    @router.post("/v1/load_lora_adapter", operation_id="load_lora_adapter", response_class=Response, responses=as_text)
    async def load(request: Request, body: VllmLoadRequest) -> Response:
        """Load a folder or hub repository and assign a name to it, as in vLLM."""
        key = service.check_admin(request, "load", f"{body.lora_name}={body.lora_path}")
        _check_no_versions(service, body.lora_name)
        source = "hub" if HUB_NAME_PATTERN.fullmatch(body.lora_path) and service.config.engine.sources.hub else "local"
        choice = service.model_names.select_adapter(body.lora_path, source)
        await load_adapter(service, key, choice, None)
        await _add_alias(service, body.lora_name, AdapterKey(source, body.lora_path))
        request.state.adapter_change = AdapterChange(True, *choice.adapter_keys[0], body.lora_name)
        return Response(f"Success: LoRA adapter '{body.lora_name}' added successfully.", media_type="text/plain")

    @router.post(
        "/v1/unload_lora_adapter",
        operation_id="unload_lora_adapter",
        response_class=Response,
        responses={**ERROR_RESPONSES_AND_CONFLICT, **as_text},
    )
    async def unload(request: Request, body: VllmUnloadRequest) -> Response:
        """Unload an adapter and remove its name, as in vLLM."""
        key = service.check_admin(request, "unload", body.lora_name)
        request.state.adapter_change = await unload_adapter(service, key, body.lora_name, None)
        await remove_versions(service, body.lora_name)
        return Response(f"Success: LoRA adapter '{body.lora_name}' removed successfully.", media_type="text/plain")


async def load_adapter(service: Service, key: Key, selection: ModelSelection, pin: bool | None) -> str:
    """Resolve a name, bypassing the cache, load the adapter and return its identity.

    Older versions that the name resolved to are unloaded.
    """
    engine, (ref,), (name,) = service.engine, selection.refs, selection.adapter_keys
    old_identities = service.adapter_index.identities_of(name)
    await engine.forget(ref.source, ref.name)
    try:
        identity = (await engine.resolve([ref])).identity
    except AdapterNotFoundError as error:
        raise await with_suggestions(
            error, selection.label, selection.requested_source, service.model_names, key
        ) from None
    except AdapterError as error:
        service.record_failure(ref, error)
        raise
    service.adapter_index.add(identity, name, ref.token is not None)
    await pin_adapter(service, identity, name, pin)
    for old_identity in old_identities:
        if old_identity != identity and not await _find_other_pins(service, old_identity, name):
            await service.unload(old_identity)
    return identity


async def pin_adapter(service: Service, identity: str, name: AdapterKey, pin: bool | None) -> None:
    """Load an adapter to the device, and pin or unpin it. `pin=None` does neither."""
    await service.engine.load(identity, pin)
    if pin:
        service.adapter_index.pin(identity, name)
    elif pin is not None:
        service.adapter_index.unpin(identity)


async def transfer_pin(service: Service, old: str, old_name: AdapterKey, new: str, new_name: AdapterKey) -> None:
    """If an adapter is pinned, move the pin to another adapter."""
    if old_name in service.adapter_index.pinning_names(old):
        await pin_adapter(service, new, new_name, True)
        if not await _find_other_pins(service, old, old_name):
            await service.unload(old)


async def unload_adapter(service: Service, key: Key, adapter_id: str, source: str | None) -> AdapterChange:
    names, choice = service.model_names, service.model_names.select_adapter(adapter_id, source)
    (name,) = choice.adapter_keys
    identities = service.adapter_index.identities_of(name)
    if not identities and choice.label not in names.adapters:
        error = AdapterNotFoundError(
            f"adapter {adapter_id[:64]!r} is not loaded; GET /v1/adapters lists the loaded adapters"
        )
        raise await with_suggestions(error, adapter_id, source, names, key)
    holders = {identity: await _find_other_pins(service, identity, name) for identity in identities}
    if identities and holders[identities[-1]]:
        raise _make_conflict_error(choice.label, holders[identities[-1]])
    for identity in identities:
        if not holders[identity]:
            await service.unload(identity)
    await service.forget_unloaded(name)
    if source is None and names.strip_version(choice.label) == choice.label:
        names.remove_alias(choice.label)
    return AdapterChange(False, *name, "" if source else choice.label)


async def remove_versions(service: Service, name: str) -> None:
    """Remove the uploaded versions of a name."""
    versions = service.versions
    async with versions.lock:
        if versions.get(name) is not None:
            await versions.apply(name, None)
    await service.delete_retired()


def _check_no_versions(service: Service, name: str | None) -> None:
    """Raise if a name, or the name before a version number, has uploaded versions."""
    for each in {name, split_version(name)[0]} if name else ():
        if service.versions.get(each) is not None:
            raise ConflictError(f"adapter {each[:64]!r} has uploaded versions; unload it, or assign another name")


async def _add_alias(service: Service, alias: str, key: AdapterKey) -> None:
    async with service.versions.lock:
        _check_no_versions(service, alias)  # again, because an upload may have finished during the load
        service.model_names.add_alias(alias, *key)


async def _find_other_pins(service: Service, identity: str, name: AdapterKey) -> list[str]:
    """Return the other names that pin this adapter. The engine is queried, because its pins are lost when it
    restarts.
    """
    others = service.adapter_index.pinning_names(identity) - {name}
    if not others or not any(state.is_pinned for state in await service.engine.list_adapters([identity])):
        return []
    aliases = {alias for alias, key in service.model_names.adapters.items() if key in others}
    return sorted(aliases or {other.name for other in others})


def _make_conflict_error(adapter_id: str, holders: list[str]) -> ConflictError:
    listed = ", ".join(map(repr, holders[:MAX_PIN_NAMES_IN_ERROR]))
    return ConflictError(
        f"adapter {adapter_id[:64]!r} cannot be unloaded because it has the same content as {listed}, which is pinned. "
        'First unload the pinned adapter, or load it with "pin": false'
    )


async def _describe_adapter(service: Service, identity: str, alias: str) -> dict[str, Any]:
    for state in await service.engine.list_adapters([identity]):
        return adapter_to_json(alias, service.adapter_index.first_name(identity), state)
    raise LoraxError("the adapter was evicted right after the load")
