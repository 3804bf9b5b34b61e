"""All server routes in the test process, without a socket. The scripted engine completes each request immediately."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fastapi import FastAPI

from lorax_server.engine.remote import messages
from lorax_server.errors import InputError, LoraxError
from lorax_server.server.access.keys import KeyRing
from lorax_server.server.access.model_names import ModelNames
from lorax_server.server.access.rate_limits import AdapterQuota, RateLimits
from lorax_server.server.app import make_app
from lorax_server.server.service import Service
from lorax_server.types import AdapterState, Failure, FinishReason, ResolvedAdapter
from tests.server.service_harness import ServiceHarness, ids, settle


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes
    header_names: list[str]  # including duplicates

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def message(self) -> str:
        """Return the error message of a LoRAX or OpenAI route."""
        error = self.json["error"]
        return str(error if isinstance(error, str) else error["message"])

    @property
    def events(self) -> list[Any]:
        lines = [line[6:] for line in self.body.decode().split("\n\n") if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]


@cache
def _shared() -> tuple[FastAPI, Service]:
    """Create the application once, because it is slow. It looks up the service's attributes for each request."""
    service = ServiceHarness().service
    return make_app(service), service


class Routes(ServiceHarness):
    """Server routes. Names belong to the default source `local`. `resolutions` overrides how adapters resolve."""

    def __init__(
        self,
        folder: list[str] | None = None,
        keys_file: Path | None = None,
        admin_key: str | None = None,
        default_source: str = "local",
        new_adapters_per_minute: int | None = None,
        **config: Any,
    ) -> None:
        super().__init__(**{"host": "0.0.0.0", **config})  # on a loopback address, no admin key is needed
        service = self.service
        service.keys = KeyRing(service.config.api_keys, admin_key, keys_file)
        service.model_names = ModelNames("base", default_source=default_source)
        service.model_names.set_folder_names(folder or [])
        service.rate_limits = RateLimits(1000)
        service.adapter_quota = AdapterQuota(new_adapters_per_minute)
        self.resolutions: dict[str, ResolvedAdapter | LoraxError] = {}
        self.engine._send = self._handle_message  # type: ignore[method-assign]
        self.app, self._served = _shared()

    def _handle_message(self, message: messages.ToEngine) -> None:
        try:
            messages.encode(message)
        except messages.ChannelError as error:
            raise InputError(str(error)) from error
        soon = asyncio.get_running_loop().call_soon
        self.engine.sent.append(message)
        match message:
            case messages.Add(request):
                self.emitting = asyncio.create_task(self._emit_in_two_steps(request.request_id, *ids("quick")))
            case messages.Resolve(query_id, refs, None):
                found = self.resolutions.get(refs[0].name, ResolvedAdapter(f"hash of {refs[0].name}"))
                reply = (
                    messages.QueryFailed(query_id, Failure.from_error(found)) if isinstance(found, LoraxError) else None
                )
                soon(self.engine._settle, reply or messages.ResolveReply(query_id, found))  # type: ignore[arg-type]
            case messages.Resolve(query_id, _, _):
                soon(self.engine._settle, messages.ResolveReply(query_id, ResolvedAdapter("merged", tier="host")))
            case messages.ListAdapters(query_id, identities):
                states = [AdapterState(each, each, "on the device", 7, False, 0, 1) for each in identities]
                soon(self.engine._settle, messages.AdaptersReply(query_id, states))
            case messages.LoadAdapter(query_id) | messages.UnloadAdapter(query_id) | messages.ForgetAdapter(query_id):
                soon(self.engine._settle, messages.DoneReply(query_id))

    async def _emit_in_two_steps(self, request_id: int, first: int, *others: int) -> None:
        """Emit a request's tokens in two outputs."""
        self.engine.emit_tokens(request_id, first)
        await settle()
        self.engine.emit_tokens(request_id, *others, end=FinishReason.LENGTH)

    def send(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Reply:
        """Send a request in a new event loop."""
        return asyncio.run(self._send(method, path, body, headers or {}))

    def post(self, path: str, body: Any, key: str | None = None) -> Reply:
        return self.send("POST", path, body, {"authorization": f"Bearer {key}"} if key else None)

    def get(self, path: str, key: str | None = None) -> Reply:
        return self.send("GET", path, None, {"authorization": f"Bearer {key}"} if key else None)

    async def _send(
        self,
        method: str,
        path: str,
        body: Any,
        headers: Mapping[str, str],
        chunks: Sequence[bytes | None] | None = None,
        is_open: bool = False,
    ) -> Reply:
        """Send a request with a JSON body, or with a body in chunks. A chunk of None disconnects.

        With `is_open`, the client stops sending before the end of the body.
        """
        content = b"" if body is None else json.dumps(body).encode()
        sent_headers = {"host": "127.0.0.1", "content-length": str(len(content)), **headers}
        sent_headers |= {} if body is None else {"content-type": "application/json"}
        path_only, _, query = path.partition("?")
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
            "path": path_only, "raw_path": path_only.encode(), "query_string": query.encode(), "root_path": "",
            "state": {},
            "headers": [(name.lower().encode(), value.encode()) for name, value in sent_headers.items()],
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
        }  # fmt: skip
        arrivals: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for chunk in (content,) if chunks is None else chunks:
            message = {"type": "http.request", "body": chunk, "more_body": chunks is not None}
            arrivals.put_nowait({"type": "http.disconnect"} if chunk is None else message)
        if chunks is not None and not is_open:
            arrivals.put_nowait({"type": "http.request", "body": b"", "more_body": False})
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        vars(self._served).update(vars(self.service))
        await self.app(scope, arrivals.get, send)
        start, *rest = sent
        named = {name.decode(): value.decode() for name, value in start["headers"]}
        names = [name.decode().lower() for name, _ in start["headers"]]
        return Reply(start["status"], named, b"".join(message.get("body", b"") for message in rest), names)


def generate(**parameters: Any) -> dict[str, Any]:
    return {"inputs": "ask", "parameters": {"max_new_tokens": 5, **parameters}}


def complete(model: str = "", **more: Any) -> dict[str, Any]:
    return {"model": model, "prompt": "ask", "max_tokens": 5, **more}


def chat(model: str = "", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "ask"}], "max_tokens": 5, **more}
