import errno
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import boto3
import pytest
from huggingface_hub import close_session, constants, hf_hub_download
from moto import mock_aws

from lorax_server.adapters.sources import s3
from lorax_server.adapters.sources.download import LOCK_SUFFIX
from lorax_server.cli import download
from lorax_server.cli.download import find_model, select_model_files
from lorax_server.errors import ConfigError, LoraxError, SourceError, WeightsError
from lorax_server.model_types import check_model_config
from tests.adapters.sources.hub_server import HubServer, Repo
from tests.adapters.sources.server import Fault, Reply, running

NAME = "owner/model"
MODEL = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights" * 3000,  # large enough for LFS on the hub
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


@pytest.fixture(autouse=True)
def no_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with running(HubServer()) as server:
        server.repos[NAME] = Repo(MODEL | NOISE)
        yield server


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def find(model_id: str, *arguments: Any, **options: Any) -> Path:
    """Find a model with the check that the command line uses."""
    return find_model(model_id, *arguments, check=partial(check_model_config, model_id=model_id), **options)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# --- folders


def test_local_folder_is_used(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "config.json").write_bytes(MODEL["config.json"])
    assert find(str(tmp_path), None, "hub", cache) == tmp_path
    assert find(str(tmp_path), None, "s3", cache) == tmp_path
    assert not cache.exists()


