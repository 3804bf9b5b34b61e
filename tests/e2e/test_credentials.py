"""Adapter permissions by API key and by the client's hub token."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.sources.hub_server import HubServer, Repo
from tests.adapters.sources.server import running
from tests.e2e.http_server import HttpResponse, Server, serving, write_model

SECRET, KEY = "hf-secret", "sk-of-the-server"
PRIVATE, GATED, PUBLIC = "owner/private", "owner/gated", "owner/public"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("credentials")
    write_model(folder)
    return folder


@pytest.fixture(scope="module")
def hub(folder: Path) -> Iterator[HubServer]:
    first, second = (
        {path.name: path.read_bytes() for path in (folder / "adapters" / name).iterdir()}
        for name in ("first", "second")
    )
    with running(HubServer()) as server:
        server.repos[PRIVATE] = Repo(first, token=SECRET)
        server.repos[GATED] = Repo(second, token=SECRET, gated=True)
        server.repos[PUBLIC] = Repo(first, branches={"older": second, "shown": second})
        yield server


@contextmanager
def serving_with(hub: HubServer, folder: Path, cache: Path, *flags: str) -> Iterator[Server]:
    flags = ("--hub-endpoint", hub.url, "--huggingface-hub-cache", str(cache), *flags)
    with serving(folder, *flags, has_hub=True, environ={"HF_HUB_OFFLINE": "0"}) as server:
        yield server


@pytest.fixture(scope="module")
def open_server(hub: HubServer, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving_with(hub, folder, tmp_path_factory.mktemp("cache")) as server:
        yield server


def send_generate(server: Server, adapter: str, bearer: str | None = None, **parameters: Any) -> HttpResponse:
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 4, "adapter_id": adapter, **parameters}}
    return server.post("/generate", body, **({} if bearer is None else {"authorization": f"Bearer {bearer}"}))


def tokens_seen(hub: HubServer) -> set[str | None]:
    seen = {request.headers.get("authorization") for request in hub.seen}
    hub.reset()
    return seen


@pytest.mark.parametrize("adapter", [PRIVATE, GATED])
def test_private_adapter_requires_authorized_token(adapter: str, open_server: Server, hub: HubServer) -> None:
    def check_others() -> None:
        for bearer, token in ((None, None), ("wrong", None), (None, "wrong"), (SECRET, "wrong"), ("", None)):
            response = send_generate(open_server, adapter, bearer, api_token=token)
            assert response.status == 424, (bearer, token)
            assert "the hub denies access" in response.json["error"]
            assert "x-adapter-hash" not in response.headers
        model = {"model": adapter, "prompt": "hello", "max_tokens": 4}
        assert open_server.post("/v1/completions", model).status == 403

    check_others()
    by_bearer, by_token = (
        send_generate(open_server, adapter, SECRET),
        send_generate(open_server, adapter, api_token=SECRET),
    )
    assert by_bearer.status == by_token.status == 200
    assert by_bearer.body == by_token.body
    check_others()  # even if the adapter is on the device
    merged: dict[str, Any]
    merged = {"adapter_id": None, "merged_adapters": {"ids": [PUBLIC, adapter], "weights": [1, 1]}}
    assert send_generate(open_server, "", **merged).status == 424
    assert send_generate(open_server, "", SECRET, **merged).status == 200
    hub.reset()


def test_body_token_overrides_header_token(open_server: Server) -> None:
    assert send_generate(open_server, PRIVATE, "wrong", api_token=SECRET).status == 200
    assert send_generate(open_server, PRIVATE, SECRET, api_token="wrong").status == 424


def test_bearer_token_is_sent_only_to_gated_repositories(open_server: Server, hub: HubServer) -> None:
    hub.reset()
    assert send_generate(open_server, f"{PUBLIC}@shown", "somebody's").status == 200
    assert tokens_seen(hub) == {None}
    merged = {"adapter_id": None, "merged_adapters": {"ids": [f"{PUBLIC}@shown", PRIVATE], "weights": [1, 1]}}
    send_generate(open_server, "", "another's", **merged)
    paths_with_token = {
        request.path for request in hub.seen if request.headers.get("authorization") == "Bearer another's"
    }
    assert paths_with_token
    assert all("private" in path for path in paths_with_token)
    hub.reset()


def test_revisions_are_separate_adapters(open_server: Server) -> None:
    newest, older = send_generate(open_server, PUBLIC), send_generate(open_server, f"{PUBLIC}@older")
    first, second = (
        send_generate(open_server, "first", adapter_source="local"),
        send_generate(open_server, "second", adapter_source="local"),
    )
    assert newest.body == first.body != older.body == second.body
    assert newest.headers["x-adapter-hash"] == first.headers["x-adapter-hash"]
    assert older.headers["x-adapter-id"] == f"{PUBLIC}@older"


@pytest.mark.slow
def test_server_keys_are_never_sent_to_hub(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    with serving_with(hub, folder, tmp_path, "--api-key", KEY) as server:
        hub.reset()
        assert send_generate(server, PUBLIC).status == 401
        assert send_generate(server, PUBLIC, "wrong").status == 401
        assert tokens_seen(hub) == set()
        assert send_generate(server, PUBLIC, KEY).status == 200
        assert send_generate(server, PRIVATE, KEY).status == 424
        assert tokens_seen(hub) == {None}
        assert send_generate(server, PRIVATE, KEY, api_token=SECRET).status == 200
        assert tokens_seen(hub) == {f"Bearer {SECRET}"}
        assert KEY not in "".join(server.log)
        assert SECRET not in "".join(server.log)
