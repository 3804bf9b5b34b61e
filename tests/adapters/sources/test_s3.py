import hashlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
from botocore.config import Config
from moto.server import ThreadedMotoServer

from lorax_server.adapters.sources.hub import HubSource
from lorax_server.adapters.sources.local import LocalSource
from lorax_server.adapters.sources.s3 import S3Source
from lorax_server.adapters.sources.source import Source
from lorax_server.errors import AdapterAccessError, AdapterError, AdapterNotFoundError, ConfigError, SourceError
from lorax_server.files.regular_file import read_stamp
from lorax_server.files.tokenizer_folder import TokenizerFolder
from lorax_server.text.tokenizer import _read_templates
from tests.adapters.sources.adapters import (
    ADAPTER,
    UNRELATED_FILES,
    WEIGHTS,
    accept,
    check_contents,
    fetch,
    make_sources,
)
from tests.adapters.sources.child import run_child, run_children
from tests.adapters.sources.hub_server import HubServer, Repo
from tests.adapters.sources.s3_server import S3Proxy
from tests.adapters.sources.server import Fault, Reply, Request, running
from tests.grids import slow_except

BUCKET = "bucket"
NAME = "team/adapter"
CONFIG = "adapter_config.json"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "a-secret-key",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}


@pytest.fixture(autouse=True, scope="module")
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def moto() -> Iterator[tuple[str, int]]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()
    server.stop()


@pytest.fixture(scope="module")
def legacy_client(moto: tuple[str, int]) -> Iterator[Any]:
    """Return a client that fills the bucket without adding checksums, like older clients."""
    config = Config(request_checksum_calculation="when_required")
    with closing(boto3.Session().client("s3", endpoint_url="http://{}:{}".format(*moto), config=config)) as client:
        yield client


@pytest.fixture
def admin(moto: tuple[str, int], legacy_client: Any) -> Any:
    """Reset the server to one bucket with one adapter, and return a client for it."""
    with closing(HTTPConnection(*moto)) as connection:
        connection.request("POST", "/moto-api/reset")
        assert connection.getresponse().status == 200
    legacy_client.create_bucket(Bucket=BUCKET)
    put(legacy_client, NAME, ADAPTER | UNRELATED_FILES)
    return legacy_client


def put(admin: Any, name: str, files: dict[str, bytes], **options: str) -> None:
    for file, content in files.items():
        admin.put_object(Bucket=BUCKET, Key=f"{name}/{file}", Body=content, **options)


@pytest.fixture(scope="module")
def one_proxy(moto: tuple[str, int]) -> Iterator[S3Proxy]:
    with running(S3Proxy(*moto)) as server:
        yield server


@pytest.fixture
def proxy(one_proxy: S3Proxy, admin: Any) -> S3Proxy:
    one_proxy.reset()
    return one_proxy


