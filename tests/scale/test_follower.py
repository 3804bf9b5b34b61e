"""Changes at a server that does not answer. `test_pair.py` has real servers, which do."""

import asyncio
from typing import Any

import pytest

from lorax_server.scale import follower as module
from lorax_server.scale.follower import ChangeFollower, Name
from lorax_server.scale.registry import Entry
from lorax_server.scale.server_process import UnavailableServerError

LOAD, UNLOAD = "/v1/adapters/load", "/v1/adapters/unload"


class AbsentServer:
    """Answers to changes once it is there."""

    def __init__(self) -> None:
        self.is_there, self.meant = True, list[Name | None]()

    async def follow(self, _path: str, _body: dict[str, Any], meant: Name | None, _is_own: bool) -> dict[str, Any]:
        if not self.is_there:
            raise UnavailableServerError("it does not answer")
        self.meant.append(meant)
        return {"source": "local", "name": "json", "is_wanted": False, "pin": None, "identity": ""}


def test_a_change_that_is_not_made_is_not_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made when the server is there again, of the adapter that its name meant."""
    monkeypatch.setattr(module, "RETRY_S", 0.0)

    async def run() -> None:
        server: Any = AbsentServer()
        follower, unload = ChangeFollower(server, "one"), Entry(2, UNLOAD, {"adapter_id": "mine"})
        await follower.make(Entry(1, LOAD, {"adapter_id": "json", "name": "mine"}))
        server.is_there = False
        for _ in range(2):
            with pytest.raises(UnavailableServerError):
                await follower.make(unload)
            assert follower.confirmed == 1
        server.is_there = True
        await follower.make(unload)
        assert follower.confirmed == 2
        assert server.meant == [None, ("local", "json")]

    asyncio.run(run())
