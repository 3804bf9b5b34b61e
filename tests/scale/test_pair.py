"""Two real servers of replicas: changes by API in the order of a registry, and requests through an ingress."""

import asyncio
import http.client
import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lorax_server.scale.follower import ChangeFollower
from lorax_server.scale.ingress import gate
from lorax_server.scale.placement import ReplicaChooser, hash_name
from lorax_server.scale.registry import Entry
from lorax_server.scale.server_process import ServerProcess
from lorax_server.server.access.client_address import CLIENT_HEADER, sign_client
from tests.adapters.sources.server import Request
from tests.e2e.wire import wait_for
from tests.scale.cluster import ADMIN, generate, send
from tests.scale.servers import (
    HUB_TOKEN,
    INGRESS_KEY,
    LIMIT,
    LIMITED,
    Pair,
    closing_clients,
    following,
    listed,
    starting_pair,
)
from tests.scale.test_gate import Chosen

pytestmark = pytest.mark.slow  # test_follower.py, test_gate.py and test_server_process.py have the parts
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


async def change(port: int, path: str, body: dict[str, Any]) -> None:
    status, _, answer = await asyncio.to_thread(send, port, "POST", path, body)
    assert status == 200, answer


# --- Loads that are taken back ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_answering", [False, True], ids=["unloaded elsewhere", "unloaded here"])
@pytest.mark.parametrize("called", ["mine", "owner/json"])
def test_a_load_that_is_unloaded_while_it_is_fetched_is_not_pinned(pair: Pair, called: str, is_answering: bool) -> None:
    """The server that has answered the unload has no name any more when it follows."""
    server, port = pair.servers[1], pair.ports[1]
    gate = threading.Event()
    pair.hub.before = lambda request: _wait_at(gate, request)
    unload = {"adapter_id": called, **({} if called == "mine" else {"adapter_source": "hub"})}

    async def run() -> None:
        async with closing_clients(pair):
            follower = ChangeFollower(server, "second")
            await follower.make(Entry(1, LOAD, hub_load("json", name="mine", pin=True)))
            await asyncio.to_thread(wait_for, lambda: pair.hub.seen, "the hub is asked")
            ((loading, *_),) = follower._loads.values()
            if is_answering:
                await asyncio.to_thread(send, port, "POST", UNLOAD, unload)
            await follower.make(Entry(2, UNLOAD, unload))
            gate.set()
            await asyncio.wait((loading,))
            assert loading.cancelled()
            assert follower.confirmed == 2

    try:
        asyncio.run(run())
    finally:
        gate.set()
    body = {"inputs": PROMPT, "parameters": {"adapter_id": "owner/json", "adapter_source": "hub"}}
    assert send(port, "POST", "/generate", body)[0] == 200  # behind what is left of the load
    adapters = listed(port)
    assert [each["pinned"] for each in adapters.values() if each["source"] == "hub"] == [False]
    assert ("mine" in adapters) == (called != "mine")
    send(port, "POST", UNLOAD, {"adapter_id": "mine"})


def _wait_at(gate: threading.Event, request: Request) -> None:
    if "json" in request.path:
        gate.wait(60)


def test_a_pin_that_came_before_its_unload_is_taken_back(pair: Pair) -> None:
    """Also where the name has gone before: by an unload that this server has answered in between."""
    server, port = pair.servers[1], pair.ports[1]

    async def run() -> None:
        async with closing_clients(pair):
            follower = ChangeFollower(server, "second")
            await follower.make(Entry(1, LOAD, hub_load("sql", name="mine", pin=True)))
            ((loading, *_),) = follower._loads.values()
            await change(port, UNLOAD, {"adapter_id": "mine"})
            await loading
            assert not follower._loads
            assert [each["pinned"] for each in listed(port).values() if each["state"] == "on the device"] == [True]
            await follower.make(Entry(2, UNLOAD, {"adapter_id": "mine"}))

    asyncio.run(run())
    assert not any(each["pinned"] for each in listed(port).values())


def test_a_load_that_replaces_another_decides_about_the_pin(pair: Pair) -> None:
    async def run() -> None:
        async with following(pair) as (registry, followers):
            for pin in (True, False, True):
                assert await registry.record(LOAD, hub_load("redact", pin=pin)) == []
            for follower in followers:
                await asyncio.gather(*(pending.task for pending in follower._loads.values()))
            assert [listed(port)["owner/redact"]["pinned"] for port in pair.ports] == [True, True]
            assert await registry.record(UNLOAD, hub_load("redact")) == []

    asyncio.run(run())
    assert not any(each["pinned"] for port in pair.ports for each in listed(port).values())


# --- Changes that overlap ---------------------------------------------------------------------------------------------


