import errno
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from huggingface_hub import close_session, constants
from moto import mock_aws

from lorax_server.adapters.sources import s3
from lorax_server.adapters.sources.download import LOCK
from lorax_server.cli import download
from lorax_server.cli.download import choose_files, find_model
from lorax_server.errors import ConfigError, LoraxError, SourceError, WeightsError
from tests.adapters.sources.hub_server import HubServer, Repo, describe, may_see, refusal
from tests.adapters.sources.server import Fault, Reply, Request, running

NAME = "owner/model"
MODEL = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights" * 3000,  # large enough to be kept apart, as the hub does
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "merges.txt": b"a b",
}
NOISE = {
    "pytorch_model.bin": b"a pickle",
    "consolidated.safetensors": b"the same weights again",
    "training_args.bin": b"a pickle",
    "README.md": b"read me",
    "model.py": b"code",
    "[1].json": b"a name that is also a pattern",
}


class ModelHub(HubServer):
    """A hub that also has the list of files that `snapshot_download` asks for."""

    def answer(self, request: Request) -> Reply:
        if found := re.fullmatch(r"/api/models/(.+)/tree/(.+)", request.path.partition("?")[0]):
            repo, files = self.repos.get(found[1]), self.files_of(found[1], found[2])
            if repo is None or files is None or not may_see(request, repo):
                return refusal(repo, files)
            listed = [list_file(*item) for item in files.items()]
            return Reply(headers={"Content-Type": "application/json"}, body=json.dumps(listed).encode())
        return super().answer(request)


def list_file(file: str, content: bytes) -> dict[str, Any]:
    described = describe(file, content)
    listed = {"type": "file", "path": file, "size": described["size"], "oid": described["blobId"]}
    if large := described.get("lfs"):
        listed["lfs"] = {"oid": large["sha256"], "size": large["size"], "pointerSize": large["pointerSize"]}
    return listed


@pytest.fixture(autouse=True)
def quiet_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep requests from the real hub, and close connections after each test."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield
    close_session()


@pytest.fixture
def hub() -> Iterator[ModelHub]:
    with running(ModelHub()) as server:
        server.repos[NAME] = Repo(MODEL | NOISE)
        yield server


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def contents(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.iterdir() if path.suffix != LOCK and path.name != ".used"]
    return {path.name: path.read_bytes() for path in paths}


# --- folders


