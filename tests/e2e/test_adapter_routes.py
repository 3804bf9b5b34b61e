"""What a server says of its adapters is what its engine has."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.http_server import Server, serving, write_model

ADMIN = {"authorization": "Bearer admin"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("routes")
    write_model(folder)
    shutil.copytree(folder / "adapters" / "second", folder / "adapters" / "twin")
    flags = ("--preloaded-adapter-ids", "first", "--preloaded-adapter-source", "local", "--admin-key", "admin")
    shutil.copytree(folder / "adapters" / "first", folder / "others" / "deep")
    with serving(folder, *flags, "--local-adapters", str(folder / "others")) as server:
        yield server


def listed(server: Server, headers: dict[str, str] | None = None) -> dict[str, dict[str, Any]]:
    found = server.send("GET", "/v1/adapters", headers=headers).json["data"]
    assert len({each["id"] for each in found}) == len(found)
    return {each["id"]: each for each in found}


def change(server: Server, action: str, name: str, **more: Any) -> Any:
    answer = server.send("POST", f"/v1/adapters/{action}", {"adapter_id": name, **more}, ADMIN)
    assert answer.status == 200, answer.body
    return answer.json


def ask(server: Server, name: str) -> None:
    body = {"inputs": "hello", "parameters": {"adapter_id": name, "max_new_tokens": 2}}
    assert server.post("/generate", body).status == 200


def test_what_is_preloaded_is_listed_and_can_be_unloaded(server: Server) -> None:
    first = listed(server)["first"]
    assert (first["state"], first["pinned"], first["source"]) == ("on the device", True, "local")
    assert first["hash"]
    assert listed(server, ADMIN)["first"] == first
    change(server, "unload", "first")
    assert listed(server)["first"]["state"] == "on disk"
    ask(server, "first")
    first = listed(server)["first"]
    assert (first["state"], first["pinned"], first["uses"]) == ("on the device", False, 1)


def test_an_answer_says_where_its_adapter_was(server: Server) -> None:
    change(server, "load", "first")
    body = {"inputs": "hello", "parameters": {"adapter_id": "first", "max_new_tokens": 2}}
    assert server.post("/generate", body).headers["x-adapter-tier"] == "device"
    change(server, "unload", "first")
    streamed = server.post("/generate_stream", body)
    first, *others = streamed.events
    assert first["adapter_tier"] == streamed.headers["x-adapter-tier"] == "disk"
    assert not any("adapter_tier" in event for event in others)


def test_pages_of_a_running_server(server: Server) -> None:
    found, path = [], "/v1/adapters?limit=1"
    while path:
        page = server.send("GET", path, headers=ADMIN).json
        found += [each["id"] for each in page["data"]]
        path = page["next"] and f"/v1/adapters?limit=1&after={page['next']}"
    whole = [each["id"] for each in server.send("GET", "/v1/adapters", headers=ADMIN).json["data"]]
    assert found == whole
    assert len(whole) >= 3


def test_two_names_of_the_same_content(server: Server) -> None:
    ask(server, "second")
    ask(server, "twin")
    both = listed(server)
    assert both["second"]["hash"] == both["twin"]["hash"]
    assert both["second"]["state"] == both["twin"]["state"] == "on the device"
    change(server, "load", "twin", pin=True)
    change(server, "unload", "second")  # which the other one still means
    twin = listed(server)["twin"]
    assert (twin["state"], twin["pinned"]) == ("on the device", True)


def test_who_names_an_adapter_sees_where_it_is(server: Server) -> None:
    """It has no name of its own here, so that nobody else is told of it."""
    path = "/v1/adapters?also=deep&also=nobody&also=deep&also=second"
    assert "deep" not in {each["id"] for each in server.send("GET", path).json["data"]}
    ask(server, "deep")
    found = [each for each in server.send("GET", path).json["data"] if each["id"] in ("deep", "nobody", "second")]
    assert [(each["id"], each["state"]) for each in found if each["id"] != "second"] == [("deep", "on the device")]
    assert len(found) == 2
    assert "deep" not in listed(server)
    assert server.send("GET", "/v1/adapters?" + "also=x&" * 101).status == 400


def test_loading_leaves_a_pin_as_it_is(server: Server) -> None:
    for pin, is_pinned in ((True, True), (None, True), (False, False), (None, False)):
        assert change(server, "load", "first", pin=pin)["pinned"] is is_pinned
        assert listed(server)["first"]["pinned"] is is_pinned


@pytest.mark.parametrize("name", ["", "x\ny", "__base_model__"])
def test_names_that_nobody_could_use(name: str, server: Server) -> None:
    body = {"lora_name": name, "lora_path": "first"}
    assert server.send("POST", "/v1/load_lora_adapter", body, ADMIN).status == 400
