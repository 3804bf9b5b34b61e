"""Routes that upload adapter weights and select the version that requests use. They require an admin key."""

import asyncio
import base64
import json
import math
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from hashlib import sha256
from io import FileIO
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Query, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from lorax_server.adapters.sources.source import read_json
from lorax_server.errors import (
    AdapterError,
    AdapterNotFoundError,
    BusyError,
    ForbiddenError,
    InputError,
    NotSupportedError,
    OverloadedError,
    SourceError,
)
from lorax_server.files.names import CONFIG_FILE, WEIGHTS_FILE
from lorax_server.files.regular_file import convert_read_errors, open_regular_file
from lorax_server.files.strict_json import parse_json
from lorax_server.pooling import GENERATE
from lorax_server.server.access.keys import Key
from lorax_server.server.access.model_names import AdapterKey, make_unknown_model_error
from lorax_server.server.adapter_versions import NUMBER_PATTERN, make_upload_key
from lorax_server.server.checks import check_query
from lorax_server.server.http.error_responses import json_response
from lorax_server.server.http.middleware import discard_body
from lorax_server.server.request_context import CLIENT_DISCONNECTED_STATUS, RequestContext
from lorax_server.server.routes.adapters import ERROR_RESPONSES_AND_CONFLICT, OPENAPI_TAG, transfer_pin
from lorax_server.server.routes.openai import ERROR_RESPONSES
from lorax_server.server.schemas.openai import AdapterVersionList, VersionWeights
from lorax_server.server.service import Service
from lorax_server.types import AdapterRef, ResolvedAdapter

MAX_UPLOADS = 4  # concurrent uploads
UPLOAD_PARAMETERS = ("config", "running", "activate")
WRITE_BYTES = 2**20  # bytes per write; a thread switch for each network packet would be slow
DIGEST_PATTERN = re.compile(r"(?:^|,)\s*sha-256=:([A-Za-z0-9+/=]+):\s*(?=,|$)")
WEIGHTS_BODY = {
    "required": True,
    "description": "A safetensors file. `Content-Digest: sha-256=:...:` is checked if it is set.",
    "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
}


def make_router(service: Service) -> APIRouter:
    router = APIRouter(tags=[OPENAPI_TAG])

    @router.put(
        "/v1/adapters/{name:path}/weights",
        operation_id="update_adapter",
        response_model=AdapterVersionList,
        responses=ERROR_RESPONSES_AND_CONFLICT,
        openapi_extra={"requestBody": WEIGHTS_BODY},
    )
    async def update(
        request: Request,
        name: str,
        config: Annotated[
            str | None, Query(description="`adapter_config.json`. By default, the config of the present version.")
        ] = None,
        running: Annotated[
            Literal["finish", "move"], Query(description="Whether unfinished requests keep the old weights.")
        ] = "finish",
        activate: Annotated[bool, Query(description="Whether new requests use the new version.")] = True,
    ) -> Response:
        """Upload new weights as the adapter's next version, `name@vN`. New requests for `name` use this version."""
        key = service.check_admin(request, "update", name)
        upload = _Upload(service, key, name)
        try:
            check_query(request.query_params, UPLOAD_PARAMETERS)
            await upload.run(request, config, running == "move", activate)
        except ClientDisconnect:
            service.metrics.adapter_updates.labels("disconnected").inc()
            return Response(status_code=CLIENT_DISCONNECTED_STATUS)
        except BaseException:
            service.metrics.adapter_updates.labels("rejected").inc()
            if not upload.is_received and "expect" not in request.headers:
                await discard_body(request.receive)  # or a client that is still sending may miss the response
            raise
        service.metrics.adapter_updates.labels("updated").inc()
        return json_response(_describe(service, name))

    @router.get(
        "/v1/adapters/{name:path}/versions",
        operation_id="list_adapter_versions",
        response_model=AdapterVersionList,
        responses=ERROR_RESPONSES,
    )
    async def list_versions(request: Request, name: str) -> Response:
        """List the versions of an adapter with uploaded weights."""
        check_query(request.query_params)
        _find_versions(service, request.state.key, name)
        return json_response(_describe(service, name))

    @router.post(
        "/v1/adapters/{name:path}/versions",
        operation_id="select_adapter_version",
        response_model=AdapterVersionList,
        responses=ERROR_RESPONSES,
    )
    async def select(request: Request, name: str, body: VersionWeights) -> Response:
        """Select the version for new requests, or divide new requests among versions."""
        key = service.check_admin(request, "select version", name)
        check_query(request.query_params)
        weights, versions = _read_weights(body), service.versions
        async with versions.lock:
            _find_versions(service, key, name)
            try:
                adapter = versions.weigh(name, weights)
            except InputError as error:
                raise InputError(f"`{'weights' if body.version is None else 'version'}`: {error}") from None
            await versions.apply(name, adapter)
        return json_response(_describe(service, name))

    return router