def test_a_folder_is_used_as_it_is(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert find_model(str(tmp_path), None, "hub", cache) == tmp_path
    assert find_model(str(tmp_path), None, "s3", cache) == tmp_path
    assert not cache.exists()


def test_a_folder_of_something_else(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json in it"):
        find_model(str(tmp_path), None, "hub", cache)


@pytest.mark.parametrize("name", ["/no/such/model", "./nothing", "~/nothing-here", "../nothing"])
def test_a_path_is_never_asked_of_a_hub(name: str, cache: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        find_model(name, None, "hub", cache)


# --- the hub


def test_a_model_is_fetched_without_what_is_not_needed(
    hub: ModelHub, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = find_model(NAME, None, "hub", cache, endpoint=hub.url)
    assert capsys.readouterr() == ("", ""), "bars are for terminals"
    assert contents(folder) == MODEL | {"[1].json": NOISE["[1].json"]}
    assert not [request for request in hub.seen if request.file.endswith((".bin", ".py"))]


def test_it_is_fetched_once(hub: ModelHub, cache: Path) -> None:
    folder = find_model(NAME, None, "hub", cache, endpoint=hub.url)
    hub.seen.clear()
    assert find_model(NAME, None, "hub", cache, endpoint=hub.url) == folder
    assert not hub.requests("model.safetensors")


def test_a_revision(hub: ModelHub, cache: Path) -> None:
    hub.repos[NAME].branches["older"] = MODEL | {"tokenizer.json": b"[]"}
    folder = find_model(NAME, "older", "hub", cache, endpoint=hub.url)
    assert (folder / "tokenizer.json").read_bytes() == b"[]"


def test_a_private_model_needs_its_token(hub: ModelHub, cache: Path) -> None:
    hub.repos[NAME].token = "hf_right"
    with pytest.raises(ConfigError, match="HF_TOKEN") as refused:
        find_model(NAME, None, "hub", cache, "hf_wrong", hub.url)
    assert "hf_wrong" not in str(refused.value)
    assert contents(find_model(NAME, None, "hub", cache, "hf_right", hub.url)).keys() >= MODEL.keys()


def test_offline_a_model_comes_from_the_cache(hub: ModelHub, cache: Path) -> None:
    with pytest.raises(SourceError, match="not in the cache"):
        find_model(NAME, None, "hub", cache, endpoint=hub.url, offline=True)
    assert not hub.seen
    folder = find_model(NAME, None, "hub", cache, endpoint=hub.url)
    hub.seen.clear()
    assert find_model(NAME, None, "hub", cache, endpoint=hub.url, offline=True) == folder
    assert not hub.seen


def test_a_hub_that_is_down_is_said_and_done_without(
    hub: ModelHub, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = find_model(NAME, None, "hub", cache, endpoint=hub.url)
    nobody = "http://127.0.0.1:9"
    assert find_model(NAME, None, "hub", cache, endpoint=nobody) == folder
    assert "cannot be reached (ConnectError); using what is here" in caplog.text
    with pytest.raises(SourceError, match="not in the cache, and the hub cannot be reached"):
        find_model("owner/other", None, "hub", cache, endpoint=nobody)


def test_an_interrupted_model_is_not_taken_for_whole(
    hub: ModelHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)  # huggingface_hub tries again, a second later
    hub.faults["model.safetensors"] = Fault(cut_after=100)
    with pytest.raises(LoraxError, match="model 'owner/model'"):
        find_model(NAME, None, "hub", cache, endpoint=hub.url)
    with pytest.raises(SourceError):
        find_model(NAME, None, "hub", cache, endpoint=hub.url, offline=True)
    hub.faults.clear()
    folder = find_model(NAME, None, "hub", cache, endpoint=hub.url)
    assert (folder / "model.safetensors").read_bytes() == MODEL["model.safetensors"]


@pytest.mark.parametrize(
    ("name", "revision", "kind", "message"),
    [
        ("owner/missing", None, ConfigError, "the hub has no such model, or it is private"),
        (NAME, "missing", ConfigError, "no revision 'missing'"),
        ("owner/gated", None, ConfigError, "its owner has to allow you"),
        ("a/b/c", None, ConfigError, "names look like owner/name"),
        ("owner/.. ", None, ConfigError, "names look like owner/name"),
        ("owner/pickled", None, WeightsError, "pickled only.*save_pretrained"),
        ("owner/empty", None, WeightsError, "no weights"),
        ("owner/nothing", None, ConfigError, "no config.json"),
        ("owner/broken", None, SourceError, "status 500; try again later"),
        ("owner/refused", None, ConfigError, r"access is refused \(403\); check the name and the credentials"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    hub: ModelHub, cache: Path, name: str, revision: str | None, kind: type[LoraxError], message: str
) -> None:
    hub.repos["owner/gated"] = Repo(MODEL, token="hf_right", gated=True)
    hub.repos["owner/pickled"] = Repo({"config.json": b"{}", "pytorch_model.bin": b""})
    hub.repos["owner/empty"] = Repo({"README.md": b""})
    hub.repos["owner/nothing"] = Repo({"model.safetensors": b"weights"})
    if name in ("owner/broken", "owner/refused"):
        hub.faults["info"] = Fault(reply=Reply(500 if name == "owner/broken" else 403))
    with pytest.raises(kind, match=message) as error:
        find_model(name, revision, "hub", cache, endpoint=hub.url)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("code", "message"), [(errno.ENOSPC, "the disk is full; make room"), (errno.EACCES, "Permission denied")]
)
def test_a_disk_that_takes_nothing(
    hub: ModelHub, cache: Path, monkeypatch: pytest.MonkeyPatch, code: int, message: str
) -> None:
    def fail(*_: object, **__: object) -> str:
        raise OSError(code, "said by the system")

    monkeypatch.setattr(download, "snapshot_download", fail)
    with pytest.raises(SourceError, match=message):
        find_model(NAME, None, "hub", cache, endpoint=hub.url)


def test_other_templates_are_kept_and_other_folders_are_not() -> None:
    names = ["model-1.safetensors", "additional_chat_templates/tool.jinja", "onnx/model.safetensors", "x/config.json"]
    assert choose_files("m", names) == names[:2]


# --- a bucket


@pytest.fixture(scope="module")
def bucket() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch, mock_aws():
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
            patch.setenv(name, "us-east-1")
        client = boto3.Session().client("s3")
        client.create_bucket(Bucket="models")
        for folder in ("team/base", "team/changing"):
            for file, content in (MODEL | NOISE).items():
                client.put_object(Bucket="models", Key=f"{folder}/{file}", Body=content)
        client.put_object(Bucket="models", Key="team/base-2/config.json", Body=b"of a neighbour")
        yield client
        client.close()


@pytest.fixture
def one_client(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Share one client: making another takes long."""
    monkeypatch.setattr(s3, "_connect", lambda *_: bucket)


@pytest.mark.parametrize("name", ["s3://models/team/base", "models/team/base/"])
def test_a_model_of_a_bucket(bucket: Any, cache: Path, name: str) -> None:
    folder = find_model(name, None, "s3", cache)
    assert contents(folder) == MODEL | {"[1].json": NOISE["[1].json"]}
    files = {file: (folder / file).stat().st_mtime_ns for file in MODEL}
    assert find_model(name, None, "s3", cache) == folder
    assert {file: (folder / file).stat().st_mtime_ns for file in MODEL} == files


@pytest.mark.usefixtures("one_client")
def test_files_that_were_replaced_go_elsewhere(bucket: Any, cache: Path) -> None:
    folder = find_model("s3://models/team/changing", None, "s3", cache)
    bucket.put_object(Bucket="models", Key="team/changing/tokenizer.json", Body=b"[]")
    newer = find_model("s3://models/team/changing", None, "s3", cache)
    assert newer != folder
    assert (newer / "tokenizer.json").read_bytes() == b"[]"
    assert (folder / "tokenizer.json").read_bytes() == b"{}"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("s3://models/team/ba", "no such folder"),
        ("s3://none/team/base", "no such bucket"),
        ("s3://models", "named as s3://bucket/path"),
        ("s3://", "named as s3://bucket/path"),
    ],
)
@pytest.mark.usefixtures("one_client")
def test_what_a_bucket_has_not(cache: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_model(name, None, "s3", cache)


@pytest.mark.usefixtures("one_client")
def test_half_a_file_is_not_left_behind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(SourceError, match="disk is full"):
        find_model("s3://models/team/base", None, "s3", cache)
    assert not [path for path in cache.rglob("*") if path.is_file() and path.suffix != LOCK and path.name != ".used"]
