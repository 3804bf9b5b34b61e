"""Changing adapters without an admin key, which is allowed on loopback addresses without keys."""

from pathlib import Path
from typing import Any

import pytest

from lorax_server.config import CorsConfig
from tests.server.fake_server import Routes

LOAD, UNLOAD = "/v1/adapters/load", "/v1/adapters/unload"
POET = {"adapter_id": "poet"}


def change(routes: Routes, path: str, **headers: str) -> int:
    return routes.send("POST", path, POET, {name.replace("_", "-"): value for name, value in headers.items()}).status


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.1.2.3"])
def test_adapters_can_be_changed_on_loopback_without_keys(host: str) -> None:
    routes = Routes(["poet"], host=host)
    assert (change(routes, LOAD), change(routes, UNLOAD)) == (200, 200)
    vllm = {"lora_name": "poet-2", "lora_path": "poet"}
    assert routes.post("/v1/load_lora_adapter", vllm).status == 200
    assert routes.post("/v1/unload_lora_adapter", {"lora_name": "poet-2"}).status == 200


@pytest.mark.parametrize(
    "config",
    [
        {"host": "0.0.0.0"},
        {"host": "10.0.0.1"},
        {"api_keys": ("one",)},
        {"admin_key": "boss"},
        {"allowed_hosts": ("api.example.com",)},  # behind a proxy
        {"cors": CorsConfig(allow_origins=("*",))},  # open to web pages
        {"replica_secret": "s"},  # behind the ingress
    ],
)
def test_exposed_server_requires_admin_key(config: dict[str, Any]) -> None:
    routes = Routes(["poet"], **{"host": "127.0.0.1", **config})
    for path in (LOAD, UNLOAD):
        assert change(routes, path) in (401, 403)


def test_keys_file_requires_admin_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text('[keys.all]\nkey = "all"\n')
    routes = Routes(["poet"], keys_file=path, host="127.0.0.1")
    assert change(routes, LOAD, authorization="Bearer all") == 403


@pytest.mark.parametrize("name", ["x_forwarded_for", "forwarded", "via", "x_real_ip"])
def test_forwarded_requests_require_admin_key(name: str) -> None:
    routes = Routes(["poet"], host="127.0.0.1")
    assert change(routes, LOAD, **{name: "1.2.3.4"}) == 403