def _find_versions(service: Service, key: Key, name: str) -> None:
    """Raise if an adapter has no versions, or if the key may not use the adapter."""
    adapter = service.versions.get(name)
    if adapter is None or not service.model_names.may_use(key, name, adapter.versions[adapter.primary].key):
        raise AdapterNotFoundError(f"adapter {name[:64]!r} has no uploaded versions")


def _describe(service: Service, name: str) -> dict[str, Any]:
    adapter = service.versions.get(name)
    if adapter is None:  # removed by another request
        raise make_unknown_model_error(name)
    data = [
        {
            "id": f"{name}@v{number}",
            "version": number,
            "weight": adapter.weights.get(number, 0.0),
            "hash": service.adapter_index.latest_identity(version.key) or None,
            "requests": adapter.num_requests.get(number, 0),
        }
        for number, version in adapter.versions.items()
    ]
    return {"id": name, "object": "list", "data": data}


def _read_weights(body: VersionWeights) -> dict[int, float]:
    if (body.version is None) == (body.weights is None):
        raise InputError("set either `version` or `weights`")
    if body.version is not None:
        return {body.version: 1.0}
    weights = dict[int, float]()
    for label, weight in (body.weights or {}).items():
        number = label.removeprefix("v")
        if not NUMBER_PATTERN.fullmatch(number):
            raise InputError(f"`weights` must be keyed by versions such as v2 (got {label[:64]!r})")
        weights[int(number)] = weight
    if not sum(weights.values()) > 0:
        raise InputError("`weights` must have a sum above 0")
    return weights