def test_two_changes_of_one_name_at_once_end_alike_everywhere(pair: Pair) -> None:
    """Each replica makes its own at first, and the registry gets them in either order."""

    async def run() -> None:
        async with following(pair) as (registry, _):
            for order in ((0, 1), (1, 0)):
                loads = [hub_load(name, name="shared") for name in ("sql", "redact")]
                for port, load in zip(pair.ports, loads, strict=True):
                    await change(port, LOAD, load)
                for index in order:
                    assert await registry.record(LOAD, loads[index]) == []
                meant = [await asyncio.to_thread(meaning, port, "shared") for port in pair.ports]
                assert meant == [meaning(pair.ports[0], loads[order[-1]]["adapter_id"])] * 2
            load, unload = hub_load("sql", name="shared"), {"adapter_id": "shared"}
            await change(pair.ports[0], LOAD, load)
            await change(pair.ports[1], UNLOAD, unload)
            assert await registry.record(UNLOAD, unload) == []
            assert await registry.record(LOAD, load) == []
            assert [send(port, "GET", "/v1/models/shared")[0] for port in pair.ports] == [200, 200]

    asyncio.run(run())


def meaning(port: int, name: str) -> str:
    """Return the answer of the adapter that a name means."""
    source = {"adapter_source": "hub"} if "/" in name else {}
    body = {"inputs": PROMPT, "parameters": {"adapter_id": name, "max_new_tokens": 12, **source}}
    status, _, answer = send(port, "POST", "/generate", body)
    assert status == 200, answer
    return str(answer["generated_text"])


def test_many_changers_at_once_leave_all_replicas_alike(pair: Pair) -> None:
    async def run() -> None:
        async with following(pair) as (registry, _):

            async def keep_changing(port: int, names: list[str]) -> None:
                for name in names:
                    await change(port, LOAD, hub_load(name, name="busy"))
                    assert await registry.record(LOAD, hub_load(name, name="busy")) == []

            first, second = ["sql", "redact"] * 3, ["redact", "json"] * 3
            await asyncio.gather(*map(keep_changing, pair.ports, (first, second)))
            last = (await registry.join("late", 0, ""))[-1].body["adapter_id"]
            meant = [meaning(port, "busy") for port in pair.ports]
            assert meant == [meaning(pair.ports[0], last)] * 2

    asyncio.run(run())


# --- Tokens -----------------------------------------------------------------------------------------------------------


def test_the_server_that_has_loaded_an_adapter_does_not_resolve_it_again(pair: Pair) -> None:
    """It had the token for that request only. Its own changes decide about the pin all the same; another's cannot."""
    port, of_first = pair.ports[1], f"Bearer {HUB_TOKEN}"
    load = hub_load("private", name="mine", pin=True)
    changes = [  # the pin, the server that has answered, the pins then, and the tokens that the hub was shown
        (False, "second", [False, False], {of_first}),
        (True, "first", [True, False], {None}),
        (True, "second", [True, True], {of_first}),
    ]

    async def run() -> None:
        async with following(pair) as (registry, followers):
            await change(port, LOAD, {**load, "api_token": HUB_TOKEN})
            for pin, answered_by, pinned, shown in changes:
                pair.hub.seen.clear()
                assert await registry.record(LOAD, {**load, "pin": pin}, answered_by) == []
                for follower in followers:
                    await asyncio.gather(*(pending.task for pending in follower._loads.values()))
                assert [listed(each)["mine"]["pinned"] for each in pair.ports] == pinned
                assert {request.headers.get("authorization") for request in pair.hub.seen} == shown

    asyncio.run(run())
    send(port, "POST", UNLOAD, {"adapter_id": "mine"})


# --- What cannot be done ----------------------------------------------------------------------------------------------


def test_a_change_that_one_server_cannot_make_holds_up_nobody(pair: Pair) -> None:
    """`pirate` is in the folder of the first one only."""

    async def run() -> None:
        async with following(pair) as (registry, followers):
            await change(pair.ports[0], LOAD, {"adapter_id": "pirate", "adapter_source": "local", "name": "captain"})
            load = {"adapter_id": "pirate", "adapter_source": "local", "name": "captain", "pin": True}
            assert await registry.record(LOAD, load) == []
            assert await registry.record("/v1/no/such/change", {}) == []
            for follower in followers:
                await asyncio.gather(*(pending.task for pending in follower._loads.values()))

    asyncio.run(run())
    assert generate(pair.ports[0], "captain", PROMPT)[0]
    status, _, answer = send(
        pair.ports[1], "POST", "/generate", {"inputs": "x", "parameters": {"adapter_id": "captain"}}
    )
    assert (status, answer["error_type"]) == (424, "generation")
    assert generate(pair.ports[1], "", PROMPT)[0]


# --- Behind the ingress -----------------------------------------------------------------------------------------------


