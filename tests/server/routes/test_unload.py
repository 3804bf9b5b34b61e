"""Unloading adapters, adapter errors in listings, and merged adapters."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from lorax_server import __version__
from lorax_server.engine.remote import messages
from lorax_server.errors import AdapterAccessError, AdapterError, AdapterNotFoundError, LoraxError, SourceError
from lorax_server.server.access.model_names import AdapterKey
from lorax_server.types import AdapterState, Failure, Merge, ResolvedAdapter
from tests.server.fake_server import Reply, Routes, generate

ADMIN = "admin"
SPELLINGS = ["json", "./json", "json/", "json//", "/srv/adapters/json"]


class LoadTrackingRoutes(Routes):
    """Routes with an engine that tracks loaded adapters and pins. `twin` is a copy of `json`."""

    def __init__(self) -> None:
        super().__init__(folder=["json", "twin", "sql"], admin_key=ADMIN)
        self.service.model_names._local_roots = [Path("/srv/adapters")]
        self.device: dict[str, bool] = {}  # loaded identities, and whether they are pinned
        self.resolutions["twin"] = ResolvedAdapter("hash of json")

    def _handle_message(self, message: messages.ToEngine) -> None:
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
        super()._handle_message(message)

    def _state(self, identity: str) -> AdapterState:
        state = "on the device" if identity in self.device else "on disk"
        return AdapterState(identity, identity, state, 7, self.device.get(identity, False), 0, 1)

    def use(self, name: str, **parameters: Any) -> Reply:
        return self.post("/generate", generate(adapter_id=name, **parameters))

    def load(self, name: str, /, **more: Any) -> Reply:
        return self.post("/v1/adapters/load", {"adapter_id": name, **more}, ADMIN)

    def unload(self, name: str, /, **more: Any) -> Reply:
        return self.post("/v1/adapters/unload", {"adapter_id": name, **more}, ADMIN)

    def list_adapters(self) -> dict[str, Any]:
        return {each["id"]: each for each in self.get("/v1/adapters", ADMIN).json["data"]}


@pytest.fixture
def routes() -> LoadTrackingRoutes:
    return LoadTrackingRoutes()


@pytest.mark.parametrize("second", SPELLINGS)
@pytest.mark.parametrize("unloaded", SPELLINGS)
def test_unload_accepts_any_spelling_of_name(routes: LoadTrackingRoutes, second: str, unloaded: str) -> None:
    for name in ("json", second):
        reply = routes.use(name)
        assert (reply.status, reply.headers["x-adapter-id"]) == (200, "json")
    assert routes.unload(unloaded).status == 200
    assert routes.device == {}
    assert routes.list_adapters().keys() == {"json", "twin", "sql"}


def test_name_spellings_share_one_metric_label(routes: LoadTrackingRoutes) -> None:
    for name in SPELLINGS:
        routes.use(name)
    text = routes.metrics.render_prometheus().decode()
    assert 'lorax_adapter_requests_total{adapter="json"} 5.0' in text
    assert "./json" not in text


def test_unpinned_identical_adapter_does_not_block_unload(routes: LoadTrackingRoutes) -> None:
    routes.use("json")
    routes.use("twin")
    assert routes.unload("json").status == 200
    assert routes.device == {}
    assert [routes.list_adapters()[name]["state"] for name in ("json", "twin")] == ["on disk"] * 2
    assert routes.use("twin").status == 200  # a request loads the adapter again
    assert "hash of json" in routes.device


def test_pinned_identical_adapter_blocks_unload_with_409(routes: LoadTrackingRoutes) -> None:
    routes.use("json")
    routes.load("twin", pin=True)
    for path, body in (
        ("/v1/adapters/unload", {"adapter_id": "./json"}),
        ("/v1/unload_lora_adapter", {"lora_name": "json"}),
    ):
        reply = routes.post(path, body, ADMIN)
        assert reply.status == 409
        assert reply.message.startswith(
            "adapter 'json' cannot be unloaded because it has the same content as 'twin', which is pinned"
        )
    assert routes.device == {"hash of json": True}
    assert routes.unload("twin").status == routes.unload("json").status == 200
    assert routes.device == {}


@pytest.mark.parametrize("how", ["unpinned", "engine restarted"])
def test_removed_pin_does_not_block_unload(routes: LoadTrackingRoutes, how: str) -> None:
    routes.load("twin", pin=True)
    if how == "unpinned":
        routes.load("twin", pin=False)
    else:
        routes.device.clear()
    routes.use("json")
    assert routes.unload("json").status == 200
    assert routes.device == {}


def test_pinned_old_version_does_not_block_unload(routes: LoadTrackingRoutes) -> None:
    routes.use("json")
    routes.load("twin", pin=True)
    routes.resolutions["json"] = ResolvedAdapter("hash of newer")
    routes.use("json")
    assert routes.unload("json").status == 200
    assert routes.device == {"hash of json": True}


def test_loading_new_version_unloads_pinned_old_version(routes: LoadTrackingRoutes) -> None:
    routes.load("json", pin=True)
    routes.use("twin")
    routes.resolutions["json"] = ResolvedAdapter("hash of newer")
    routes.load("json", pin=True)
    assert routes.device == {"hash of newer": True}


def test_unload_accepts_alias_or_name(routes: LoadTrackingRoutes) -> None:
    """Unloading works with either name. Only the given name is removed, if the load route assigned it."""
    routes.load("json", name="alias", pin=True)
    assert routes.unload("json").status == 200
    assert routes.device == {}
    assert (routes.list_adapters()["alias"]["state"], routes.list_adapters()["alias"]["pinned"]) == ("on disk", False)
    assert routes.use("alias").headers["x-adapter-id"] == "alias"
    assert routes.unload("alias").status == 200
    assert routes.device == {}
    assert "alias" not in routes.list_adapters()


def test_unloaded_adapter_is_removed_from_index(routes: LoadTrackingRoutes) -> None:
    routes.use("json")
    routes.unload("json")
    assert routes.service.adapter_index.identities_of(AdapterKey("local", "json")) == []
    assert routes.list_adapters()["json"]["hash"] is None


def test_removed_folder_stays_loaded_until_unload(routes: LoadTrackingRoutes) -> None:
    routes.load("json", pin=True)
    routes.service.model_names.set_folder_names(["sql"])
    routes.resolutions["json"] = AdapterNotFoundError("no such folder")
    assert routes.use("json").status == 424
    assert (routes.list_adapters()["json"]["state"], routes.list_adapters()["json"]["pinned"]) == (
        "on the device",
        True,
    )
    assert routes.unload("json").status == 200
    assert routes.device == {}
    assert routes.list_adapters().keys() == {"sql"}
    assert routes.unload("json").status == 404


def test_missing_folder_is_removed_from_index_on_request(routes: LoadTrackingRoutes) -> None:
    routes.use("elsewhere")
    routes.device.clear()
    assert "elsewhere" in routes.list_adapters()
    routes.resolutions["elsewhere"] = AdapterNotFoundError("no such folder")
    routes.use("elsewhere")
    assert "elsewhere" not in routes.list_adapters()
    assert routes.service.adapter_index.names_of("hash of elsewhere") == ()


# --- Listing of broken adapters ---------------------------------------------------------------------------------------


def test_broken_adapter_is_listed_with_error(routes: LoadTrackingRoutes) -> None:
    assert (routes.list_adapters()["sql"]["state"], routes.list_adapters()["sql"]["error"]) == ("on disk", None)
    routes.resolutions["sql"] = AdapterError("adapter 'sql': has a broken header")
    assert routes.use("./sql").status == 424
    for key in (None, ADMIN):
        result = {each["id"]: each for each in routes.get("/v1/adapters", key).json["data"]}["sql"]
        assert (result["state"], result["error"]) == ("failed", "adapter 'sql': has a broken header")
    del routes.resolutions["sql"]
    routes.use("sql")
    assert (routes.list_adapters()["sql"]["state"], routes.list_adapters()["sql"]["error"]) == ("on the device", None)


def test_loaded_adapter_with_broken_files_is_listed_with_error(routes: LoadTrackingRoutes) -> None:
    routes.use("sql")
    routes.resolutions["sql"] = AdapterError("adapter 'sql': has a broken header")
    assert routes.load("sql").status == 400
    result = routes.list_adapters()["sql"]
    assert (result["state"], result["error"]) == ("on the device", "adapter 'sql': has a broken header")


@pytest.mark.parametrize("error", [AdapterAccessError, SourceError, AdapterNotFoundError])
def test_source_errors_are_not_listed(routes: LoadTrackingRoutes, error: type[LoraxError]) -> None:
    routes.resolutions["sql"] = error("not now")
    routes.use("sql")
    assert routes.list_adapters()["sql"]["error"] is None


def test_private_adapter_error_is_not_listed(routes: LoadTrackingRoutes) -> None:
    routes.resolutions["sql"] = AdapterError("private")
    routes.use("sql", api_token="secret")
    assert routes.list_adapters()["sql"]["error"] is None


def test_stale_version_sets_adapter_version_header(routes: LoadTrackingRoutes) -> None:
    routes.use("sql")
    stale = Failure("AdapterError", 424, "adapter 'sql': half of it is missing")
    routes.resolutions["sql"] = ResolvedAdapter("hash of sql", tier="device", stale=stale)
    for path in ("/generate", "/generate_stream"):
        reply = routes.post(path, generate(adapter_id="sql"))
        assert (reply.status, reply.headers["x-adapter-version"]) == (200, "previous")
    result = routes.list_adapters()["sql"]
    assert (result["state"], result["error"]) == ("on the device", stale.message)
    del routes.resolutions["sql"]
    assert "x-adapter-version" not in routes.use("sql").headers
    assert routes.list_adapters()["sql"]["error"] is None


def test_adapter_for_another_base_model_is_served_with_warning(routes: LoadTrackingRoutes) -> None:
    routes.resolutions["sql"] = ResolvedAdapter("hash of sql", base_model_name="Owner/Other-Model\n")
    for path in ("/generate", "/generate_stream"):
        reply = routes.post(path, generate(adapter_id="sql"))
        assert reply.status == 200
        assert reply.headers["x-adapter-warning"].startswith("adapter 'sql' was trained on 'Owner/Other-Model")
    assert "this server's base model is 'base'" in routes.list_adapters()["sql"]["warning"]
    routes.resolutions["sql"] = ResolvedAdapter("hash of new", base_model_name="owner/BASE/")
    assert "x-adapter-warning" not in routes.use("sql").headers
    assert routes.list_adapters()["sql"]["warning"] is None


def test_ignored_fields_are_listed_in_header(routes: LoadTrackingRoutes) -> None:
    body = {**generate(typo=1, temperature=0.5), "foo": "bar", "bär\r\n": None}
    for path in ("/generate", "/generate_stream"):
        assert routes.post(path, body).headers["x-ignored-fields"] == "foo, b%C3%A4r%0D%0A, typo"
    many = {f"field{i}": i for i in range(1000)}
    reply = routes.post("/v1/completions", {"prompt": "hi", "user": "me", "a" * 5000: 1, **many})
    names = reply.headers["x-ignored-fields"].split(", ")
    assert names[0] == "a" * 256
    assert names[1:] == [f"field{i}" for i in range(15)]
    assert "x-ignored-fields" not in routes.post("/v1/completions", {"prompt": "hi", "user": "me"}).headers


def test_version_route_returns_package_version(routes: LoadTrackingRoutes) -> None:
    assert routes.get("/version").json == {"version": __version__}


# --- Merges -----------------------------------------------------------------------------------------------------------


def merge(routes: LoadTrackingRoutes, seed: int | None = None, **more: Any) -> tuple[Reply, messages.Resolve]:
    reply = routes.post("/generate", generate(merged_adapters={"ids": ["./sql", "json"], **more}, seed=seed))
    assert reply.status == 200, reply.message
    return reply, [each for each in routes.engine.sent if isinstance(each, messages.Resolve) and each.merge][-1]


def test_null_merge_fields_use_defaults(routes: LoadTrackingRoutes) -> None:
    _, expected = merge(routes)
    _, actual = merge(routes, weights=None, density=None, merge_strategy=None, majority_sign_method=None)
    assert actual.merge == expected.merge == Merge((1.0, 1.0))


def test_dare_merge_uses_request_seed(routes: LoadTrackingRoutes) -> None:
    """Without a seed, or if density is 1, requests share one merged adapter."""

    def seeds(**more: Any) -> list[int]:
        return [
            result.merge.seed for _, result in (merge(routes, seed, **more) for seed in (None, 0, 1, 2)) if result.merge
        ]

    for strategy in ("dare_linear", "DARE_ties"):
        assert seeds(merge_strategy=strategy, density=0.5) == [0, 0, 1, 2]
        assert seeds(merge_strategy=strategy, density=1) == seeds(merge_strategy=strategy) == [0] * 4
    assert seeds(merge_strategy="ties", density=0.5) == seeds() == [0] * 4
    assert len({Merge((1.0,), "dare_ties", 0.5, seed=seed).identity(["x"]) for seed in (0, 1, 2)}) == 3


def test_merge_name_is_equal_in_header_listing_and_metrics(routes: LoadTrackingRoutes) -> None:
    reply, _ = merge(routes)
    assert reply.headers["x-adapter-id"] == "sql,json"
    assert routes.list_adapters()["sql,json"]["hash"] == "merged"
    assert 'lorax_adapter_requests_total{adapter="sql,json"} 1.0' in routes.metrics.render_prometheus().decode()


def test_evicted_merge_is_not_listed(routes: LoadTrackingRoutes) -> None:
    merge(routes)
    routes.device.clear()
    assert "sql,json" not in routes.list_adapters()
    assert routes.service.adapter_index.names_of("merged") == ()
