"""Two servers of replicas without Ray: processes of the demo model, each with adapters and a disk of its own, and a hub
that both ask."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from lorax_server.scale.follower import ChangeFollower
from lorax_server.scale.registry import ChangeRegistry
from lorax_server.scale.server_process import Order, ServerProcess
from tests.adapters.sources.hub_server import HubServer, Repo
from tests.adapters.sources.server import running
from tests.demo.server import FOLDER
from tests.scale.cluster import ADMIN, send

HUB_TOKEN = "hf_of_the_first"
INGRESS_KEY = "the-ingresses-own"
LIMITED = "the-limited-ones"
LIMIT = 3  # requests a minute
KEYS = f"""[keys.limited]
key = "{LIMITED}"
requests_per_minute = {LIMIT}
"""


class Pair(NamedTuple):
    """Two servers and their hub. `pirate` is in the folder of the first one only, which also has a token of its own
    for `owner/private`. The second one has two API processes."""

    servers: tuple[ServerProcess, ServerProcess]
    hub: HubServer

    @property
    def ports(self) -> list[int]:
        return [server.port for server in self.servers]


@contextmanager
def starting_pair(folder: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        hub = stack.enter_context(running(HubServer()))
        (folder / "keys.toml").write_text(KEYS)
        for name in ("sql", "json", "redact"):
            files = (FOLDER / "adapters" / name).iterdir()
            hub.repos[f"owner/{name}"] = Repo({file.name: file.read_bytes() for file in files})
        hub.repos["owner/private"] = Repo(hub.repos["owner/json"].files, token=HUB_TOKEN)
        with patch.dict(os.environ, HF_TOKEN=HUB_TOKEN):
            first = _start(folder / "first", hub.url, "pirate")
        pair = Pair((first, _start(folder / "second", hub.url)), hub)
        try:
            asyncio.run(_wait(pair))
            yield pair
        finally:
            asyncio.run(_stop(pair))


def _start(folder: Path, hub: str, *names: str) -> ServerProcess:
    (folder / "adapters").mkdir(parents=True)
    for name in names:
        shutil.copytree(FOLDER / "adapters" / name, folder / "adapters" / name)
    flags = {
        "device": "cpu",
        "adapters-dir": folder / "adapters",
        "hub": "true",
        "hub-endpoint": hub,
        "admin-key": ADMIN,
    }
    flags["use-global-hf-token"] = "true"
    flags |= {"huggingface-hub-cache": folder / "cache", "keys-file": folder.parent / "keys.toml"}
    order = Order([f"--{flag}={value}" for flag, value in flags.items()])
    return ServerProcess(order, "127.0.0.1", INGRESS_KEY)


async def _wait(pair: Pair) -> None:
    async with closing_clients(pair):
        await asyncio.gather(*(server.wait_until_ready() for server in pair.servers))


async def _stop(pair: Pair) -> None:
    await asyncio.gather(*(server.stop() for server in pair.servers))


@asynccontextmanager
async def closing_clients(pair: Pair) -> AsyncIterator[None]:
    """Close the clients of a test: they belong to its event loop."""
    try:
        yield
    finally:
        for server in pair.servers:
            client, server._session = server._session, None
            if client is not None:
                await client.close()


@asynccontextmanager
async def following(pair: Pair) -> AsyncIterator[tuple[ChangeRegistry, list[ChangeFollower]]]:
    """Let both servers follow a registry."""
    loop, stored = asyncio.get_running_loop(), list[bytes]()
    registry = ChangeRegistry(None, stored.append, loop.time)
    followers = [ChangeFollower(*each) for each in zip(pair.servers, ("first", "second"), strict=True)]

    async def follow(name: str, follower: ChangeFollower) -> None:
        while True:
            for entry in await registry.poll(name, follower.confirmed, name):
                await follower.make(entry)

    async with closing_clients(pair):
        for name in ("first", "second"):
            await registry.join(name, 0, name)
        names = zip(("first", "second"), followers, strict=True)
        tasks = [asyncio.create_task(follow(*each)) for each in names]
        try:
            yield registry, followers
        finally:
            for follower in followers:
                follower.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def listed(port: int) -> Mapping[str, Any]:
    """List the adapters of a server by their names."""
    status, _, page = send(port, "GET", "/v1/adapters")
    assert status == 200, page
    return {each["id"]: each for each in page["data"]}
