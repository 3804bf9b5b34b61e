"""Starts two replica servers without Ray, with separate adapter folders and caches, and one hub."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from lorax_server.scale.change_registry import ChangeRegistry
from lorax_server.scale.server_process import ServerProcess
from tests.adapters.sources.hub_server import HubServer, Repo
from tests.adapters.sources.server import running
from tests.demo.server import FOLDER
from tests.scale.cluster import ADMIN, SECRET, send

HUB_TOKEN = "hf_of_the_first"
LIMITED = "the-limited-ones"
LIMIT = 3  # requests a minute
KEYS = f"""[keys.limited]
key = "{LIMITED}"
requests_per_minute = {LIMIT}
"""
NAMES = ("first", "second")


class Pair(NamedTuple):
    """Two servers and their hub. Only the first server has `pirate` in its folder and a token for `owner/private`."""

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
        "use-global-hf-token": "true",
        "huggingface-hub-cache": folder / "cache",
        "keys-file": folder.parent / "keys.toml",
    }
    return ServerProcess([f"--{flag}={value}" for flag, value in flags.items()], "127.0.0.1", SECRET)


async def _wait(pair: Pair) -> None:
    await asyncio.gather(*(server.wait_until_ready() for server in pair.servers))


async def _stop(pair: Pair) -> None:
    await asyncio.gather(*(server.stop() for server in pair.servers))


@asynccontextmanager
async def apply_changes(pair: Pair) -> AsyncIterator[ChangeRegistry]:
    """Apply the registry's changes on both servers."""
    registry = ChangeRegistry(None, list[bytes]().append, asyncio.get_running_loop().time)

    async def follow(name: str, server: ServerProcess) -> None:
        confirmed = 0
        while True:
            for entry in await registry.poll(name, confirmed, name):
                await server.apply(entry.change, is_own=entry.served_by == name)
                confirmed = entry.version

    for name in NAMES:
        await registry.join(name, 0, name)
    tasks = [asyncio.create_task(follow(*each)) for each in zip(NAMES, pair.servers, strict=True)]
    try:
        yield registry
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def listed(port: int) -> Mapping[str, Any]:
    """Return the server's adapters by name."""
    status, _, page = send(port, "GET", "/v1/adapters")
    assert status == 200, page
    return {each["id"]: each for each in page["data"]}
