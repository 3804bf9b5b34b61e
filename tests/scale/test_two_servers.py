"""Two real replica servers: adapter changes in a registry's order, and requests through an ingress."""

import asyncio
import http.client
import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from lorax_server.scale import ingress as module
from lorax_server.scale.placement import ReplicaChooser, hash_name
from lorax_server.scale.server_process import ServerProcess
from lorax_server.server.http.replica_protocol import CHANGE_HEADER, CLIENT_HEADER, SECRET_HEADER, AdapterChange
from tests.adapters.sources.server import Request
from tests.e2e.streaming_client import wait_for
from tests.scale.cluster import ADMIN, SECRET, generate, send
from tests.scale.servers import HUB_TOKEN, LIMIT, LIMITED, Pair, apply_changes, listed, starting_pair
from tests.scale.test_ingress import FakeHandle

pytestmark = pytest.mark.slow  # test_ingress.py and test_server_process.py have fast tests
LOAD, UNLOAD = "/v1/adapters/load", "/v1/adapters/unload"
CLIENT = "1.2.3.4"
PROMPT = "Klonny Bardwell bought 12 pink kites on Tuesday for 45 coins."


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with starting_pair(tmp_path_factory.mktemp("pair")) as pair:
        yield pair


@pytest.fixture(autouse=True)
def clean(pair: Pair) -> Iterator[None]:
    yield
    pair.hub.reset()


def hub_load(repo: str, **more: Any) -> dict[str, Any]:
    return {"adapter_id": f"owner/{repo}", "adapter_source": "hub", **more}


def load_change(repo: str, alias: str = "", pin: bool | None = None) -> AdapterChange:
    return AdapterChange(True, "hub", f"owner/{repo}", alias, pin)


def unload_change(repo: str, alias: str = "") -> AdapterChange:
    return AdapterChange(False, "hub", f"owner/{repo}", alias)


async def change(port: int, path: str, body: dict[str, Any]) -> AdapterChange:
    """Send a load or unload to one server, and return the change that the server describes."""
    status, headers, response = await asyncio.to_thread(send, port, "POST", path, body)
    assert status == 200, response
    return AdapterChange(**json.loads(headers[CHANGE_HEADER]))


# --- Loads that are undone --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_own", [False, True], ids=["unloaded elsewhere", "unloaded here"])
@pytest.mark.parametrize("called", ["mine", "owner/json"])
def test_unload_during_download_cancels_pin(pair: Pair, called: str, is_own: bool) -> None:
    server, port = pair.servers[1], pair.ports[1]
    gate = threading.Event()
    pair.hub.before = lambda request: _wait_at(gate, "json", request)
    body = {"adapter_id": called, **({} if called == "mine" else {"adapter_source": "hub"})}

    async def run() -> None:
        await server.apply(load_change("json", "mine", pin=True), is_own=False)
        await asyncio.to_thread(wait_for, lambda: pair.hub.seen, "the hub gets a request")
        unload = unload_change("json", "mine" if called == "mine" else "")
        if is_own:  # 404 for the adapter ID, which is not loaded yet
            await asyncio.to_thread(send, port, "POST", UNLOAD, body)
        await server.apply(unload, is_own)

    try:
        asyncio.run(run())
    finally:
        gate.set()
    request = {"inputs": PROMPT, "parameters": {"adapter_id": "owner/json", "adapter_source": "hub"}}
    assert send(port, "POST", "/generate", request)[0] == 200  # after the rest of the load
    adapters = listed(port)
    assert [each["pinned"] for each in adapters.values() if each["source"] == "hub"] == [False]
    assert ("mine" in adapters) == (called != "mine")
    send(port, "POST", UNLOAD, {"adapter_id": "mine"})


def _wait_at(gate: threading.Event, repo: str, request: Request) -> None:
    if repo in request.path:
        gate.wait(60)


def test_earlier_processed_unload_removes_later_pin(pair: Pair) -> None:
    server, port = pair.servers[1], pair.ports[1]
    gate = threading.Event()
    pair.hub.before = lambda request: _wait_at(gate, "sql", request)

    def is_pinned() -> bool:
        return any(each["pinned"] for each in listed(port).values() if each["source"] == "hub")

    async def run() -> None:
        await server.apply(load_change("sql", "mine", pin=True), is_own=False)
        unload = await change(port, UNLOAD, {"adapter_id": "mine"})
        gate.set()
        await asyncio.to_thread(wait_for, is_pinned, "the adapter is pinned")
        await server.apply(unload, is_own=True)

    try:
        asyncio.run(run())
    finally:
        gate.set()
    assert not is_pinned()