class _Upload:
    """An upload of adapter weights. A failed upload leaves no files and changes no version."""

    def __init__(self, service: Service, key: Key, name: str) -> None:
        self.is_received = False  # the whole body was read
        self._is_update = False  # the name referred to an uploaded version when the upload started
        self._service = service
        self._key = key
        self._name = name
        self._present: AdapterKey | None = None  # the adapter whose config and tokenizer the upload copies
        self._identity = ""  # of the uploaded weights, after they are resolved
        self._label = f"adapter {name[:64]!r}"

    async def run(self, request: Request, config: str | None, move: bool, activate: bool) -> None:
        service, versions = self._service, self._service.versions
        self._check(request)
        raw_config = None if config is None else _parse_config(config)
        if versions.num_uploads >= MAX_UPLOADS:
            raise OverloadedError(f"{MAX_UPLOADS} uploads are in progress already; try again later", 1.0)
        versions.num_uploads += 1
        folder = None
        try:
            previous, present = await self._find_present(raw_config is not None)
            folder = await asyncio.to_thread(self._make_folder, present, raw_config)
            await self._receive(request, folder)
            started, key = time.monotonic(), make_upload_key(folder)
            await self._load(key)
            async with versions.lock:
                versions.check_name(self._name)  # again, because other names were added in the meantime
                adapter = versions.add(self._name, key, None if self._is_update else previous, activate)
                await versions.apply(self._name, adapter, partial(self._move_requests, key) if move else None)
                folder = None  # belongs to the version now
                service.adapter_index.add(self._identity, key)
            service.metrics.adapter_update_duration.observe(time.monotonic() - started)
            if previous is not None and present is not None and present.identity != self._identity:
                await transfer_pin(service, present.identity, previous, self._identity, key)
        except OSError as error:
            raise SourceError(f"{self._label}: the upload cannot be stored: {error.strerror}") from error
        finally:
            versions.num_uploads -= 1
            if self._present is not None:
                versions.in_use.remove(self._present)
            if folder is not None:
                await asyncio.to_thread(versions.delete_folder, folder.name)
                await self._unload()
            await service.try_delete_retired()  # also after an error, because `in_use` may have delayed it

    def _check(self, request: Request) -> None:
        """Reject an invalid upload before its body is received."""
        service = self._service
        if service.config.replica_secret is not None:
            raise NotSupportedError(
                "replicas do not support uploads; write the adapter to a folder that all replicas can read, and load it"
            )
        if service.versions.folder is None:
            raise ForbiddenError("uploads are disabled; start the server with --adapter-uploads-dir")
        service.versions.check_name(self._name)
        if request.headers.get("content-encoding", "identity").strip().lower() not in ("identity", ""):
            raise HTTPException(415, "Expected request without `Content-Encoding`")
        length = request.headers.get("content-length", "")
        if length.isdigit():
            self._check_size(int(length[:20]))

    def _check_size(self, size: int) -> None:
        limit = self._service.config.engine.sources.max_bytes
        if size > limit:
            raise HTTPException(413, f"the weights must have at most {limit} bytes (--max-adapter-file-bytes)")

    async def _find_present(self, has_config: bool) -> tuple[AdapterKey | None, ResolvedAdapter | None]:
        """Return the adapter that the name refers to, or None. If the request contains no config, the adapter must
        exist.
        """
        service, names = self._service, self._service.model_names
        selection = names.select_adapter(self._name, None)
        if has_config and self._name not in names.adapters:
            return None, None
        (key,) = selection.adapter_keys
        self._is_update = service.versions.is_uploaded(key)
        self._present = key
        service.versions.in_use.append(key)  # other uploads must not delete its files before they are copied
        try:
            present = await service.engine.resolve(selection.refs)
        except AdapterNotFoundError:
            if has_config:
                return None, None
            raise AdapterNotFoundError(f"{self._label} does not exist; set `config` to create it") from None
        service.adapter_index.add(present.identity, key)
        return key, present

    def _make_folder(self, present: ResolvedAdapter | None, raw_config: Mapping[str, Any] | None) -> Path:
        """Return a new folder with a config, and with the tokenizer files of the current adapter."""
        versions = self._service.versions
        folder = versions.make_folder()
        try:
            source = Path(present.folder) if present is not None and present.folder is not None else None
            if raw_config is None:
                assert source is not None
                raw_config = read_json(source / CONFIG_FILE, self._label)
            (folder / CONFIG_FILE).write_text(json.dumps(raw_config))
            if source is not None and present is not None:
                for file, stamp in zip(present.tokenizer_files, present.tokenizer_stamps, strict=True):
                    (folder / file).parent.mkdir(exist_ok=True)
                    opening = open_regular_file(source / file, stamp)
                    with convert_read_errors(self._label, source / file), opening as content:
                        (folder / file).write_bytes(content.read())
        except BaseException:
            versions.delete_folder(folder.name)
            raise
        return folder

    async def _receive(self, request: Request, folder: Path) -> None:
        """Write the body to the weights file, and verify its checksum."""
        expected, digest, size = _read_digest(request), sha256(), 0
        timeout_s, buffer, stream = self._service.config.body_timeout_s, bytearray(), aiter(request.stream())
        with FileIO(folder / WEIGHTS_FILE, "wb") as file:  # unbuffered, so that closing it does not block
            while not self.is_received:
                try:
                    async with asyncio.timeout(timeout_s):
                        buffer += await anext(stream)
                except StopAsyncIteration:
                    self.is_received = True
                except TimeoutError:
                    raise HTTPException(408, f"no data arrived within {timeout_s:g} s") from None
                self._check_size(size + len(buffer))
                if len(buffer) >= WRITE_BYTES or self.is_received:
                    size += len(buffer)
                    await asyncio.to_thread(_write, file, digest, buffer)
                    buffer = bytearray()
        if expected is not None and digest.digest() != expected:
            raise InputError(f"{self._label}: the weights do not match the sha-256 checksum in `Content-Digest`")

    async def _load(self, key: AdapterKey) -> None:
        """Load the uploaded weights to the device. Raise if they cannot be served."""
        service = self._service
        limit_s = service.config.engine.adapter_timeout_s
        try:
            async with asyncio.timeout(limit_s if math.isfinite(limit_s) else None):
                self._identity = (await service.engine.resolve([AdapterRef(*key)])).identity
                await service.engine.load(self._identity)
        except TimeoutError:
            raise BusyError(f"{self._label}: the weights were not loaded within {limit_s:g} s; try again") from None
        except AdapterError as error:
            raise type(error)(str(error).replace(key.name, self._name), error.retry_after_s) from None

    async def _unload(self) -> None:
        """Unload the uploaded weights, unless they are another adapter too."""
        if self._identity and not list(self._service.adapter_index.names_of(self._identity)):
            await self._service.engine.unload(self._identity)

    async def _move_requests(self, key: AdapterKey) -> None:
        """Continue unfinished requests with the uploaded weights."""
        contexts = self._find_running()
        for context in contexts:
            context.adapter_keys.add(key)
        request_ids = [each.request.request_id for context in contexts for each in context.generations]
        await self._service.engine.move(request_ids, self._identity)

    def _find_running(self) -> list[RequestContext]:
        """Return the unfinished requests that generate text and use only this name."""
        if self._service.task != GENERATE:  # an input that moves would not match the other inputs of its request
            return []
        contexts = [each for each in self._service.running if isinstance(each, RequestContext)]
        return [each for each in contexts if each.record.adapter_id == each.lookup.name == self._name]


def _parse_config(text: str) -> dict[str, Any]:
    try:
        return parse_json(text.encode())
    except ValueError as error:
        raise InputError(f"`config` must be a JSON object: {error}") from None


def _read_digest(request: Request) -> bytes | None:
    """Return the SHA-256 checksum in the `Content-Digest` header (RFC 9530), or None without the header."""
    header = request.headers.get("content-digest")
    if header is None:
        return None
    found = DIGEST_PATTERN.search(header)
    digest = b""
    if found is not None:
        with suppress(ValueError):
            digest = base64.b64decode(found[1], validate=True)
    if len(digest) != sha256().digest_size:
        raise InputError("`Content-Digest` must contain sha-256=:<base64>:")
    return digest


def _write(file: FileIO, digest: Any, content: bytearray) -> None:
    """Write content to a file and update its checksum."""
    digest.update(content)
    view = memoryview(content)
    while view:
        view = view[file.write(view) or 0 :]