@pytest.fixture(scope="module")
def client(one_proxy: S3Proxy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return the default client of a source. It is shared, because creating a client is slow."""
    with closing(S3Source(BUCKET, tmp_path_factory.mktemp("none"), endpoint_url=one_proxy.url)._client) as made:
        yield made


Make = Callable[..., S3Source]


@pytest.fixture
def make(proxy: S3Proxy, client: Any, tmp_path: Path) -> Iterator[Make]:
    """Return a function that creates sources, with a separate client if the options require it."""
    made = []

    def build(**options: Any) -> S3Source:
        shared = {"client": client} if options.keys() <= {"prefix"} else {"endpoint_url": proxy.url}
        made.append(S3Source(**{"bucket": BUCKET, "cache_dir": tmp_path / "cache"} | shared | options))
        return made[-1]

    yield build
    for source in made:
        if source._client is not client:
            source._client.close()


@pytest.fixture
def source(make: Make) -> S3Source:
    return make()


def leftovers(tmp_path: Path) -> list[str]:
    """Return the names of non-empty partial files in the cache."""
    return [path.name for path in (tmp_path / "cache").rglob("*.part") if path.stat().st_size]


# --- downloads


def test_adapter_is_downloaded(proxy: S3Proxy, source: S3Source) -> None:
    check_contents(fetch(source, NAME))
    requested = {proxy.key(request) for request in proxy.seen}
    assert requested == {"list", "head", *ADAPTER}


def test_bucket_in_name_is_optional(source: S3Source) -> None:
    for name in (NAME, f"{NAME}/", f"s3://{BUCKET}/{NAME}", f"s3://{BUCKET}/{NAME}/"):
        check_contents(fetch(source, name))


@pytest.mark.parametrize("prefix", ["team", "/team/"])
def test_names_are_relative_to_prefix(make: Make, prefix: str) -> None:
    for name in ("adapter", f"s3://{BUCKET}/team/adapter"):
        check_contents(fetch(make(prefix=prefix), name))


NOT_THERE = [
    "none",
    "team",
    "team/adapt",
    "adapter",
    "..",
    ".",
    "/",
    "//",
    "/team/adapter",
    "team//adapter",
    "team/../team/adapter",
    "team/./adapter",
    "team\\adapter",
    "s3://",
    "s3://other/team/adapter",
    "s3://bucket",
    "s3://bucket/",
    "s3://bucket//team/adapter",
    "s3://bucket/../bucket/team/adapter",
    "s3://bucketteam/adapter",
    "s3:/bucket/team/adapter",
    "http://evil.example/adapter",
]


def test_missing_names_are_not_found(source: S3Source) -> None:
    for name in NOT_THERE:
        with pytest.raises(AdapterError, match=r"has no|no such folder") as caught:
            fetch(source, name)
        assert repr(name) in str(caught.value)
        assert source.base_model_type(name, None) is None


OUTSIDE = [
    "other",
    "s3://bucket/other",
    "s3://bucket/teammate/adapter",
    "../other",
    "../team/adapter",
    "s3://bucket/team",
]


def test_names_outside_prefix_are_not_found(admin: Any, make: Make) -> None:
    for outside in ("other", "teammate/adapter"):
        put(admin, outside, ADAPTER)
    source = make(prefix="team")
    for name in OUTSIDE:
        with pytest.raises(AdapterNotFoundError, match="no such folder"):
            fetch(source, name)


def test_subfolders_are_ignored(admin: Any, source: S3Source) -> None:
    put(admin, f"{NAME}/checkpoint-1", {"vocab.json": b"{}"})
    check_contents(fetch(source, NAME))
    put(admin, "parent/child", ADAPTER)
    with pytest.raises(AdapterError, match="no such folder"):
        fetch(source, "parent")


def test_cached_files_are_not_downloaded_again(proxy: S3Proxy, source: S3Source) -> None:
    first = fetch(source, NAME)
    proxy.seen.clear()
    assert fetch(source, NAME) == first
    assert {proxy.key(request) for request in proxy.seen} == {"list"}


def test_new_upload_changes_version(admin: Any, source: S3Source) -> None:
    first = fetch(source, NAME)
    put(admin, NAME, {WEIGHTS: b"new weights"})
    second = fetch(source, NAME)
    assert second.version != first.version
    check_contents(first)
    check_contents(second, {**ADAPTER, WEIGHTS: b"new weights"})


def test_token_is_ignored(proxy: S3Proxy, source: S3Source) -> None:
    check_contents(fetch(source, NAME, "hf_do_not_send_this"))
    assert not any("hf_do_not_send_this" in str(request) for request in proxy.seen)


def test_listings_with_many_unrelated_files_are_paginated(
    admin: Any, source: S3Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(admin, NAME, {f"file-{index}": b"" for index in range(20)})
    paginator = source._client.get_paginator("list_objects_v2")
    monkeypatch.setattr(source._client, "get_paginator", lambda _: paginator)
    paginate = paginator.paginate
    monkeypatch.setattr(
        paginator, "paginate", lambda **options: paginate(**options | {"PaginationConfig": {"PageSize": 3}})
    )
    check_contents(fetch(source, NAME))


# --- consistency between sources


ALL_FILES = {
    **{file: content for file, content in ADAPTER.items() if not file.endswith(".jinja")},
    "tokenizer_config.json": b"{}",
    "special_tokens_map.json": b"{}",
    "added_tokens.json": b"{}",
    "tokenizer.model": b"model",
    "vocab.json": b"{}",
    "merges.txt": b"merges",
    "vocab.txt": b"vocab",
    "spiece.model": b"spiece",
    "tekken.json": b"{}",
    "chat_template.jinja": b"the usual one",
    "additional_chat_templates/default.jinja": b"one in its place",
    "additional_chat_templates/tool_use.jinja": b"another",
}
IGNORED_FILES = {
    "additional_chat_templates/.odd.jinja": b"x",
    "additional_chat_templates/no.txt": b"x",
    "more/vocab.txt": b"x",
}


@pytest.fixture
def sources_by_kind(admin: Any, source: S3Source, tmp_path: Path) -> Iterator[dict[str, tuple[Source, str]]]:
    """Yield the same adapter in a bucket, on a hub, in a hub cache, and in a folder."""
    put(admin, "team/full", {**ALL_FILES, **IGNORED_FILES, **UNRELATED_FILES})
    for file, content in {**ALL_FILES, **IGNORED_FILES, **UNRELATED_FILES}.items():
        path = tmp_path / "root" / "full" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    with running(HubServer()) as hub:
        hub.repos["team/full"] = Repo({**ALL_FILES, **IGNORED_FILES, **UNRELATED_FILES})
        online, offline = (HubSource(tmp_path / "hub", hub.url, offline=offline) for offline in (False, True))
        yield {
            "s3": (source, "team/full"),
            "hub": (online, "team/full"),
            "cache": (offline, "team/full"),
            "local": (LocalSource([tmp_path / "root"]), "full"),
        }


def test_all_sources_return_same_files(sources_by_kind: dict[str, tuple[Source, str]]) -> None:
    for source, name in sources_by_kind.values():
        fetched = fetch(source, name)
        assert fetched.tokenizer_files == tuple(file for file in ALL_FILES if file not in (CONFIG, WEIGHTS))
        assert {file: (fetched.folder / file).read_bytes() for file in ALL_FILES} == ALL_FILES
        files = TokenizerFolder(fetched.folder, {file: read_stamp(fetched.folder / file) for file in ALL_FILES})
        assert _read_templates(files, {}) == {"default": "one in its place", "tool_use": "another"}


@pytest.mark.parametrize(
    "file", slow_except(["vocab.txt"], ["additional_chat_templates/default.jinja", "vocab.txt", "tekken.json"])
)
def test_tokenizer_file_changes_version(admin: Any, source: S3Source, file: str) -> None:
    put(admin, NAME, ALL_FILES)
    first = fetch(source, NAME)
    put(admin, NAME, {file: b"changed"})
    second = fetch(source, NAME)
    assert second.version != first.version
    assert (second.folder / file).read_bytes() == b"changed"
    assert (first.folder / file).read_bytes() == ALL_FILES[file]


def test_endless_listing_is_limited(admin: Any, source: S3Source, monkeypatch: pytest.MonkeyPatch) -> None:
    def pages(**_: Any) -> Iterator[dict[str, Any]]:
        while True:
            yield {"Contents": []}

    paginator = SimpleNamespace(paginate=pages)
    monkeypatch.setattr(source._client, "get_paginator", lambda _: paginator)
    with pytest.raises(AdapterNotFoundError):
        fetch(source, NAME)


@pytest.mark.parametrize("missing", ["Size", "ETag"])
def test_invalid_listing_is_rejected(source: S3Source, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    item = {"Key": f"{NAME}/{CONFIG}", "Size": 3, "ETag": "x"}
    del item[missing]
    paginator = SimpleNamespace(paginate=lambda **_: iter([{"Contents": [item]}]))
    monkeypatch.setattr(source._client, "get_paginator", lambda _: paginator)
    with pytest.raises(SourceError, match=f"{NAME}.* has no '{missing}'"):
        fetch(source, NAME)


# --- faulty servers


STAGES = ["list", "head", WEIGHTS]
STATUSES = {401: AdapterAccessError, 403: AdapterAccessError, 404: AdapterNotFoundError, 412: SourceError}


@pytest.mark.parametrize("stage", STAGES)
def test_access_errors_are_distinct_from_server_failures(proxy: S3Proxy, source: S3Source, stage: str) -> None:
    for status, expected in STATUSES.items():
        proxy.faults[stage] = Fault(reply=Reply(status))
        with pytest.raises(AdapterError, match=NAME) as caught:
            fetch(source, NAME)
        assert type(caught.value) is expected
    proxy.faults.clear()
    check_contents(fetch(source, NAME))


def test_server_error_is_reported(proxy: S3Proxy, source: S3Source) -> None:
    proxy.faults[WEIGHTS] = Fault(reply=Reply(503))
    with pytest.raises(SourceError, match=f"{NAME}.* returned status 503"):
        fetch(source, NAME)


def test_missing_bucket_is_not_found(make: Make) -> None:
    with pytest.raises(AdapterNotFoundError, match=f"{NAME}.*no such folder in the server's bucket"):
        fetch(make(bucket="another"), NAME)


@pytest.mark.parametrize("stage", ["list", WEIGHTS])
def test_unresponsive_server_times_out(proxy: S3Proxy, make: Make, stage: str) -> None:
    proxy.faults[stage] = Fault(hangs=True)
    with pytest.raises(SourceError, match=rf"{NAME}.* cannot be read \(ReadTimeoutError\)"):
        fetch(make(timeout_s=0.5), NAME)


def test_unreachable_server_fails(make: Make) -> None:
    with running(S3Proxy("127.0.0.1", 1)) as server:
        url = server.url
    with pytest.raises(SourceError, match=rf"{NAME}.* cannot be read \(EndpointConnectionError\)"):
        fetch(make(endpoint_url=url), NAME)


def test_missing_credentials_are_reported(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(SourceError, match=rf"{NAME}.* cannot be read \(NoCredentialsError\).*check .*credentials"):
        fetch(make(timeout_s=10), NAME)


def test_credentials_do_not_appear_in_errors(
    proxy: S3Proxy, source: S3Source, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    fetch(source, NAME)
    proxy.faults["list"] = Fault(reply=Reply(403))
    with pytest.raises(AdapterAccessError, match="rejects the server's credentials") as caught:
        fetch(source, NAME)
    assert "a-secret-key" not in str(caught.value)
    assert "a-secret-key" not in caplog.text


def test_missing_boto3_error_names_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(ConfigError, match=r"pip install 'lorax_server\[s3\]'"):
        S3Source(BUCKET, tmp_path)


# --- interrupted downloads


def test_interrupted_download_resumes(proxy: S3Proxy, source: S3Source, tmp_path: Path) -> None:
    proxy.faults[WEIGHTS] = Fault(times=2, cut_after=2**17)
    check_contents(fetch(source, NAME))
    ranges = [request.headers.get("range") for request in proxy.requests(WEIGHTS)]
    assert ranges == [None, f"bytes={2**17}-", f"bytes={2**18}-"]
    assert {request.headers["if-match"] for request in proxy.requests(WEIGHTS)} == {
        f'"{hashlib.md5(ADAPTER[WEIGHTS]).hexdigest()}"'
    }
    assert not list((tmp_path / "cache").rglob("*.part"))


def test_next_request_resumes_download(proxy: S3Proxy, source: S3Source) -> None:
    proxy.faults[WEIGHTS] = Fault(cut_after=2**16)
    with pytest.raises(SourceError, match=NAME):
        fetch(source, NAME)
    proxy.faults.clear()
    check_contents(fetch(source, NAME))
    assert proxy.requests(WEIGHTS)[-1].headers["range"] == f"bytes={5 * 2**16}-"


def test_download_restarts_without_range_support(proxy: S3Proxy, source: S3Source) -> None:
    proxy.supports_ranges = False
    proxy.faults[WEIGHTS] = Fault(times=1, cut_after=2**17)
    check_contents(fetch(source, NAME))


DAMAGE = {
    "other bytes": bytes(len(ADAPTER[WEIGHTS])),
    "shorter": ADAPTER[WEIGHTS][:-1],
    "longer": ADAPTER[WEIGHTS] + b"x",
    "empty": b"",
}


@pytest.mark.parametrize("checksum", slow_except(["sha256"], ["md5", "sha256"]))
@pytest.mark.parametrize("damaged", DAMAGE.values(), ids=DAMAGE)
def test_damaged_weights_are_rejected(
    admin: Any, proxy: S3Proxy, source: S3Source, tmp_path: Path, damaged: bytes, checksum: str
) -> None:
    if checksum == "sha256":
        put(admin, NAME, ADAPTER, ChecksumAlgorithm="SHA256")
        proxy.etags[hashlib.md5(ADAPTER[WEIGHTS]).hexdigest()] = "anything"
    proxy.faults[WEIGHTS] = Fault(body=damaged)
    with pytest.raises(SourceError, match=f"{NAME}"):
        fetch(source, NAME)
    assert not leftovers(tmp_path)
    assert not list((tmp_path / "cache").rglob(WEIGHTS))
    proxy.faults.clear()
    check_contents(fetch(source, NAME))


def test_sha256_checksum_is_verified(admin: Any, proxy: S3Proxy, source: S3Source, tmp_path: Path) -> None:
    put(admin, NAME, ADAPTER, ChecksumAlgorithm="CRC32")
    proxy.etags[hashlib.md5(ADAPTER[WEIGHTS]).hexdigest()] = "anything"
    proxy.faults[WEIGHTS] = Fault(body=bytes(len(ADAPTER[WEIGHTS])))
    with pytest.raises(SourceError, match=r"\(FlexibleChecksumError\)"):
        fetch(source, NAME)
    assert not leftovers(tmp_path)
    with pytest.raises(SourceError):
        fetch(source, NAME)
    proxy.faults.clear()
    check_contents(fetch(source, NAME))


def test_etag_of_encrypted_object_is_not_verified(admin: Any, proxy: S3Proxy, source: S3Source) -> None:
    put(admin, NAME, ADAPTER, ServerSideEncryption="aws:kms")
    proxy.etags[hashlib.md5(ADAPTER[WEIGHTS]).hexdigest()] = "0123456789abcdef0123456789abcdef"
    check_contents(fetch(source, NAME))


def test_wrong_md5_etag_is_rejected(proxy: S3Proxy, source: S3Source) -> None:
    proxy.etags[hashlib.md5(ADAPTER[WEIGHTS]).hexdigest()] = "0123456789abcdef0123456789abcdef"
    with pytest.raises(SourceError, match="the size or checksum is wrong"):
        fetch(source, NAME)


@pytest.mark.parametrize("options", [{}, {"ChecksumAlgorithm": "SHA256"}])
def test_multipart_upload_is_accepted(admin: Any, source: S3Source, options: dict[str, str]) -> None:
    parts = [bytes(5 * 2**20), b"the end"]
    upload = admin.create_multipart_upload(Bucket=BUCKET, Key=f"{NAME}/{WEIGHTS}", **options)
    which = {"Bucket": BUCKET, "Key": f"{NAME}/{WEIGHTS}", "UploadId": upload["UploadId"]}
    sent = [admin.upload_part(**which, PartNumber=1 + n, Body=part, **options) for n, part in enumerate(parts)]
    done = [{"PartNumber": 1 + n, "ETag": part["ETag"]} for n, part in enumerate(sent)]
    admin.complete_multipart_upload(**which, MultipartUpload={"Parts": done})
    assert source.find(NAME, None).tags[WEIGHTS].endswith('-2"')
    check_contents(fetch(source, NAME), {**ADAPTER, WEIGHTS: b"".join(parts)})


def test_change_during_download_fails(admin: Any, source: S3Source) -> None:
    result = source.find(NAME, None)
    put(admin, NAME, {WEIGHTS: b"x" * len(ADAPTER[WEIGHTS])})
    with pytest.raises(SourceError, match=f"{NAME}.* changed during the download"):
        source.fetch(result, [CONFIG, WEIGHTS], None)


def test_change_between_resumed_parts_fails(admin: Any, proxy: S3Proxy, source: S3Source) -> None:
    proxy.faults[WEIGHTS] = Fault(times=1, cut_after=2**17)

    def upload(request: Request) -> None:
        if "range" in request.headers:
            put(admin, NAME, {WEIGHTS: b"x" * len(ADAPTER[WEIGHTS])})

    proxy.before = upload
    with pytest.raises(SourceError, match=f"{NAME}.* changed during the download"):
        fetch(source, NAME)
    check_contents(fetch(source, NAME), {**ADAPTER, WEIGHTS: b"x" * len(ADAPTER[WEIGHTS])})


# --- checks before downloads


def test_rejected_config_downloads_no_weights(proxy: S3Proxy, source: S3Source) -> None:
    def refuse(config: Any, base_model_type: Any) -> None:
        raise AdapterError(f"rank {config['r']} is not for us")

    with pytest.raises(AdapterError, match="rank 8 is not for us"):
        make_sources(source).fetch("s3", NAME, None, refuse)
    assert not proxy.requests(WEIGHTS)


def test_oversized_adapter_is_not_downloaded(proxy: S3Proxy, source: S3Source) -> None:
    with pytest.raises(AdapterError, match="at most 1000 are allowed"):
        make_sources(source, max_bytes=1000).fetch("s3", NAME, None, accept)
    assert {proxy.key(request) for request in proxy.seen} == {"list"}


# --- concurrency and disk errors


def test_concurrent_threads_download_once(proxy: S3Proxy, source: S3Source) -> None:
    both_are_on_their_way = threading.Event()

    def wait_for_both(request: Request) -> None:
        if len(proxy.requests("list")) == 4:
            both_are_on_their_way.set()
        if request.method == "GET" and request.file == WEIGHTS:
            assert both_are_on_their_way.wait(30)

    proxy.before = wait_for_both
    with ThreadPoolExecutor(2) as pool:
        for fetched in pool.map(lambda _: fetch(source, NAME), range(2)):
            check_contents(fetched)
    assert len(proxy.requests(WEIGHTS)) == 1


FETCH_IN_A_CHILD = """
    from lorax_server.adapters.sources.s3 import S3Source
    from tests.adapters.sources.adapters import check_contents, fetch
    check_contents(fetch(S3Source("bucket", Path(sys.argv[1]), endpoint_url=sys.argv[2]), "team/adapter"))
    assert "torch" not in sys.modules
"""


@pytest.mark.slow
def test_concurrent_processes_download_once(proxy: S3Proxy, tmp_path: Path) -> None:
    run_children(2, FETCH_IN_A_CHILD, tmp_path / "cache", proxy.url)
    assert len(proxy.requests(WEIGHTS)) == 1


DISK_FULL = """
    import resource
    from lorax_server.adapters.sources.s3 import S3Source
    from lorax_server.errors import SourceError
    from tests.adapters.sources.adapters import fetch
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        fetch(S3Source("bucket", Path(sys.argv[1]), endpoint_url=sys.argv[2]), "team/adapter")
    except SourceError as error:
        print(error)
"""


def test_full_disk_is_reported(proxy: S3Proxy, source: S3Source, tmp_path: Path) -> None:
    printed = run_child(DISK_FULL, tmp_path / "cache", proxy.url)
    assert f"adapter '{NAME}': {WEIGHTS}: the server cannot store it (File too large)" in printed
    assert not leftovers(tmp_path)
    assert not list((tmp_path / "cache").rglob(WEIGHTS))
    check_contents(fetch(source, NAME))


# --- base models


def test_base_model_type_is_read_from_config(admin: Any, proxy: S3Proxy, source: S3Source) -> None:
    put(admin, "base", {"config.json": b'{"model_type": "gpt2"}', "model.safetensors": b"large"})
    assert source.base_model_type("base", None) == "gpt2"
    assert source.base_model_type(NAME, None) is None
    assert not proxy.requests("model.safetensors")
    proxy.faults["list"] = Fault(reply=Reply(403))
    assert source.base_model_type("base", None) is None