def test_later_load_determines_pin(pair: Pair) -> None:
    def are_pinned() -> bool:
        result = [listed(port).get("owner/redact") for port in pair.ports]
        return all(each is not None and each["pinned"] for each in result)

    async def run() -> None:
        async with apply_changes(pair) as registry:
            for pin in (True, False, True):
                assert await registry.record(load_change("redact", pin=pin)) == []
            await asyncio.to_thread(wait_for, are_pinned, "both servers have pinned it")
            assert await registry.record(unload_change("redact")) == []

    asyncio.run(run())
    assert not any(each["pinned"] for port in pair.ports for each in listed(port).values())


# --- Changes that overlap ---------------------------------------------------------------------------------------------


def test_concurrent_alias_changes_converge(pair: Pair) -> None:
    """Each server processes one change first, and the registry records them in either order."""

    async def run() -> None:
        async with apply_changes(pair) as registry:
            for order in ((0, 1), (1, 0)):
                bodies = [hub_load(name, name="shared") for name in ("sql", "redact")]
                loads = [await change(port, LOAD, body) for port, body in zip(pair.ports, bodies, strict=True)]
                for index in order:
                    assert await registry.record(loads[index]) == []
                meant = [await asyncio.to_thread(complete, port, "shared") for port in pair.ports]
                assert meant == [complete(pair.ports[0], loads[order[-1]].name)] * 2
            load = await change(pair.ports[0], LOAD, hub_load("sql", name="shared"))
            unload = await change(pair.ports[1], UNLOAD, {"adapter_id": "shared"})
            assert await registry.record(unload) == []
            assert await registry.record(load) == []
            assert [send(port, "GET", "/v1/models/shared")[0] for port in pair.ports] == [200, 200]

    asyncio.run(run())


def complete(port: int, name: str) -> str:
    """Return the completion for an adapter name."""
    source = {"adapter_source": "hub"} if "/" in name else {}
    body = {"inputs": PROMPT, "parameters": {"adapter_id": name, "max_new_tokens": 12, **source}}
    status, _, answer = send(port, "POST", "/generate", body)
    assert status == 200, answer
    return str(answer["generated_text"])


def test_many_concurrent_changes_converge(pair: Pair) -> None:
    async def run() -> None:
        async with apply_changes(pair) as registry:

            async def keep_changing(port: int, names: list[str]) -> None:
                for name in names:
                    assert await registry.record(await change(port, LOAD, hub_load(name, name="busy"))) == []

            first, second = ["sql", "redact"] * 3, ["redact", "json"] * 3
            await asyncio.gather(*map(keep_changing, pair.ports, (first, second)))
            last = (await registry.join("late", 0, ""))[-1].change.name
            meant = [complete(port, "busy") for port in pair.ports]
            assert meant == [complete(pair.ports[0], last)] * 2

    asyncio.run(run())


# --- Tokens -----------------------------------------------------------------------------------------------------------


def test_processing_server_does_not_resolve_adapter_again(pair: Pair) -> None:
    """The token was part of that request only, so only changes processed by this server can pin the adapter."""
    port, of_first = pair.ports[1], f"Bearer {HUB_TOKEN}"
    changes: list[tuple[bool, str, list[bool], set[str | None]]] = [
        # the pin, the server that has processed the load, the pins then, and the tokens that the hub was sent
        (False, "second", [False, False], {of_first}),
        (True, "first", [True, False], {None}),
        (True, "second", [True, True], {of_first}),
    ]

    async def run() -> None:
        async with apply_changes(pair) as registry:
            await change(port, LOAD, hub_load("private", name="mine", pin=True, api_token=HUB_TOKEN))
            for pin, served_by, pinned, sent in changes:
                pair.hub.seen.clear()
                assert await registry.record(load_change("private", "mine", pin), served_by) == []

                def is_done(pinned: list[bool] = pinned, sent: set[str | None] = sent) -> bool:
                    tokens = {request.headers.get("authorization") for request in pair.hub.seen}
                    first, second = (listed(each)["mine"] for each in pair.ports)
                    is_loaded = first["state"] == second["state"] == "on the device"
                    return is_loaded and tokens == sent and [first["pinned"], second["pinned"]] == pinned

                await asyncio.to_thread(wait_for, is_done, f"the pins are {pinned}")

    asyncio.run(run())
    send(port, "POST", UNLOAD, {"adapter_id": "mine"})


# --- Changes that fail ------------------------------------------------------------------------------------------------