def test_folder_without_config_is_rejected(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        find(str(tmp_path), None, "hub", cache)


@pytest.mark.parametrize("name", ["/no/such/model", "./nothing", "~/nothing-here", "../no-such-model-folder"])
def test_missing_path_is_not_requested_from_hub(name: str, cache: Path) -> None:
    with pytest.raises(ConfigError, match="no such file or folder"):
        find(name, None, "hub", cache)


# --- the hub


def test_unsupported_model_is_rejected_before_weights_download(hub: HubServer, cache: Path) -> None:
    hub.repos[NAME] = Repo(
        MODEL | {"config.json": b'{"model_type": "llama", "quantization_config": {"quant_method": "aqlm"}}'}
    )
    with pytest.raises(ConfigError, match="the quantization method 'aqlm' is not supported"):
        find(NAME, None, "hub", cache, endpoint=hub.url)
    assert {path.name for path in cache.rglob("snapshots/*/*")} == {"config.json"}


def test_unneeded_files_are_not_downloaded(hub: HubServer, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = find(NAME, None, "hub", cache, endpoint=hub.url)
    assert capsys.readouterr() == ("", ""), "bars are for terminals"
    assert contents(folder) == MODEL | {"[1].json": NOISE["[1].json"]}
    assert not [request for request in hub.seen if request.file.endswith((".bin", ".py"))]


def test_model_is_downloaded_once(hub: HubServer, cache: Path) -> None:
    folder = find(NAME, None, "hub", cache, endpoint=hub.url)
    hub.seen.clear()
    assert find(NAME, None, "hub", cache, endpoint=hub.url) == folder
    assert not hub.requests("model.safetensors")


def test_revision_is_downloaded(hub: HubServer, cache: Path) -> None:
    hub.repos[NAME].branches["older"] = MODEL | {"tokenizer.json": b"[]"}
    folder = find(NAME, "older", "hub", cache, endpoint=hub.url)
    assert (folder / "tokenizer.json").read_bytes() == b"[]"


def test_private_model_requires_token(hub: HubServer, cache: Path) -> None:
    hub.repos[NAME].token = "hf_right"
    with pytest.raises(ConfigError, match="HF_TOKEN") as refused:
        find(NAME, None, "hub", cache, "hf_wrong", hub.url)
    assert "hf_wrong" not in str(refused.value)
    assert contents(find(NAME, None, "hub", cache, "hf_right", hub.url)).keys() >= MODEL.keys()


def test_stored_user_token_is_sent(hub: HubServer, cache: Path, tmp_path: Path) -> None:
    hub.repos[NAME].token = "hf_right"
    (tmp_path / "token").write_text("hf_right")  # written by `hf auth login`
    assert contents(find(NAME, None, "hub", cache, endpoint=hub.url)).keys() >= MODEL.keys()


def test_offline_model_is_read_from_cache(hub: HubServer, cache: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"model 'owner/model': not found in the cache, and the server is in offline mode$"
    ):
        find(NAME, None, "hub", cache, endpoint=hub.url, offline=True)
    assert not hub.seen
    folder = find(NAME, None, "hub", cache, endpoint=hub.url)
    hub.seen.clear()
    assert find(NAME, None, "hub", cache, endpoint=hub.url, offline=True) == folder
    assert not hub.seen


def test_cached_model_is_used_if_hub_is_down(hub: HubServer, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = find(NAME, None, "hub", cache, endpoint=hub.url)
    nobody = "http://127.0.0.1:9"
    assert find(NAME, None, "hub", cache, endpoint=nobody) == folder
    assert "the hub cannot be reached (ConnectError); try again later; using the version in the cache" in caplog.text
    with pytest.raises(SourceError, match="the hub cannot be reached"):
        find("owner/other", None, "hub", cache, endpoint=nobody)


def test_interrupted_download_is_resumed(hub: HubServer, cache: Path) -> None:
    hub.faults["model.safetensors"] = Fault(cut_after=100)
    with pytest.raises(SourceError, match="model 'owner/model': the hub cannot be reached"):
        find(NAME, None, "hub", cache, endpoint=hub.url)
    with pytest.raises(ConfigError, match="its weights are not found in the cache"):
        find(NAME, None, "hub", cache, endpoint=hub.url, offline=True)
    hub.faults.clear()
    hub.seen.clear()
    folder = find(NAME, None, "hub", cache, endpoint=hub.url)
    assert contents(folder).items() >= MODEL.items()
    assert [request.headers.get("range") for request in hub.requests("model.safetensors")] == ["bytes=500-"]


def test_damaged_model_is_rejected(hub: HubServer, cache: Path) -> None:
    hub.faults["model.safetensors"] = Fault(body=bytes(len(MODEL["model.safetensors"])))
    with pytest.raises(SourceError, match=r"model 'owner/model': model\.safetensors: the size or checksum is wrong"):
        find(NAME, None, "hub", cache, endpoint=hub.url)


def test_huggingface_hub_cache_is_reused(hub: HubServer, cache: Path) -> None:
    for file in MODEL:
        hf_hub_download(NAME, file, cache_dir=cache, endpoint=hub.url, token=False)
    close_session()
    hub.repos[NAME].files = MODEL
    hub.seen.clear()
    assert contents(find(NAME, None, "hub", cache, endpoint=hub.url, offline=True)) == MODEL
    assert not hub.seen


@pytest.mark.parametrize(
    ("name", "revision", "kind", "message"),
    [
        ("owner/missing", None, ConfigError, r"no such repository.*no local folder.*HF_TOKEN"),
        (NAME, "missing", ConfigError, "model 'owner/model@missing': the hub has no such repository, revision"),
        ("owner/gated", None, ConfigError, "may be private, gated .*require access"),
        ("a/b/c", None, ConfigError, "hub names have the form owner/name"),
        ("owner/.. ", None, ConfigError, "hub names have the form owner/name"),
        ("owner/pickled", None, WeightsError, "only pickled weights.*save_pretrained"),
        ("owner/empty", None, WeightsError, "no \\*.safetensors"),
        ("owner/nothing", None, ConfigError, "no config.json"),
        ("owner/broken", None, SourceError, "status 500; try again later"),
        ("owner/refused", None, ConfigError, r"the hub denies access \(403\)"),
    ],
)
def test_download_errors_are_one_line(
    hub: HubServer, cache: Path, name: str, revision: str | None, kind: type[LoraxError], message: str
) -> None:
    hub.repos["owner/gated"] = Repo(MODEL, token="hf_right", gated=True)
    hub.repos["owner/pickled"] = Repo({"config.json": b"{}", "pytorch_model.bin": b""})
    hub.repos["owner/empty"] = Repo({"README.md": b""})
    hub.repos["owner/nothing"] = Repo({"model.safetensors": b"weights"})
    if name in ("owner/broken", "owner/refused"):
        hub.faults["info"] = Fault(reply=Reply(500 if name == "owner/broken" else 403))
    with pytest.raises(kind, match=message) as error:
        find(name, revision, "hub", cache, endpoint=hub.url)
    assert "\n" not in str(error.value)


def test_unwritable_cache_is_reported(hub: HubServer, cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(SourceError, match=r"cannot store it .*--huggingface-hub-cache chooses the folder"):
        find(NAME, None, "hub", cache, endpoint=hub.url)


def test_additional_templates_are_downloaded() -> None:
    names = ["model-1.safetensors", "additional_chat_templates/tool.jinja", "onnx/model.safetensors", "x/config.json"]
    assert select_model_files("m", names) == names[:2]


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
    """Share one client, because creating it is slow."""
    monkeypatch.setattr(s3, "_make_client", lambda *_: bucket)


@pytest.mark.parametrize("name", ["s3://models/team/base", "models/team/base/"])
def test_s3_model_is_downloaded(bucket: Any, cache: Path, name: str) -> None:
    folder = find(name, None, "s3", cache)
    assert contents(folder) == MODEL | {"[1].json": NOISE["[1].json"]}
    files = {file: (folder / file).stat().st_mtime_ns for file in MODEL}
    assert find(name, None, "s3", cache) == folder
    assert {file: (folder / file).stat().st_mtime_ns for file in MODEL} == files


@pytest.mark.usefixtures("one_client")
def test_replaced_s3_files_use_new_folder(bucket: Any, cache: Path) -> None:
    folder = find("s3://models/team/changing", None, "s3", cache)
    bucket.put_object(Bucket="models", Key="team/changing/tokenizer.json", Body=b"[]")
    newer = find("s3://models/team/changing", None, "s3", cache)
    assert newer != folder
    assert (newer / "tokenizer.json").read_bytes() == b"[]"
    assert (folder / "tokenizer.json").read_bytes() == b"{}"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("s3://models/team/ba", "no such folder"),
        ("s3://none/team/base", "no such folder.* Check the bucket name"),
        ("s3://models", "must have the form s3://bucket/path"),
        ("s3://", "must have the form s3://bucket/path"),
    ],
)
@pytest.mark.usefixtures("one_client")
def test_missing_s3_model_is_reported(cache: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find(name, None, "s3", cache)


@pytest.mark.usefixtures("one_client")
def test_partial_s3_file_is_removed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", fail)
    monkeypatch.setattr(download, "NUM_THREADS", 1)
    with pytest.raises(SourceError, match="full"):
        find("s3://models/team/base", None, "s3", cache)
    assert not [path for path in cache.rglob("*") if path.is_file() and path.suffix != LOCK_SUFFIX]
