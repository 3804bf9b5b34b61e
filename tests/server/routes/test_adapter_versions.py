"""Uploads of adapter weights, versions, rollback and weighted splits, with a scripted engine."""

import asyncio
import base64
import errno
import json
import os
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from lorax_server.config import EngineConfig, ModelConfig, SourceConfig
from lorax_server.engine.remote import messages
from lorax_server.errors import AdapterError, AdapterNotFoundError, ConfigError, InputError
from lorax_server.files.regular_file import read_stamp
from lorax_server.pooling import EMBED
from lorax_server.server import request_context
from lorax_server.server.access.model_names import AdapterKey
from lorax_server.server.adapter_versions import MAX_VERSIONS, STATE_FILE, AdapterVersions
from lorax_server.server.request_context import RequestContext
from lorax_server.server.routes.adapter_versions import _Upload
from lorax_server.server.routes.adapters import remove_versions
from lorax_server.types import AdapterState, ResolvedAdapter
from tests.server.fake_server import Reply, Routes, complete, generate

ADMIN = "admin"
CONFIG = {"peft_type": "LORA", "r": 4}
MAX_BYTES = 3 * 2**20


class UploadRoutes(Routes):
    """Routes with an upload folder, and an adapter folder `poet` with a chat template."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.poet, self.uploads = folder / "poet", folder / "uploads"
        self.poet.mkdir(exist_ok=True)
        (self.poet / "adapter_config.json").write_text(json.dumps(CONFIG))
        (self.poet / "chat_template.jinja").write_text("hi")
        super().__init__(folder=["poet", "json"], admin_key=ADMIN, **config)
        self.service.versions = AdapterVersions(self.service.model_names, self.uploads)
        self.service.versions.load()
        sources = SourceConfig(uploads=self.uploads, max_bytes=MAX_BYTES)
        engine = EngineConfig(ModelConfig(Path("nowhere")), sources=sources)
        object.__setattr__(self.service.config, "engine", engine)
        self.resolutions["poet"] = ResolvedAdapter("hash of poet", str(self.poet))
        self.running: Counter[str] = Counter()  # unfinished requests by identity

    def _handle_message(self, message: messages.ToEngine) -> None:
        match message:
            case messages.ListAdapters(query_id, identities):
                states = [
                    AdapterState(each, each, "on the device", 7, False, self.running[each], 1) for each in identities
                ]
                soon = asyncio.get_running_loop().call_soon
                soon(self.engine._settle, messages.AdaptersReply(query_id, states))
            case messages.Resolve(_, refs) if os.path.isdir(self.uploads / refs[0].name):
                content = (self.uploads / refs[0].name / "adapter_model.safetensors").read_bytes()
                known = AdapterError(f"adapter {refs[0].name!r}: bad weights") if content == b"bad" else None
                self.resolutions[refs[0].name] = known or ResolvedAdapter(
                    f"hash of {content.decode()}", str(self.uploads / refs[0].name)
                )
                super()._handle_message(message)
            case messages.MoveRequests(query_id):
                self.engine.sent.append(message)
                asyncio.get_running_loop().call_soon(self.engine._settle, messages.DoneReply(query_id))
            case _:
                super()._handle_message(message)

    def put(
        self, weights: bytes, name: str = "poet", query: str = "", key: str | None = ADMIN, **headers: str
    ) -> Reply:
        named = {each.replace("_", "-"): value for each, value in headers.items()}
        named |= {"authorization": f"Bearer {key}"} if key else {}
        return asyncio.run(self._send_raw("PUT", f"/v1/adapters/{name}/weights{query}", [weights], named))

    async def _send_raw(self, method: str, path: str, chunks: list[bytes | None], headers: dict[str, str]) -> Reply:
        """Send a body in chunks. None disconnects."""
        length = {"content-length": str(sum(len(each or b"") for each in chunks))}
        return await self._send(method, path, None, length | headers, chunks=chunks)

    def select(self, body: Any, name: str = "poet") -> Reply:
        return self.post(f"/v1/adapters/{name}/versions", body, ADMIN)

    def weights(self, name: str = "poet") -> dict[str, float]:
        listed = self.get(f"/v1/adapters/{name}/versions", ADMIN).json["data"]
        return {each["id"]: each["weight"] for each in listed}

    def used(self, name: str = "poet", **headers: str) -> tuple[str, str]:
        """Return the identity and the version that a request uses."""
        reply = self.send("POST", "/generate", generate(adapter_id=name), headers)
        assert reply.status == 200, reply.message
        return reply.headers["x-adapter-hash"].removeprefix("hash of "), reply.headers.get("x-adapter-version", "")

    def stored_folders(self) -> list[Path]:
        return [each for each in self.uploads.iterdir() if each.name != STATE_FILE]


@pytest.fixture
def routes(tmp_path: Path) -> UploadRoutes:
    return UploadRoutes(tmp_path)


def test_new_requests_use_the_new_version(routes: UploadRoutes) -> None:
    assert routes.used() == ("poet", "")
    reply = routes.put(b"two")
    assert reply.status == 200, reply.message
    assert [(each["id"], each["weight"]) for each in reply.json["data"]] == [("poet@v1", 0.0), ("poet@v2", 1.0)]
    assert routes.used() == ("two", "v2")
    routes.put(b"three")
    assert routes.used() == ("three", "v3")
    assert [routes.used(f"poet@v{number}") for number in (1, 2, 3)] == [("poet", "v1"), ("two", "v2"), ("three", "v3")]


def test_version_has_config_and_tokenizer_of_present_adapter(routes: UploadRoutes) -> None:
    stamp = read_stamp(routes.poet / "chat_template.jinja")
    files = ("chat_template.jinja",)
    routes.resolutions["poet"] = ResolvedAdapter("hash of poet", str(routes.poet), files, tokenizer_stamps=(stamp,))
    routes.put(b"two")
    routes.put(b"three", query="?config=" + quote('{"r": 8}'))
    contents = sorted((folder / "adapter_config.json").read_text() for folder in routes.stored_folders())
    assert contents == ['{"peft_type": "LORA", "r": 4}', '{"r": 8}']
    assert any((folder / "chat_template.jinja").exists() for folder in routes.stored_folders())


def test_new_name_needs_config(routes: UploadRoutes) -> None:
    routes.resolutions["novelist"] = AdapterNotFoundError("missing")
    reply = routes.put(b"one", "novelist")
    assert reply.status == 404
    assert "set `config`" in reply.message
    assert routes.put(b"one", "novelist", "?config=" + quote(json.dumps(CONFIG))).status == 200
    assert routes.used("novelist") == ("one", "v1")


@pytest.mark.parametrize("number", ["02", "0", "1" * 5000, "\uff12"])
def test_unusual_version_number_is_not_found(routes: UploadRoutes, number: str) -> None:
    routes.put(b"two")
    folder = routes.service.model_names.adapters["poet"].name
    routes.resolutions[f"{folder}@v{number}"] = AdapterNotFoundError("missing")
    requests = {"/generate": generate(adapter_id=f"poet@v{number}"), "/v1/completions": complete(f"poet@v{number}")}
    for path, body in requests.items():
        reply = routes.send("POST", path, body)
        assert reply.status == (424 if path == "/generate" else 404)
        assert f"adapter 'poet' has no version {f'v{number}'[:16]!r}; its versions are v1, v2" in reply.message
        assert folder not in reply.message


def test_rollback_and_weighted_split(routes: UploadRoutes) -> None:
    routes.put(b"two")
    assert routes.select({"version": 1}).status == 200
    assert routes.used() == ("poet", "v1")
    routes.select({"weights": {"v1": 3, "v2": 1}})
    assert routes.weights() == {"poet@v1": 0.75, "poet@v2": 0.25}
    used = Counter(routes.used(**{"x-request-id": f"request-{i}"})[1] for i in range(60))
    assert 30 < used["v1"] < 57
    assert used["v2"] == 60 - used["v1"]
    again = [routes.used(**{"x-request-id": "request-7"}) for _ in range(3)]
    assert len(set(again)) == 1


def test_upload_without_activation_changes_no_request(routes: UploadRoutes) -> None:
    routes.put(b"two", query="?activate=false")
    assert routes.used() == ("poet", "v1")
    assert routes.used("poet@v2") == ("two", "v2")


INVALID_WEIGHTS: list[Any] = [
    {},
    {"version": 1, "weights": {"v1": 1}},
    {"version": 9},
    {"weights": {}},
    {"weights": {"v1": 0}},
    {"weights": {"v1": -1}},
    {"weights": {"latest": 1}},
    {"weights": {"v02": 1}},
    {"weights": {"v1": 1, "v9": 1}},
]


@pytest.mark.parametrize("body", INVALID_WEIGHTS, ids=str)
def test_invalid_weights_are_rejected(routes: UploadRoutes, body: Any) -> None:
    routes.put(b"two")
    assert routes.select(body).status == 400
    assert routes.weights() == {"poet@v1": 0.0, "poet@v2": 1.0}


def test_adapter_without_versions_is_not_found(routes: UploadRoutes) -> None:
    assert routes.select({"version": 1}).status == 404
    assert routes.get("/v1/adapters/poet/versions", ADMIN).status == 404


# --- Rejected and interrupted uploads ---------------------------------------------------------------------------------


def digest_of(content: bytes) -> str:
    return f"sha-256=:{base64.b64encode(sha256(content).digest()).decode()}:"


def assert_unchanged(routes: UploadRoutes) -> None:
    assert routes.stored_folders() == []
    assert routes.used() == ("poet", "")
    assert routes.service.versions.num_uploads == 0


def test_matching_checksum_is_accepted(routes: UploadRoutes) -> None:
    assert routes.put(b"two", content_digest=f"sha-512=:AAAA:, {digest_of(b'two')}").status == 200


@pytest.mark.parametrize("digest", [digest_of(b"other"), "sha-256=:AAAA:", "md5=:AAAA:", "sha-256=???", ""])
def test_wrong_checksum_is_rejected(routes: UploadRoutes, digest: str) -> None:
    reply = routes.put(b"two", content_digest=digest)
    assert reply.status == 400
    assert "Content-Digest" in reply.message
    assert_unchanged(routes)


def test_invalid_weights_file_is_rejected_with_the_adapter_name(routes: UploadRoutes) -> None:
    reply = routes.put(b"bad")
    assert reply.status == 400
    assert reply.message == "adapter 'poet': bad weights"
    assert_unchanged(routes)


def test_interrupted_upload_leaves_no_files(routes: UploadRoutes) -> None:
    headers = {"authorization": f"Bearer {ADMIN}"}
    reply = asyncio.run(routes._send_raw("PUT", "/v1/adapters/poet/weights", [b"tw", None], headers))
    assert reply.status == 499
    assert_unchanged(routes)


@pytest.mark.parametrize("has_length", [True, False])
def test_too_large_upload_is_rejected(routes: UploadRoutes, has_length: bool) -> None:
    length = {} if has_length else {"content_length": ""}
    reply = routes.put(b"x" * (MAX_BYTES + 1), **length)
    assert reply.status == 413
    assert "--max-adapter-file-bytes" in reply.message
    assert_unchanged(routes)


def test_slow_upload_times_out(tmp_path: Path) -> None:
    routes = UploadRoutes(tmp_path, body_timeout_s=0.05)
    headers = {"authorization": f"Bearer {ADMIN}", "content-length": "9", "expect": "100-continue"}
    reply = asyncio.run(routes._send("PUT", "/v1/adapters/poet/weights", None, headers, chunks=[b"tw"], is_open=True))
    assert reply.status == 408
    assert_unchanged(routes)


def raise_disk_full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("operation", ["make_folder", "_write_state"])
def test_full_disk_changes_no_request(routes: UploadRoutes, monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    monkeypatch.setattr(AdapterVersions, operation, raise_disk_full)
    reply = routes.put(b"two", query="?running=move")
    assert reply.status == 503
    assert "No space left on device" in reply.message
    sent = routes.engine.sent
    assert not any(isinstance(each, messages.MoveRequests) for each in sent)
    loaded = [each.identity for each in sent if isinstance(each, messages.LoadAdapter)]
    assert loaded == [each.identity for each in sent if isinstance(each, messages.UnloadAdapter)]
    assert_unchanged(routes)


def test_failed_move_changes_no_version(routes: UploadRoutes, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise AdapterError("another vocabulary size")

    routes.put(b"two")
    stored = (routes.uploads / STATE_FILE).read_text()
    monkeypatch.setattr(routes.service.engine, "move", fail)
    reply = routes.put(b"three", query="?running=move")
    assert "another vocabulary size" in reply.message
    assert (routes.uploads / STATE_FILE).read_text() == stored
    assert routes.used() == ("two", "v2")
    assert len(routes.stored_folders()) == 1
    unloaded = [each.identity for each in routes.engine.sent if isinstance(each, messages.UnloadAdapter)]
    assert unloaded == ["hash of three"]


@pytest.mark.parametrize("name", ["base", "poet@v2", "a" * 511, "a" * 600])
def test_invalid_name_is_rejected(routes: UploadRoutes, name: str) -> None:
    assert routes.put(b"two", name, "?config={}").status == 400
    assert_unchanged(routes)


@pytest.mark.parametrize("name", ["./poet", "poet/"])
def test_other_spelling_of_a_local_name_is_rejected(name: str, routes: UploadRoutes) -> None:
    reply = routes.put(b"two", name)
    assert reply.status == 400
    assert "use the name 'poet'" in reply.message
    assert_unchanged(routes)


@pytest.mark.parametrize("query", ["?config=", "?config=[]", "?config={", "?running=stop", "?activate=perhaps"])
def test_invalid_query_is_rejected(routes: UploadRoutes, query: str) -> None:
    assert routes.put(b"two", query=query).status == 400
    assert_unchanged(routes)


def test_upload_needs_admin_key_before_its_body_is_read(routes: UploadRoutes) -> None:
    assert routes.put(b"two", key=None, expect="100-continue").status == 401
    assert routes.select({"version": 1}).status == 404
    assert routes.post("/v1/adapters/poet/versions", {"version": 1}).status == 401
    assert_unchanged(routes)


def test_disabled_uploads_are_rejected(routes: UploadRoutes) -> None:
    routes.service.versions.folder = None
    reply = routes.put(b"two")
    assert reply.status == 403
    assert "--adapter-uploads-dir" in reply.message


def test_replica_rejects_uploads(routes: UploadRoutes) -> None:
    object.__setattr__(routes.service.config, "replica_secret", "secret")
    assert "replicas" in routes.put(b"two").message


# --- Lifetime of versions ---------------------------------------------------------------------------------------------


def test_oldest_versions_are_removed_after_their_requests(routes: UploadRoutes) -> None:
    routes.running["hash of 2"] = 1
    for number in range(2, MAX_VERSIONS + 4):
        assert routes.put(str(number).encode()).status == 200
    assert list(routes.weights()) == [f"poet@v{number}" for number in range(4, MAX_VERSIONS + 4)]
    assert len(routes.stored_folders()) == MAX_VERSIONS + 1  # the second version has a request
    routes.running.clear()
    routes.put(b"last")
    assert len(routes.stored_folders()) == MAX_VERSIONS
    assert routes.poet.exists()


def test_last_request_of_a_removed_version_deletes_its_files(
    routes: UploadRoutes, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders, encode = list[int](), request_context.encode_prompt

    async def unload_and_encode(*arguments: Any) -> list[int]:
        await remove_versions(routes.service, "poet")
        folders.append(len(routes.stored_folders()))
        return await encode(*arguments)

    async def generate_and_wait() -> Reply:
        reply = await routes._send("POST", "/generate", generate(adapter_id="poet"), {})
        await asyncio.gather(*routes.service._deletions)
        return reply

    routes.put(b"two")
    monkeypatch.setattr(request_context, "encode_prompt", unload_and_encode)
    assert asyncio.run(generate_and_wait()).headers["x-adapter-version"] == "v2"
    assert folders == [1]  # the request was resolved, but not submitted
    assert routes.stored_folders() == []


def test_versions_with_weight_are_kept(routes: UploadRoutes) -> None:
    routes.put(b"two")
    routes.select({"weights": {"v1": 1, "v2": 1}})
    for number in range(3, MAX_VERSIONS + 5):
        routes.put(str(number).encode(), query="?activate=false")
    assert routes.weights()["poet@v1"] == routes.weights()["poet@v2"] == 0.5


def test_unload_removes_all_versions(routes: UploadRoutes) -> None:
    routes.put(b"two")
    assert routes.post("/v1/adapters/unload", {"adapter_id": "poet"}, ADMIN).status == 200
    assert routes.stored_folders() == []
    assert routes.used() == ("poet", "")  # the folder again
    assert json.loads((routes.uploads / STATE_FILE).read_text()) == {}


def test_load_does_not_replace_versions(routes: UploadRoutes) -> None:
    routes.put(b"two")
    for name in ("poet", "poet@v2", "poet@v3"):
        assert routes.post("/v1/adapters/load", {"adapter_id": "json", "name": name}, ADMIN).status == 409
        assert routes.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": "json"}, ADMIN).status == 409
    assert routes.used() == routes.used("poet@v2") == ("two", "v2")


def test_upload_does_not_replace_another_adapter(routes: UploadRoutes) -> None:
    assert routes.post("/v1/adapters/load", {"adapter_id": "json", "name": "poet@v2"}, ADMIN).status == 200
    reply = routes.put(b"two")
    assert reply.status == 409
    assert "'poet@v2'" in reply.message
    assert_unchanged(routes)
    assert routes.used("poet@v2") == ("json", "")


def test_upload_during_a_load_under_its_name(routes: UploadRoutes) -> None:
    async def load() -> int:
        headers = {"authorization": f"Bearer {ADMIN}"}
        body = {"adapter_id": "json", "name": "poet@v2"}
        await routes.service.versions.lock.acquire()
        loading = asyncio.create_task(routes._send("POST", "/v1/adapters/load", body, headers))
        while not any(isinstance(each, messages.LoadAdapter) for each in routes.engine.sent):
            await asyncio.sleep(0)
        key = AdapterKey("local", "a" * 32)
        await routes.service.versions.apply("poet", routes.service.versions.add("poet", key, None, activate=True))
        routes.service.versions.lock.release()
        return (await loading).status

    assert asyncio.run(load()) == 409


def test_versions_survive_a_restart(routes: UploadRoutes, tmp_path: Path) -> None:
    routes.put(b"two")
    routes.put(b"three")
    routes.select({"weights": {"v2": 1, "v3": 3}})
    (routes.uploads / ("a" * 32)).mkdir()  # an interrupted upload
    (routes.uploads / "notes").mkdir()
    restarted = UploadRoutes(tmp_path)
    assert restarted.weights() == {"poet@v1": 0.0, "poet@v2": 0.25, "poet@v3": 0.75}
    assert restarted.used("poet@v2") == ("two", "v2")
    assert len(restarted.stored_folders()) == 3
    assert (routes.uploads / "notes").exists()


def test_damaged_state_is_a_config_error(routes: UploadRoutes) -> None:
    for content in ('{"poet": ', "[]"):
        (routes.uploads / STATE_FILE).write_text(content)
        with pytest.raises(ConfigError, match=STATE_FILE):
            AdapterVersions(routes.service.model_names, routes.uploads).load()


def test_invalid_entry_is_skipped_and_keeps_its_files(routes: UploadRoutes, tmp_path: Path) -> None:
    routes.put(b"two")
    stored = json.loads((routes.uploads / STATE_FILE).read_text())
    skipped = {"a" * 511: stored["poet"], "json": 1, "novelist": stored["poet"] | {"weights": {}}}
    (routes.uploads / STATE_FILE).write_text(json.dumps(skipped | stored))
    (routes.uploads / ("a" * 32)).mkdir()
    restarted = UploadRoutes(tmp_path)
    assert restarted.used() == ("two", "v2")
    assert len(restarted.stored_folders()) == 2
    restarted.put(b"three")
    assert json.loads((routes.uploads / STATE_FILE).read_text()).items() >= skipped.items()


def test_too_many_names_change_no_version(routes: UploadRoutes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorax_server.server.access.model_names.MAX_ALIASES", 2)
    reply = routes.put(b"two")  # needs the names poet, poet@v1 and poet@v2
    assert reply.status == 400
    assert "limit of 2 adapter names" in reply.message
    assert_unchanged(routes)
    assert not (routes.uploads / STATE_FILE).exists()


def test_concurrent_uploads_of_one_name_get_different_versions(routes: UploadRoutes) -> None:
    async def upload_both() -> list[Reply]:
        headers = {"authorization": f"Bearer {ADMIN}"}
        path = "/v1/adapters/poet/weights"
        return await asyncio.gather(*(routes._send_raw("PUT", path, [each], headers) for each in (b"two", b"three")))

    assert [reply.status for reply in asyncio.run(upload_both())] == [200, 200]
    assert {routes.used(f"poet@v{number}")[0] for number in (2, 3)} == {"two", "three"}
    assert routes.used() == routes.used("poet@v3")


def test_config_of_a_version_that_is_removed_during_an_upload(
    routes: UploadRoutes, monkeypatch: pytest.MonkeyPatch
) -> None:
    routes.put(b"two")
    resolve = routes.service.engine.resolve

    async def remove_and_resolve(*arguments: Any) -> ResolvedAdapter:
        await remove_versions(routes.service, "poet")
        return await resolve(*arguments)

    monkeypatch.setattr(routes.service.engine, "resolve", remove_and_resolve)
    reply = routes.put(b"three")
    assert reply.status == 200, reply.message
    assert len(routes.stored_folders()) == 1


def test_failed_upload_deletes_the_removed_version_that_it_kept(
    routes: UploadRoutes, monkeypatch: pytest.MonkeyPatch
) -> None:
    routes.put(b"two")

    async def remove_and_fail(*_: Any) -> None:
        await remove_versions(routes.service, "poet")
        await routes.service.delete_retired()
        assert len(routes.stored_folders()) == 2
        raise InputError("wrong checksum")

    monkeypatch.setattr(_Upload, "_receive", remove_and_fail)
    assert routes.put(b"three").status == 400
    assert routes.stored_folders() == []
    assert routes.service.versions.retired == []


def test_unload_during_an_upload(routes: UploadRoutes, monkeypatch: pytest.MonkeyPatch) -> None:
    routes.put(b"two")
    receive = _Upload._receive

    async def unload_and_receive(upload: _Upload, request: Any, folder: Path) -> None:
        await remove_versions(routes.service, "poet")
        await receive(upload, request, folder)

    monkeypatch.setattr(_Upload, "_receive", unload_and_receive)
    assert routes.put(b"three").status == 200
    assert routes.weights() == {"poet@v1": 1.0}
    assert routes.used("poet@v1") == ("three", "v1")
    assert len(routes.stored_folders()) == 1


# --- Permissions, names and metrics -----------------------------------------------------------------------------------


def test_key_for_a_name_may_use_its_versions(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[keys.one]\nkey = "one"\nadapters = ["poet"]\n[keys.two]\nkey = "two"\nadapters = ["json"]\n')
    keys.chmod(0o600)
    routes = UploadRoutes(tmp_path, keys_file=keys)
    routes.put(b"two")
    assert routes.post("/v1/completions", complete("poet@v1"), "one").status == 200
    assert routes.post("/v1/completions", complete("poet@v1"), "two").status == 403
    listed = [each["id"] for each in routes.get("/v1/models", "one").json["data"]]
    assert {"poet", "poet@v1", "poet@v2"} <= set(listed)
    assert "poet@v2" not in routes.get("/v1/models", "two").body.decode()
    assert routes.get("/v1/adapters/poet/versions", "two").status == 404


def test_move_names_the_running_requests(routes: UploadRoutes) -> None:
    routes.put(b"two", query="?running=move")
    (message,) = (each for each in routes.engine.sent if isinstance(each, messages.MoveRequests))
    assert message.identity == "hash of two"
    assert message.request_ids == ()


MOVES: list[tuple[dict[str, Any], bool]] = [
    ({"adapter_id": "poet"}, True),
    ({"adapter_ids": ["poet"]}, True),
    ({"adapter_id": "poet", "adapter_source": "local"}, False),
    ({"adapter_id": "poet@v2"}, False),
    ({"adapter_id": "json"}, False),
    ({"adapter_ids": ["poet", "json"]}, False),
    ({"adapter_ids": ["", "poet"]}, False),
    ({"merged_adapters": {"ids": ["poet", "json"], "weights": [1, 1]}}, False),
    ({}, False),
]


@pytest.mark.parametrize(("parameters", "moves"), MOVES, ids=str)
def test_move_includes_only_requests_for_the_name(
    routes: UploadRoutes, monkeypatch: pytest.MonkeyPatch, parameters: dict[str, Any], moves: bool
) -> None:
    found, build_response = list[list[RequestContext]](), RequestContext.build_response

    async def find(context: RequestContext, make: Any) -> Any:
        upload = _Upload(routes.service, context.key, "poet")
        found.append(upload._find_running())
        monkeypatch.setattr(routes.service, "task", EMBED)
        assert upload._find_running() == []
        return await build_response(context, make)

    routes.put(b"two")
    monkeypatch.setattr(RequestContext, "build_response", find)
    reply = routes.send("POST", "/generate", generate(**parameters))
    assert reply.status == 200, reply.message
    assert [bool(each) for each in found] == [moves]


def test_metrics_show_versions_and_update_times(routes: UploadRoutes) -> None:
    routes.put(b"two")
    routes.put(b"bad")
    routes.used()
    metrics = routes.service.metrics.render_prometheus().decode()
    assert 'lorax_adapter_version_weight{adapter="poet",version="v2"} 1.0' in metrics
    assert 'lorax_adapter_version_requests_total{adapter="poet",version="v2"} 1.0' in metrics
    assert 'lorax_adapter_updates_total{result="updated"} 1.0' in metrics
    assert 'lorax_adapter_updates_total{result="rejected"} 1.0' in metrics
    assert "lorax_adapter_update_duration_count 1.0" in metrics


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/adapters"),
        ("GET", "/v1/adapters/poet/versions"),
        ("POST", "/v1/adapters/poet/versions"),
        ("POST", "/v1/adapters/load"),
        ("POST", "/v1/adapters/unload"),
    ],
)
def test_unknown_query_parameters_are_rejected(method: str, path: str, routes: UploadRoutes) -> None:
    body = None if method == "GET" else {"version": 1, "adapter_id": "poet"}
    reply = routes.send(method, f"{path}?runing=move", body, {"authorization": f"Bearer {ADMIN}"})
    assert reply.status == 400
    assert reply.json["error"]["param"] == "runing"


def test_upload_with_unknown_query_parameter_is_rejected(routes: UploadRoutes) -> None:
    reply = routes.put(b"two", query="?runing=move")
    assert (reply.status, reply.json["error"]["param"]) == (400, "runing")
    assert "`runing` is not a query parameter of this route" in reply.message
    assert routes.put(b"two", query="?running=finish&activate=true").status == 200


def test_error_for_unknown_version_names_the_field(routes: UploadRoutes) -> None:
    routes.put(b"two")
    for body, field in (({"version": 9}, "version"), ({"weights": {"v9": 1}}, "weights")):
        reply = routes.select(body)
        assert (reply.status, reply.json["error"]["param"]) == (400, field)
        assert "has no version 'v9'; its versions are v1, v2" in reply.message


def test_models_route_does_not_show_upload_folders(routes: UploadRoutes) -> None:
    routes.put(b"two")
    roots = {each["id"]: each["root"] for each in routes.get("/v1/models", ADMIN).json["data"]}
    assert (roots["poet"], roots["poet@v1"], roots["poet@v2"]) == ("poet@v2", "poet", "poet@v2")
