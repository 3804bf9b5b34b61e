"""A server with a keys file: prefix cache sharing and allowed folders."""

import asyncio
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.e2e.hostile_client import request
from tests.server.socket_server import SharedServer, SocketServer, with_key

KEYS = """
[keys.alice]
key = "good"
group = "team"
adapters = ["poet"]
[keys.bob]
key = "bobs"
group = "team"
[keys.carol]
key = "carols"
[keys.team]
key = "teams"
"""


@pytest.fixture(scope="module")
def server_with_keys_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(KEYS)
    path.chmod(0o600)
    with closing(SharedServer(keys_file=path, default_source="hub")) as shared:
        shared.harness.service.model_names.set_folder_names(["poet", "poet@x"])
        yield shared


def test_prefix_cache_is_shared_within_key_or_group_only(server_with_keys_file: SharedServer) -> None:
    asked = [("good", ""), ("bobs", ""), ("good", "x"), ("bobs", "x"), ("carols", ""), ("teams", ""), ("carols", "x")]

    async def check(server: SocketServer) -> None:
        for key, salt in asked:
            body = {"model": "", "prompt": "ask", "max_tokens": 1} | ({"cache_salt": salt} if salt else {})
            asking = asyncio.create_task(server.fetch(with_key("/v1/completions", body, key)))
            await server_with_keys_file.complete_all_requests()
            assert (await asking).status == 200
        salts = dict(zip(asked, (each.salt for each in server_with_keys_file.harness.engine.added), strict=True))
        assert salts["good", ""] == salts["bobs", ""]
        assert salts["good", "x"] == salts["bobs", "x"]
        assert len(set(salts.values())) == len(asked) - 2

    server_with_keys_file.run(check)


@pytest.mark.parametrize("name", ["poet@x", "poet@", "poet@y"])
def test_folder_permission_excludes_names_that_look_like_revisions(
    name: str, server_with_keys_file: SharedServer
) -> None:
    async def check(server: SocketServer) -> None:
        for body in ({"adapter_id": name}, {"adapter_id": name, "adapter_source": "local"}):
            answer = await server.fetch(with_key("/generate", {"inputs": "x", "parameters": body}))
            assert answer.status == 403
        listed = await server.fetch(request("GET", "/v1/models", [("authorization", "Bearer good")]))
        assert [each["id"] for each in listed.json()["data"]] == ["base", "poet"]

    server_with_keys_file.run(check)
