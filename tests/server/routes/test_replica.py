"""Replica access control and the actor routes. `tests/scale/test_two_servers.py` uses real servers."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from lorax_server.engine.remote import messages
from lorax_server.server.access.keys import KeyRing
from lorax_server.server.app import make_app
from lorax_server.server.http.replica_protocol import (
    CHANGE_HEADER,
    CLIENT_HEADER,
    SECRET_HEADER,
    AdapterChange,
    ReplicaAccess,
)
from lorax_server.types import EngineStatus
from tests.server.fake_server import Reply, Routes

SECRET, ADMIN, CLIENT_KEY = "the-deployments-secret", "the-admins", "the-clients"
LOAD, UNLOAD = "/v1/adapters/load", "/v1/adapters/unload"
CHANGE = AdapterChange(True, "local", "poet", "mine", pin=True)


class ReplicaRoutes(Routes):
    """A client for the routes of a replica server."""

    def __init__(self, keys_file: Path) -> None:
        super().__init__(["poet"], replica_secret=SECRET)
        self.service.keys = KeyRing((), ADMIN, keys_file)
        self.app, self._served = make_app(self.service), self.service

    def _handle_message(self, message: messages.ToEngine) -> None:
        super()._handle_message(message)
        if isinstance(message, messages.GetStatus):
            numbers = dict.fromkeys(EngineStatus.__dataclass_fields__, 2)
            reply = messages.StatusReply(message.query_id, EngineStatus(**numbers))
            asyncio.get_running_loop().call_soon(self.engine._settle, reply)

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        """Send a request with the deployment secret."""
        return self.send(method, path, body, {SECRET_HEADER: SECRET, **headers})

    def apply(self, change: AdapterChange) -> Reply:
        return self.request("POST", "/replica/changes", {"change": change._asdict(), "is_own": False})


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> ReplicaRoutes:
    """A replica server with API keys."""
    keys_file = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys_file.write_text(f'[keys.client]\nkey = "{CLIENT_KEY}"\n')
    return ReplicaRoutes(keys_file)


def test_state_lists_adapters_for_router(shared: ReplicaRoutes) -> None:
    request = {"inputs": "x", "parameters": {"adapter_id": "poet"}}
    assert shared.request("POST", "/generate", request, authorization=f"Bearer {CLIENT_KEY}").status == 200
    state = shared.request("GET", "/replica/state")
    assert state.status == 200
    assert state.json["names"] == {"device": ["poet"]}
    assert (state.json["running"], state.json["waiting"]) == (2, 4)


def test_remote_changes_are_applied(shared: ReplicaRoutes) -> None:
    assert shared.apply(CHANGE).status == 200
    assert "mine" in shared.service.model_names.aliases
    assert shared.apply(CHANGE._replace(is_load=False, pin=None)).status == 200
    assert "mine" not in shared.service.model_names.aliases


def test_rejected_change_returns_200(shared: ReplicaRoutes) -> None:
    assert shared.apply(CHANGE._replace(alias="not\nprintable")).status == 200
    assert shared.apply(AdapterChange(False, "local", "unknown", "unknown")).status == 200


def test_load_and_unload_responses_have_change_header(shared: ReplicaRoutes) -> None:
    body = {"adapter_id": "poet", "adapter_source": "local", "name": "mine", "pin": True}
    assert read_change(shared.request("POST", LOAD, body, authorization=f"Bearer {ADMIN}")) == CHANGE
    unloaded = shared.request("POST", UNLOAD, {"adapter_id": "mine"}, authorization=f"Bearer {ADMIN}")
    assert read_change(unloaded) == CHANGE._replace(is_load=False, pin=None)
    for reply in (shared.request("POST", LOAD, body), shared.request("GET", "/health")):
        assert CHANGE_HEADER not in reply.headers


def read_change(reply: Reply) -> AdapterChange:
    assert reply.status == 200, reply.body
    return AdapterChange(**json.loads(reply.headers[CHANGE_HEADER]))


def test_request_without_secret_is_rejected(shared: ReplicaRoutes) -> None:
    for headers in ({}, {SECRET_HEADER: "guessed"}, {SECRET_HEADER: ""}, {CLIENT_HEADER: "1.2.3.4"}):
        for path in ("/health", "/replica/state", "/nothing"):
            rejected = shared.send("GET", path, headers=headers)
            assert rejected.status == 403
            assert "this server is a replica" in rejected.message


def test_clients_cannot_use_control_routes(shared: ReplicaRoutes) -> None:
    for address in ("1.2.3.4", ""):
        assert shared.request("GET", "/replica/state", **{CLIENT_HEADER: address}).status == 404
        assert shared.request("POST", "/replica/changes", {}, **{CLIENT_HEADER: address}).status == 404
        assert shared.request("GET", "/health", **{CLIENT_HEADER: address}).status == 200


@pytest.mark.parametrize("address", ["1.2.3.4", "fe80::1", ""])
def test_application_gets_client_address_without_secret(address: str) -> None:
    seen = dict[str, Any]()

    async def application(scope: Any, _receive: Any, _send: Any) -> None:
        seen.update(scope)

    headers = {SECRET_HEADER: SECRET, CLIENT_HEADER: address, "x-other": "kept"}
    scope: dict[str, Any] = {"type": "http", "path": "/generate", "client": ("10.0.0.1", 5)}
    scope |= {"headers": [(name.encode(), value.encode()) for name, value in headers.items()]}
    asyncio.run(ReplicaAccess(application, SECRET, application)(scope, None, None))  # type: ignore[arg-type]
    assert seen["headers"] == [(b"x-other", b"kept")]
    assert seen["client"][0] == (address or "10.0.0.1")