def test_failing_change_does_not_delay_other_changes(pair: Pair) -> None:
    """Only the first server has `pirate` in its folder."""
    body = {"adapter_id": "pirate", "adapter_source": "local", "name": "captain"}

    async def run() -> None:
        async with apply_changes(pair) as registry:
            load = await change(pair.ports[0], LOAD, body)
            assert await registry.record(load._replace(pin=True)) == []
            assert await registry.record(AdapterChange(True, "local", "sql", alias="lorax-demo")) == []

    asyncio.run(run())
    assert generate(pair.ports[0], "captain", PROMPT)[0]
    status, _, answer = send(
        pair.ports[1], "POST", "/generate", {"inputs": "x", "parameters": {"adapter_id": "captain"}}
    )
    assert (status, answer["error_type"]) == (424, "generation")
    assert generate(pair.ports[1], "", PROMPT)[0]


# --- Behind the ingress -----------------------------------------------------------------------------------------------


@pytest.fixture
def ingress_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "get_or_create_secret", lambda app: SECRET)  # noqa: ARG005 # it is in Ray's store
    monkeypatch.setattr(module, "get_or_create_registry", lambda app: None)  # noqa: ARG005


async def send_through_ingress(pair: Pair, body: dict[str, Any], key: str = ADMIN) -> int:
    """Send a request through an ingress, to the second server if both are equal, and return the status."""
    order = ReplicaChooser()
    order.set_replicas(("a", "b"))
    first, second = order.rank(hash_name(body["parameters"]["adapter_id"]))
    chosen = FakeHandle({first: pair.ports[1], second: pair.ports[0]})
    ingress = module.Ingress(chosen, "app", ["lorax-demo"], 10**6, body_timeout_s=30.0)
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    async def take(message: Any) -> None:
        sent.append(message)

    headers = {"authorization": f"Bearer {key}", "content-type": "application/json", "host": "localhost"}
    headers |= {CLIENT_HEADER: "6.6.6.6", SECRET_HEADER: "guessed"}
    scope = {"type": "http", "method": "POST", "path": "/generate", "query_string": b"", "client": (CLIENT, 5)}
    scope["headers"] = [(name.encode(), value.encode()) for name, value in headers.items()]
    await ingress.serve(scope, receive, take)
    await ingress._session.close()
    return int(sent[0]["status"])


def make_body(adapter: str, **more: Any) -> dict[str, Any]:
    return {"inputs": PROMPT, "parameters": {"adapter_id": adapter, "max_new_tokens": 1, **more}}


@pytest.mark.usefixtures("ingress_secret")
@pytest.mark.parametrize(
    ("body", "refusal"),
    [(make_body("pirate"), 424), (make_body("owner/private", adapter_source="hub"), 424)],
    ids=["in one folder", "by one token"],
)
def test_only_replica_with_access_serves_adapter(pair: Pair, body: Any, refusal: int) -> None:
    assert [send(port, "POST", "/generate", body)[0] for port in pair.ports] == [200, refusal]
    assert asyncio.run(send_through_ingress(pair, body)) == 200
    assert asyncio.run(send_through_ingress(pair, make_body("nobody-has-it"))) == 424


def test_key_limits_apply_per_replica(pair: Pair) -> None:
    """With N replicas, the total limit is N times the configured limit."""
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 1}}
    for port in pair.ports:
        statuses = [send(port, "POST", "/generate", body, LIMITED)[0] for _ in range(LIMIT + 2)]
        assert statuses == [200] * LIMIT + [429] * 2


@pytest.mark.usefixtures("ingress_secret")
def test_client_address_requires_secret(pair: Pair) -> None:
    """The audit log contains the client address for rejected keys."""
    server = pair.servers[1]
    for headers in ({}, {SECRET_HEADER: "guessed"}, {CLIENT_HEADER: "9.9.9.9"}):
        assert list_adapters(server, headers) == 403
    assert list_adapters(server, {SECRET_HEADER: SECRET, CLIENT_HEADER: "9.9.9.9"}) == 401
    assert last_address(server) == "9.9.9.9"
    assert asyncio.run(send_through_ingress(pair, make_body("sql"), key="wrong")) == 401
    assert last_address(server) == CLIENT


def list_adapters(server: ServerProcess, headers: dict[str, str]) -> int:
    """Send a request with an unknown key, and return the status."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", "/v1/adapters", headers={"authorization": "Bearer wrong", **headers})
    status = connection.getresponse().status
    connection.close()
    return status


def last_address(server: ServerProcess) -> str:
    def find() -> list[str]:
        return [line for line in server._log_lines if re.search(r'action="?authenticate', line)]

    wait_for(find, "it is logged")
    (result,) = find()
    server._log_lines.clear()
    address = re.search(r"address=(\S+)", result)
    assert address is not None
    return address[1]