async def ask(pair: Pair, body: dict[str, Any], key: str = ADMIN) -> int:
    """Send a request through an ingress, to the second server if both are as good, and return the status."""
    order = ReplicaChooser()
    order.set_replicas(("a", "b"))
    first, second = order.owners(hash_name(body["parameters"]["adapter_id"]))
    chosen = Chosen({first: pair.ports[1], second: pair.ports[0]})
    ingress = gate.Ingress(chosen, "app", ["lorax-demo"], 10**6, body_timeout_s=30.0)
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    async def take(message: Any) -> None:
        sent.append(message)

    headers = {"authorization": f"Bearer {key}", "content-type": "application/json", "host": "localhost"}
    headers |= {CLIENT_HEADER: "6.6.6.6"}
    scope = {"type": "http", "method": "POST", "path": "/generate", "query_string": b"", "client": (CLIENT, 5)}
    scope["headers"] = [(name.encode(), value.encode()) for name, value in headers.items()]
    await ingress.answer(scope, receive, take)
    await ingress._upstream.close()
    return int(sent[0]["status"])


@pytest.fixture
def ingress_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "share_key", lambda app: INGRESS_KEY)  # noqa: ARG005 # it lies in Ray's store


def named(adapter: str, **more: Any) -> dict[str, Any]:
    return {"inputs": PROMPT, "parameters": {"adapter_id": adapter, "max_new_tokens": 1, **more}}


@pytest.mark.usefixtures("ingress_key")
@pytest.mark.parametrize(
    ("body", "refusal"),
    [(named("pirate"), 424), (named("owner/private", adapter_source="hub"), 424)],
    ids=["in one folder", "by one token"],
)
def test_an_adapter_that_only_one_replica_can_fetch_is_served_by_it(pair: Pair, body: Any, refusal: int) -> None:
    assert [send(port, "POST", "/generate", body)[0] for port in pair.ports] == [200, refusal]
    assert asyncio.run(ask(pair, body)) == 200
    assert asyncio.run(ask(pair, named("nobody-has-it"))) == 424


def test_the_routes_of_a_replica_are_its_own(pair: Pair) -> None:
    load = {"source": "hub", "name": "owner/sql", "identity": "x", "pin": True}
    for path, body in (("follow", {"path": LOAD, "body": {}}), ("load", load), ("pin", load)):
        assert send(pair.ports[0], "POST", f"/replica/{path}", body)[0] == 403


def test_limits_of_a_key_hold_at_each_replica(pair: Pair) -> None:
    """So over N replicas they are N times as much, as the documentation says."""
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 1}}
    for port in pair.ports:
        statuses = [send(port, "POST", "/generate", body, LIMITED)[0] for _ in range(LIMIT + 2)]
        assert statuses == [200] * LIMIT + [429] * 2


@pytest.mark.usefixtures("ingress_key")
def test_only_the_ingress_tells_a_server_who_its_client_is(pair: Pair) -> None:
    """The audit log has the address of a client whose key is refused."""
    server = pair.servers[1]
    address = f"{server.host}:{server.port}"

    def sign(key: str = INGRESS_KEY, server: str = address) -> str:
        return sign_client(key, server, "GET", "/v1/adapters", "9.9.9.9", time.time())

    for claimed in (["9.9.9.9"], [f"{INGRESS_KEY} 9.9.9.9"]):
        assert refused_address(server, claimed) == "127.0.0.1"
    assert refused_address(server, [sign(key="x")]) == "127.0.0.1"
    assert refused_address(server, [sign(server="127.0.0.1:1")]) == "127.0.0.1"
    assert refused_address(server, [sign()] * 2) == "127.0.0.1"
    proven = sign()
    assert refused_address(server, [proven]) == "9.9.9.9"
    assert refused_address(server, [proven]) == "127.0.0.1"  # what was overheard, and is sent again
    assert asyncio.run(ask(pair, named("sql"), key="wrong")) == 401
    assert last_address(server) == CLIENT


def refused_address(server: ServerProcess, claimed: list[str]) -> str:
    """Come with a key that is not known, and return the address by which the server knows the client."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.putrequest("GET", "/v1/adapters")
    connection.putheader("authorization", "Bearer wrong")
    for value in claimed:
        connection.putheader(CLIENT_HEADER, value)
    connection.endheaders()
    status = connection.getresponse().status
    connection.close()
    assert status == 401
    return last_address(server)


def last_address(server: ServerProcess) -> str:
    def find() -> list[str]:
        return [line for line in server._lines if 'action="use a key"' in line]

    wait_for(find, "it is logged")
    (found,) = find()
    server._lines.clear()
    address = re.search(r"address=(\S+)", found)
    assert address is not None
    return address[1]
