"""A replica with a fake server and a fake registry."""

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve

from lorax_server import __version__
from lorax_server.scale import replica as module
from lorax_server.scale.change_registry import MissedUnloadError
from lorax_server.scale.replica import ServerReplica


class RunningServer:
    address, is_running = "127.0.0.1:1", True

    def __init__(self, *_: Any) -> None:
        pass

    async def wait_until_ready(self) -> None:
        pass

    async def stop(self) -> None:
        pass


class Registry:
    """A registry that no longer stores an unload that the replica missed."""

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=getattr(self, f"call_{method}"))

    async def call_join(self, *_: Any) -> list[Any]:
        return []

    async def call_poll(self, *_: Any) -> list[Any]:
        await asyncio.sleep(0)
        raise MissedUnloadError("100 unloads behind")


class Replica(ServerReplica):
    """A replica that the test closes; Ray awaits `__del__`."""

    close = ServerReplica.__del__

    def __del__(self) -> None:  # type: ignore[override]
        pass


def test_replica_exits_after_missed_unload(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="one"))
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(module, "get_or_create_secret", str)
    monkeypatch.setattr(module, "get_or_create_registry", lambda app: Registry())  # noqa: ARG005
    monkeypatch.setattr(module, "ServerProcess", RunningServer)

    async def run() -> None:
        codes = asyncio.Queue[int]()
        monkeypatch.setattr(os, "_exit", codes.put_nowait)
        replica: Any = Replica.__new__(Replica)
        await replica.__init__([], "app", __version__, "127.0.0.1")
        assert await codes.get() == 1
        await replica.close()

    asyncio.run(run())
