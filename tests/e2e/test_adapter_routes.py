"""Adapter lists, which must agree with the engine."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.http_server import Server, serving, write_model, write_variant_adapter

ADMIN = {"authorization": "Bearer admin"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("routes")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    write_model(folder)
    write_variant_adapter(folder / "adapters" / "second", folder / "adapters" / "slow")
    shutil.copytree(folder / "adapters" / "second", folder / "adapters" / "twin")
    flags = ("--preloaded-adapter-ids", "first", "--preloaded-adapter-source", "local", "--admin-key", "admin")
    (folder / "others").mkdir()
    write_variant_adapter(folder / "adapters" / "first", folder / "others" / "deep")
    with serving(folder, *flags, "--local-adapters", str(folder / "others")) as server:
        yield server


def listed(server: Server, headers: dict[str, str] | None = None) -> dict[str, dict[str, Any]]:
    result = server.send("GET", "/v1/adapters", headers=headers).json["data"]
    assert len({(each["id"], each["hash"]) for each in result}) == len(result)
    return {each["id"]: each for each in result}


def change(server: Server, action: str, name: str, **more: Any) -> Any:
    response = server.send("POST", f"/v1/adapters/{action}", {"adapter_id": name, **more}, ADMIN)
    assert response.status == 200, response.body
    return response.json


def send_generate(server: Server, name: str) -> None:
    body = {"inputs": "hello", "parameters": {"adapter_id": name, "max_new_tokens": 2}}
    assert server.post("/generate", body).status == 200


@pytest.fixture(scope="module", autouse=True)
def preloaded(server: Server) -> Any:
    """Return the initial listing of the adapter `first`, for clients and for the admin."""
    return listed(server)["first"], listed(server, ADMIN)["first"]


def test_preloaded_adapter_is_listed(preloaded: Any) -> None:
    first, for_operators = preloaded
    assert (first["state"], first["pinned"], first["source"]) == ("on the device", True, "local")
    assert first["uses"] == 0
    assert first["hash"]
    assert for_operators == first


def test_loaded_adapter_can_be_unloaded(server: Server) -> None:
    change(server, "load", "first", pin=True)
    before = listed(server)["first"]
    assert (before["state"], before["pinned"]) == ("on the device", True)
    change(server, "unload", "first")
    assert listed(server)["first"]["state"] == "on disk"
    send_generate(server, "first")
    first = listed(server)["first"]
    assert (first["state"], first["pinned"], first["uses"]) == ("on the device", False, before["uses"] + 1)


def test_response_header_reports_adapter_tier(server: Server) -> None:
    change(server, "load", "first")
    body = {"inputs": "hello", "parameters": {"adapter_id": "first", "max_new_tokens": 2}}
    assert server.post("/generate", body).headers["x-adapter-tier"] == "device"
    change(server, "unload", "first")
    streamed = server.post("/generate_stream", body)
    first, *others = streamed.events
    assert first["adapter_tier"] == streamed.headers["x-adapter-tier"] == "disk"
    assert not any("adapter_tier" in event for event in others)


def test_adapter_list_is_paginated(server: Server) -> None:
    result, path = [], "/v1/adapters?limit=1"
    while path:
        page = server.send("GET", path, headers=ADMIN).json
        result += [each["id"] for each in page["data"]]
        path = page["next"] and f"/v1/adapters?limit=1&after={page['next']}"
    whole = [each["id"] for each in server.send("GET", "/v1/adapters", headers=ADMIN).json["data"]]
    assert result == whole
    assert len(whole) >= 3


def test_identical_adapters_share_memory_under_two_names(server: Server) -> None:
    send_generate(server, "second")
    send_generate(server, "twin")
    both = listed(server)
    assert both["second"]["hash"] == both["twin"]["hash"]
    assert both["second"]["state"] == both["twin"]["state"] == "on the device"
    change(server, "load", "twin", pin=True)
    rejected = server.send("POST", "/v1/adapters/unload", {"adapter_id": "second"}, ADMIN)  # `twin` holds it
    assert (rejected.status, "'twin', which is pinned" in rejected.json["error"]["message"]) == (409, True)
    twin = listed(server)["twin"]
    assert (twin["state"], twin["pinned"]) == ("on the device", True)
    change(server, "unload", "twin")
    assert listed(server)["second"]["state"] == "on disk"


def test_unload_normalizes_adapter_path(server: Server, folder: Path) -> None:
    for name in ("second", "./second", "second/", "second//", str(folder / "adapters" / "second")):
        send_generate(server, name)
        assert listed(server)["second"]["state"] == "on the device"
        change(server, "unload", "second")
        assert listed(server)["second"]["state"] == "on disk"
    assert "./second" not in server.send("GET", "/metrics").body.decode()


def test_old_adapter_is_served_until_overwrite_is_complete(server: Server, folder: Path) -> None:
    weights = folder / "adapters" / "slow" / "adapter_model.safetensors"
    new = (folder / "adapters" / "second" / "adapter_model.safetensors").read_bytes()
    body = {"inputs": "hello", "parameters": {"adapter_id": "slow", "max_new_tokens": 2}}
    before = server.post("/generate", body)
    with weights.open("wb") as file:
        for piece in (new[:100], new[100:1000]):
            file.write(piece)
            file.flush()
            response = server.post("/generate", body)
            assert (response.status, response.headers["x-adapter-version"]) == (200, "previous")
            assert response.headers["x-adapter-hash"] == before.headers["x-adapter-hash"]
            assert response.json == before.json
        assert "slow" in listed(server)["slow"]["error"]
        file.write(new[1000:])
    change(server, "load", "slow")  # checks the folder immediately
    after = server.post("/generate", body)
    assert "x-adapter-version" not in after.headers
    assert after.headers["x-adapter-hash"] != before.headers["x-adapter-hash"]
    assert listed(server)["slow"]["error"] is None


def test_merges_with_different_seeds_share_one_name(server: Server) -> None:
    def merged(seed: int | None, **more: Any) -> str:
        merge = {"ids": ["second", "slow"], "merge_strategy": "dare_linear", "density": 0.5, **more}
        parameters = {"merged_adapters": merge, "seed": seed, "max_new_tokens": 1}
        response = server.post("/generate", {"inputs": "hello", "parameters": parameters})
        assert (response.status, response.headers.get("x-adapter-id")) == (200, "second,slow"), response.body
        return response.headers["x-adapter-hash"]

    assert merged(None) == merged(None) == merged(0)
    assert len({merged(seed) for seed in (0, 1, 2)}) == 3
    assert len({merged(seed, merge_strategy="linear") for seed in (None, 1, 2)}) == 1
    whole = server.send("GET", "/v1/adapters", headers=ADMIN).json["data"]
    assert {each["id"] for each in whole if each["source"] is None} == {"second,slow"}
    assert all(each["state"] != "on disk" for each in whole if each["source"] is None)


def test_unlisted_adapter_is_visible_by_name_only(server: Server) -> None:
    """Unlisted adapters are shown only to clients that name them."""
    path = "/v1/adapters?also=deep&also=nobody&also=deep&also=second"
    assert "deep" not in {each["id"] for each in server.send("GET", path).json["data"]}
    send_generate(server, "deep")
    result = [each for each in server.send("GET", path).json["data"] if each["id"] in ("deep", "nobody", "second")]
    assert [(each["id"], each["state"]) for each in result if each["id"] != "second"] == [("deep", "on the device")]
    assert len(result) == 2
    assert "deep" not in listed(server)
    assert server.send("GET", "/v1/adapters?" + "also=x&" * 101).status == 400


def test_load_does_not_change_pin(server: Server) -> None:
    for pin, is_pinned in ((True, True), (None, True), (False, False), (None, False)):
        assert change(server, "load", "first", pin=pin)["pinned"] is is_pinned
        assert listed(server)["first"]["pinned"] is is_pinned


@pytest.mark.parametrize("name", ["", "x\ny", "__base_model__"])
def test_invalid_adapter_names_are_rejected(name: str, server: Server) -> None:
    body = {"lora_name": name, "lora_path": "first"}
    assert server.send("POST", "/v1/load_lora_adapter", body, ADMIN).status == 400
