"""Routes for the Ray replica that a server belongs to. `tests/scale/test_pair.py` has real servers and engines."""

import asyncio

import pytest

from lorax_server.engine.remote import messages
from lorax_server.server.access.keys import KeyRing
from lorax_server.server.app import make_app
from lorax_server.types import EngineStatus
from tests.server.fake_server import Reply, Routes

KEY = "the-replicas-own"
LOAD, UNLOAD = "/v1/adapters/load", "/v1/adapters/unload"


class ReplicaRoutes(Routes):
    """The routes of a server that is a replica."""

    def __init__(self) -> None:
        super().__init__(["poet"], replica_key=KEY)
        self.service.keys = KeyRing((), None, None, KEY)
        self.app, self._served = make_app(self.service), self.service

    def _obey(self, message: messages.ToEngine) -> None:
        super()._obey(message)
        if isinstance(message, messages.GetStatus):
            numbers = dict.fromkeys(EngineStatus.__dataclass_fields__, 2)
            reply = messages.StatusReply(message.query_id, EngineStatus(**numbers))
            asyncio.get_running_loop().call_soon(self.engine._settle, reply)

    def follow(self, path: str, **body: object) -> Reply:
        return self.post("/replica/follow", {"path": path, "body": body}, KEY)


@pytest.fixture(scope="module")
def shared() -> ReplicaRoutes:
    return ReplicaRoutes()


def test_state_names_the_adapters_that_the_router_needs(shared: ReplicaRoutes) -> None:
    loaded = shared.post("/replica/load", {"source": "local", "name": "poet"}, KEY)
    assert (loaded.status, loaded.json) == (200, {"identity": "hash of poet"})
    state = shared.get("/replica/state", KEY)
    assert state.status == 200
    assert state.json["names"] == {"device": ["poet"]}
    assert (state.json["running"], state.json["waiting"], state.json["is_draining"]) == (2, 4, False)


def test_a_change_of_another_replica_is_followed(shared: ReplicaRoutes) -> None:
    followed = shared.follow(LOAD, adapter_id="poet", adapter_source="local", name="mine", pin=True)
    assert followed.status == 200
    assert (followed.json["source"], followed.json["name"], followed.json["pin"]) == ("local", "poet", True)
    assert "mine" in shared.service.model_names.aliases
    assert shared.follow(UNLOAD, adapter_id="mine").json["name"] == "poet"
    assert "mine" not in shared.service.model_names.aliases


def test_an_unknown_change_is_refused(shared: ReplicaRoutes) -> None:
    refused = shared.follow("/v1/no/such/change")
    assert refused.status == 422
    assert "nothing to follow at '/v1/no/such/change'" in refused.message


def test_only_the_replica_may_use_its_routes(shared: ReplicaRoutes) -> None:
    assert shared.get("/replica/state").status in (401, 403)
    assert shared.get("/replica/state", "another").status in (401, 403)
