"""Unloading: the adapter has left, or the answer names its holder; places that are gone are forgotten."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from lorax_server.engine.remote import messages
from lorax_server.errors import AdapterAccessError, AdapterError, AdapterNotFoundError, LoraxError, SourceError
from lorax_server.server.access.model_names import AdapterKey
from lorax_server.types import AdapterState, Failure, Merge, Resolved
from tests.server.fake_server import Reply, Routes, generate

ADMIN = "admin"
SPELLINGS = ["json", "./json", "json/", "json//", "/srv/adapters/json"]


class Loads(Routes):
    """Routes whose engine remembers the adapters on its device and their pins. `twin` is a copy of `json`."""

    def __init__(self) -> None:
        super().__init__(folder=["json", "twin", "sql"], admin_key=ADMIN)
        self.service.model_names._local_roots = [Path("/srv/adapters")]
        self.device: dict[str, bool] = {}  # whether it is pinned
        self.answers["twin"] = Resolved("hash of json")

    def _obey(self, message: messages.ToEngine) -> None:
        match message:
            case messages.Add(request) if request.adapter_identity:
                self.device.setdefault(request.adapter_identity, False)
            case messages.LoadAdapter(_, identity, pin):
                self.device[identity] = self.device.get(identity, False) if pin is None else pin
            case messages.UnloadAdapter(_, identity):
                self.device.pop(identity, None)
            case messages.ListAdapters(query_id, identities):
                self.engine.sent.append(message)
                reply = messages.AdaptersReply(query_id, [self._state(each) for each in identities])
                asyncio.get_running_loop().call_soon(self.engine._settle, reply)
                return
        super()._obey(message)

    def _state(self, identity: str) -> AdapterState:
        state = "on the device" if identity in self.device else "on disk"
        return AdapterState(identity, identity, state, 7, self.device.get(identity, False), 0, 1)

    def use(self, name: str, **parameters: Any) -> Reply:
        return self.post("/generate", generate(adapter_id=name, **parameters))

    def load(self, name: str, /, **more: Any) -> Reply:
        return self.post("/v1/adapters/load", {"adapter_id": name, **more}, ADMIN)

    def unload(self, name: str, /, **more: Any) -> Reply:
        return self.post("/v1/adapters/unload", {"adapter_id": name, **more}, ADMIN)

    def listed(self) -> dict[str, Any]:
        return {each["id"]: each for each in self.get("/v1/adapters", ADMIN).json["data"]}


@pytest.fixture
def routes() -> Loads:
    return Loads()


@pytest.mark.parametrize("second", SPELLINGS)
@pytest.mark.parametrize("unloaded", SPELLINGS)
def test_what_was_named_by_two_spellings_is_unloaded_by_either(routes: Loads, second: str, unloaded: str) -> None:
    for name in ("json", second):
        reply = routes.use(name)
        assert (reply.status, reply.headers["x-adapter-id"]) == (200, "json")
    assert routes.unload(unloaded).status == 200
    assert routes.device == {}
    assert routes.listed().keys() == {"json", "twin", "sql"}


def test_spellings_are_one_label_in_metrics(routes: Loads) -> None:
    for name in SPELLINGS:
        routes.use(name)
    text = routes.metrics.render_prometheus().decode()
    assert 'lorax_adapter_requests_total{adapter="json"} 5.0' in text
    assert "./json" not in text


def test_a_copy_that_is_not_pinned_does_not_hold_it(routes: Loads) -> None:
    routes.use("json")
    routes.use("twin")
    assert routes.unload("json").status == 200
    assert routes.device == {}
    assert [routes.listed()[name]["state"] for name in ("json", "twin")] == ["on disk"] * 2
    assert routes.use("twin").status == 200  # a request that names it loads it again
    assert "hash of json" in routes.device


def test_a_copy_that_is_pinned_holds_it_and_is_named(routes: Loads) -> None:
    routes.use("json")
    routes.load("twin", pin=True)
    for path, body in (
        ("/v1/adapters/unload", {"adapter_id": "./json"}),
        ("/v1/unload_lora_adapter", {"lora_name": "json"}),
    ):
        reply = routes.post(path, body, ADMIN)
        assert reply.status == 409
        assert reply.message.startswith("adapter 'json' has the same content as 'twin', which is pinned")
    assert routes.device == {"hash of json": True}
    assert routes.unload("twin").status == routes.unload("json").status == 200
    assert routes.device == {}


@pytest.mark.parametrize("how", ["not pinned any more", "the engine has started anew"])
def test_a_pin_that_is_no_more_does_not_hold_it(routes: Loads, how: str) -> None:
    routes.load("twin", pin=True)
    if how == "not pinned any more":
        routes.load("twin", pin=False)
    else:
        routes.device.clear()
    routes.use("json")
    assert routes.unload("json").status == 200
    assert routes.device == {}


def test_a_copy_of_an_older_version_does_not_hold_the_newer(routes: Loads) -> None:
    routes.use("json")
    routes.load("twin", pin=True)
    routes.answers["json"] = Resolved("hash of newer")
    routes.use("json")
    assert routes.unload("json").status == 200
    assert routes.device == {"hash of json": True}


def test_a_new_version_lets_the_old_one_go_with_its_pin(routes: Loads) -> None:
    routes.load("json", pin=True)
    routes.use("twin")
    routes.answers["json"] = Resolved("hash of newer")
    routes.load("json", pin=True)
    assert routes.device == {"hash of newer": True}


def test_an_alias_is_another_name_of_the_same_place(routes: Loads) -> None:
    """Unload by either name. Only the unloaded name is removed, if a client had added it."""
    routes.load("json", name="alias", pin=True)
    assert routes.unload("json").status == 200
    assert routes.device == {}
    assert (routes.listed()["alias"]["state"], routes.listed()["alias"]["pinned"]) == ("on disk", False)
    assert routes.use("alias").headers["x-adapter-id"] == "alias"
    assert routes.unload("alias").status == 200
    assert routes.device == {}
    assert "alias" not in routes.listed()


def test_what_was_unloaded_is_forgotten(routes: Loads) -> None:
    routes.use("json")
    routes.unload("json")
    assert routes.service.adapter_index.identities_of(AdapterKey("local", "json")) == []
    assert routes.listed()["json"]["hash"] is None


def test_a_removed_folder_stays_until_it_is_unloaded_by_its_name(routes: Loads) -> None:
    routes.load("json", pin=True)
    routes.service.model_names.set_folder_names(["sql"])
    routes.answers["json"] = AdapterNotFoundError("no such folder")
    assert routes.use("json").status == 424
    assert (routes.listed()["json"]["state"], routes.listed()["json"]["pinned"]) == ("on the device", True)
    assert routes.unload("json").status == 200
    assert routes.device == {}
    assert routes.listed().keys() == {"sql"}
    assert routes.unload("json").status == 404


def test_a_place_that_is_gone_is_forgotten_when_it_is_asked_for(routes: Loads) -> None:
    routes.use("elsewhere")
    routes.device.clear()
    assert "elsewhere" in routes.listed()
    routes.answers["elsewhere"] = AdapterNotFoundError("no such folder")
    routes.use("elsewhere")
    assert "elsewhere" not in routes.listed()
    assert routes.service.adapter_index.names_of("hash of elsewhere") == ()


# --- Lists of folders that cannot be served ---------------------------------------------------------------------------


def test_a_broken_folder_is_listed_with_its_error_once_it_has_failed(routes: Loads) -> None:
    assert (routes.listed()["sql"]["state"], routes.listed()["sql"]["error"]) == ("on disk", None)
    routes.answers["sql"] = AdapterError("adapter 'sql': has a broken header")
    assert routes.use("./sql").status == 424
    for key in (None, ADMIN):
        found = {each["id"]: each for each in routes.get("/v1/adapters", key).json["data"]}["sql"]
        assert (found["state"], found["error"]) == ("failed", "adapter 'sql': has a broken header")
    del routes.answers["sql"]
    routes.use("sql")
    assert (routes.listed()["sql"]["state"], routes.listed()["sql"]["error"]) == ("on the device", None)


def test_a_folder_that_broke_is_listed_as_it_is_in_memory_and_with_its_error(routes: Loads) -> None:
    routes.use("sql")
    routes.answers["sql"] = AdapterError("adapter 'sql': has a broken header")
    assert routes.load("sql").status == 424
    found = routes.listed()["sql"]
    assert (found["state"], found["error"]) == ("on the device", "adapter 'sql': has a broken header")


@pytest.mark.parametrize("error", [AdapterAccessError, SourceError, AdapterNotFoundError])
def test_what_says_nothing_about_the_files_is_not_listed(routes: Loads, error: type[LoraxError]) -> None:
    routes.answers["sql"] = error("not now")
    routes.use("sql")
    assert routes.listed()["sql"]["error"] is None


def test_what_only_a_token_was_shown_is_not_listed(routes: Loads) -> None:
    routes.answers["sql"] = AdapterError("private")
    routes.use("sql", api_token="secret")
    assert routes.listed()["sql"]["error"] is None


def test_an_answer_says_that_it_is_not_of_the_newest_version(routes: Loads) -> None:
    routes.use("sql")
    stale = Failure("AdapterError", 424, "adapter 'sql': half of it is missing")
    routes.answers["sql"] = Resolved("hash of sql", tier="device", stale=stale)
    for path in ("/generate", "/generate_stream"):
        reply = routes.post(path, generate(adapter_id="sql"))
        assert (reply.status, reply.headers["x-adapter-version"]) == (200, "previous")
    found = routes.listed()["sql"]
    assert (found["state"], found["error"]) == ("on the device", stale.message)
    del routes.answers["sql"]
    assert "x-adapter-version" not in routes.use("sql").headers
    assert routes.listed()["sql"]["error"] is None


# --- Merges -----------------------------------------------------------------------------------------------------------


def merge(routes: Loads, seed: int | None = None, **more: Any) -> tuple[Reply, messages.Resolve]:
    reply = routes.post("/generate", generate(merged_adapters={"ids": ["./sql", "json"], **more}, seed=seed))
    assert reply.status == 200, reply.message
    return reply, [each for each in routes.engine.sent if isinstance(each, messages.Resolve) and each.merge][-1]


def test_null_is_as_if_it_were_not_there(routes: Loads) -> None:
    _, expected = merge(routes)
    _, found = merge(routes, weights=None, density=None, merge_strategy=None, majority_sign_method=None)
    assert found.merge == expected.merge == Merge((1.0, 1.0))


def test_dare_draws_by_the_requests_seed(routes: Loads) -> None:
    """Without a seed, or if nothing is drawn, requests share one adapter."""

    def seeds(**more: Any) -> list[int]:
        return [
            found.merge.seed for _, found in (merge(routes, seed, **more) for seed in (None, 0, 1, 2)) if found.merge
        ]

    for strategy in ("dare_linear", "DARE_ties"):
        assert seeds(merge_strategy=strategy, density=0.5) == [0, 0, 1, 2]
        assert seeds(merge_strategy=strategy, density=1) == seeds(merge_strategy=strategy) == [0] * 4
    assert seeds(merge_strategy="ties", density=0.5) == seeds() == [0] * 4
    assert len({Merge((1.0,), "dare_ties", 0.5, seed=seed).identity(["x"]) for seed in (0, 1, 2)}) == 3


def test_a_merge_has_one_name_everywhere(routes: Loads) -> None:
    reply, _ = merge(routes)
    assert reply.headers["x-adapter-id"] == "sql,json"
    assert routes.listed()["sql,json"]["hash"] == "merged"
    assert 'lorax_adapter_requests_total{adapter="sql,json"} 1.0' in routes.metrics.render_prometheus().decode()


def test_a_merge_that_has_left_memory_is_listed_no_longer(routes: Loads) -> None:
    merge(routes)
    routes.device.clear()
    assert "sql,json" not in routes.listed()
    assert routes.service.adapter_index.names_of("merged") == ()
