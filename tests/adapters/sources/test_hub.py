import gzip
import hashlib
import json
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from huggingface_hub import close_session, constants, hf_hub_download, scan_cache_dir

from lorax_server.adapters.sources import remote
from lorax_server.adapters.sources.hub import HubSource
from lorax_server.errors import AdapterAccessError, AdapterError, AdapterNotFoundError, SourceError
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
from tests.adapters.sources.hub_server import HubServer, Repo, commit_of, describe
from tests.adapters.sources.server import Fault, Reply, Request, running

NAME = "owner/adapter"
CONFIG = "adapter_config.json"
SECRET = "hf_do_not_show_this"


@pytest.fixture(autouse=True, scope="module")
def one_ssl_context() -> Iterator[None]:
    """Share one SSL context: loading the system certificates is slow."""
    context = httpx2.create_ssl_context()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpx2, "create_ssl_context", lambda: context)
        yield


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with running(HubServer()) as server:
        server.repos[NAME] = Repo({**ADAPTER, **UNRELATED_FILES})
        yield server


@pytest.fixture
def source(hub: HubServer, tmp_path: Path) -> HubSource:
    return HubSource(tmp_path / "cache", hub.url)


def leftovers(tmp_path: Path) -> list[str]:
    """Return the names of partial files in the cache."""
    return [path.name for path in (tmp_path / "cache").rglob("*.part")]


# --- downloads


def test_adapter_is_downloaded(hub: HubServer, source: HubSource) -> None:
    fetched = fetch(source, NAME)
    check_contents(fetched)
    assert fetched.version == commit_of(hub.repos[NAME].files)


def test_only_known_files_are_requested(hub: HubServer, source: HubSource) -> None:
    fetch(source, NAME)
    commit = commit_of(hub.repos[NAME].files)
    # The first request checks access. The others name the commit, so that all files are consistent.
    assert [request.path for request in hub.seen] == [
        f"/{NAME}/resolve/main/{CONFIG}",
        f"/api/models/{NAME}/revision/main?blobs=true",
        *(f"/{NAME}/resolve/{commit}/{file}" for file in ADAPTER),
    ]


def test_cached_files_are_not_downloaded_again(hub: HubServer, source: HubSource) -> None:
    fetch(source, NAME)
    hub.seen.clear()
    check_contents(fetch(source, NAME))
    assert len(hub.seen) == 2


def test_new_commit_downloads_only_changed_files(hub: HubServer, source: HubSource) -> None:
    first = fetch(source, NAME)
    hub.seen.clear()
    hub.repos[NAME].files["tokenizer.json"] = b'{"version": "2.0"}'
    second = fetch(source, NAME)
    assert second.version != first.version
    check_contents(second, {**ADAPTER, "tokenizer.json": b'{"version": "2.0"}'})
    assert not hub.requests(WEIGHTS)
    assert (first.folder / "tokenizer.json").read_bytes() == ADAPTER["tokenizer.json"]


@pytest.mark.parametrize("revision", ["dev", "refs/pr/1", "v1.0", "a commit"])
def test_revision_is_pinned(hub: HubServer, source: HubSource, revision: str) -> None:
    old = {**ADAPTER, WEIGHTS: b"older weights"}
    hub.repos[NAME].branches = {"dev": old, "refs/pr/1": old, "v1.0": old}
    revision = commit_of(old) if revision == "a commit" else revision
    fetched = fetch(source, f"{NAME}@{revision}")
    assert fetched.version == commit_of(old)
    check_contents(fetched, old)


def test_missing_revision_is_reported(hub: HubServer, source: HubSource) -> None:
    with pytest.raises(AdapterNotFoundError, match=f"{NAME}@none"):
        fetch(source, f"{NAME}@none")


ODD_NAMES = [
    "../x.jinja",
    "a/b.jinja",
    "..jinja/../../x.jinja",
    ".hidden.jinja",
    "a b.jinja",
    "a%2fb.jinja",
    "x.jinja/",
]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_template_with_path_in_name_is_ignored(hub: HubServer, source: HubSource, tmp_path: Path, name: str) -> None:
    hub.repos[NAME].files[f"additional_chat_templates/{name}"] = b"x"
    check_contents(fetch(source, NAME))
    assert not [request for request in hub.seen if "additional" in request.path]


def test_too_many_templates_are_rejected(hub: HubServer, source: HubSource) -> None:
    for index in range(33):
        hub.repos[NAME].files[f"additional_chat_templates/{index}.jinja"] = b"x"
    with pytest.raises(AdapterError, match="has more than 32 templates"):
        fetch(source, NAME)
    assert not hub.requests(WEIGHTS)


def test_repository_without_config_is_rejected(hub: HubServer, source: HubSource) -> None:
    del hub.repos[NAME].files[CONFIG]
    with pytest.raises(AdapterError, match=f"{NAME}.* has no {CONFIG}"):
        fetch(source, NAME)


INVALID_NAMES = [
    "../../etc/passwd",
    "..",
    "owner/..",
    "../owner",
    "/owner/adapter",
    "owner/adapter/more",
    "http://evil.example/adapter",
    "//evil.example/adapter",
    "evil.example:80/x",
    "owner\\adapter",
    "owner/%2e%2e",
    "owner/adapter?x=1",
    "owner/adapter#x",
    "owner/adapter@",
    "owner/adapter@..",
    "owner/adapter@../../../refs",
    "owner/adapter@a/../../b",
    "owner/adapter@/etc/passwd",
    "owner/adapter@a//b",
    "owner/adapter@main@dev",
    "owner/adapter@.hidden",
    "owner/adapter@main?x",
    "@main",
    "~root",
    "öwner/adapter",
]


@pytest.mark.parametrize("offline", [False, True])
def test_invalid_repository_name_sends_no_request(hub: HubServer, tmp_path: Path, offline: bool) -> None:
    source = HubSource(tmp_path / "cache", hub.url, offline=offline)
    for name in INVALID_NAMES:
        with pytest.raises(AdapterNotFoundError, match="hub names have the form owner/name") as caught:
            fetch(source, name)
        assert repr(name) in str(caught.value)
        assert source.base_model_type(name, None) is None
    assert not hub.seen
    assert not (tmp_path / "cache").exists()


# --- permissions


def test_anonymous_request_has_no_token(hub: HubServer, source: HubSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_lies_around_on_the_machine")
    fetch(source, NAME)
    assert all("authorization" not in request.headers for request in hub.seen)


@pytest.mark.parametrize(
    ("configured", "given", "sent"), [(None, "mine", "mine"), ("ours", None, "ours"), ("ours", "mine", "mine")]
)
def test_request_token_overrides_configured_token(
    hub: HubServer, tmp_path: Path, configured: str | None, given: str | None, sent: str
) -> None:
    hub.repos[NAME].token = sent
    fetch(HubSource(tmp_path / "cache", hub.url, token=configured), NAME, given)
    assert {request.headers["authorization"] for request in hub.seen} == {f"Bearer {sent}"}


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("token", [None, "hf_of_somebody_else"])
def test_cached_files_require_own_token(hub: HubServer, source: HubSource, gated: bool, token: str | None) -> None:
    hub.repos[NAME].token, hub.repos[NAME].gated = SECRET, gated
    sources = make_sources(source)
    check_contents(sources.fetch("hub", NAME, SECRET, accept))
    with pytest.raises(AdapterAccessError, match=f"{NAME}.* pass a token"):
        sources.fetch("hub", NAME, token, accept)
    check_contents(sources.fetch("hub", NAME, SECRET, accept))


def test_token_is_not_sent_to_redirect_target(hub: HubServer, source: HubSource) -> None:
    with running(HubServer()) as storage:
        storage.repos[NAME] = Repo(dict(hub.repos[NAME].files))
        hub.files_are_at, hub.repos[NAME].token = storage.url, SECRET
        check_contents(fetch(source, NAME, SECRET))
        assert storage.requests(WEIGHTS)
        assert all("authorization" not in request.headers for request in storage.seen)


def test_cookies_are_not_shared_between_callers(hub: HubServer, source: HubSource) -> None:
    hub.faults[CONFIG] = Fault(times=1, reply=Reply(200, {"Set-Cookie": "session=mine; Path=/"}))
    source.authorize(NAME, "mine")
    source.authorize(NAME, None)
    source.find(NAME, None)
    assert all("cookie" not in request.headers for request in hub.seen)


def test_tokens_do_not_appear_in_errors(hub: HubServer, source: HubSource, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    fetch(source, NAME, SECRET)
    for status in (401, 403, 404, 500):
        hub.faults[CONFIG] = Fault(reply=Reply(status))
        with pytest.raises(AdapterError) as caught:
            fetch(source, NAME, SECRET)
        assert SECRET not in str(caught.value)
    with pytest.raises(AdapterAccessError) as caught:
        fetch(source, NAME, SECRET + "\nX-Other: header")
    assert SECRET not in str(caught.value)
    assert SECRET not in caplog.text


# --- faulty servers


STAGES = [CONFIG, "info", WEIGHTS]
STATUSES = {
    401: AdapterAccessError,
    403: AdapterAccessError,
    404: AdapterNotFoundError,
    400: SourceError,
    429: SourceError,
    500: SourceError,
    503: SourceError,
}


@pytest.mark.parametrize("stage", STAGES)
def test_access_errors_are_distinct_from_server_failures(hub: HubServer, source: HubSource, stage: str) -> None:
    for status, expected in STATUSES.items():
        hub.faults[stage] = Fault(reply=Reply(status, body=b"reasons"))
        with pytest.raises(AdapterError, match=NAME) as caught:
            fetch(source, NAME)
        assert type(caught.value) is expected
    hub.faults.clear()
    check_contents(fetch(source, NAME))


@pytest.mark.parametrize("stage", STAGES)
def test_unresponsive_server_times_out(hub: HubServer, tmp_path: Path, stage: str) -> None:
    hub.faults[stage] = Fault(hangs=True)
    with pytest.raises(SourceError, match=rf"{NAME}.* cannot be reached \(ReadTimeout\)"):
        fetch(HubSource(tmp_path / "cache", hub.url, timeout_s=0.3), NAME)


def test_slow_download_times_out(hub: HubServer, tmp_path: Path) -> None:
    hub.repos[NAME].files[WEIGHTS] = bytes(1000)
    hub.faults[WEIGHTS] = Fault(drips=True)
    with pytest.raises(SourceError, match=f"{NAME}.*{WEIGHTS}: the download is too slow"):
        fetch(HubSource(tmp_path / "cache", hub.url, timeout_s=1.0), NAME)


def test_slow_repository_info_times_out(hub: HubServer, tmp_path: Path) -> None:
    hub.faults["info"] = Fault(drips=True)
    with pytest.raises(SourceError, match=f"{NAME}.* the hub responds too slowly"):
        fetch(HubSource(tmp_path / "cache", hub.url, timeout_s=1.0), NAME)


@pytest.mark.parametrize("coding", ["gzip", "identity"])
def test_endless_repository_info_is_rejected(hub: HubServer, source: HubSource, coding: str) -> None:
    body = b'{"sha": "' + b"0" * 2**23
    sent = gzip.compress(body) if coding == "gzip" else body  # a few kilobytes that decompress to megabytes
    hub.faults["info"] = Fault(reply=Reply(200, {"Content-Encoding": coding}, sent))
    with pytest.raises(SourceError, match=f"{NAME}.* invalid response from the hub"):
        fetch(source, NAME)


@pytest.mark.parametrize("place", ["file:///etc/passwd", "ftp://127.0.0.1/x", "//", "http://[", "gopher://x"])
@pytest.mark.parametrize("stage", STAGES)
def test_redirect_to_unreachable_server_fails(hub: HubServer, source: HubSource, stage: str, place: str) -> None:
    hub.faults[stage] = Fault(reply=Reply(302, {"Location": place}))
    with pytest.raises(AdapterError, match=NAME):
        fetch(source, NAME)


def test_redirected_files_are_verified(hub: HubServer, source: HubSource) -> None:
    with running(HubServer()) as storage:
        storage.repos[NAME] = Repo(dict(hub.repos[NAME].files))
        storage.faults[WEIGHTS] = Fault(body=bytes(len(ADAPTER[WEIGHTS])))
        hub.files_are_at = storage.url
        with pytest.raises(SourceError, match="the size or checksum is wrong"):
            fetch(source, NAME)


def test_unreachable_server_fails(tmp_path: Path) -> None:
    with running(HubServer()) as server:
        url = server.url
    with pytest.raises(SourceError, match=rf"{NAME}.* cannot be reached \(ConnectError\)"):
        fetch(HubSource(tmp_path / "cache", url), NAME)


@pytest.mark.parametrize("stage", STAGES)
def test_redirect_loop_fails(hub: HubServer, source: HubSource, stage: str) -> None:
    hub.faults[stage] = Fault(reply=Reply(302, {"Location": f"/round/and/round/{stage}"}))
    with pytest.raises(SourceError, match=rf"{NAME}.* \(TooManyRedirects\)"):
        fetch(source, NAME)


NO_HUBS: dict[str, Any] = {
    "HTML": b"<html>please log in</html>",
    "a list": [],
    "no commit": {"siblings": []},
    "no files": {"sha": "0" * 40},
    "a commit that is a path": {"sha": "../../../../tmp/x", "siblings": []},
    "a commit that is a number": {"sha": 7, "siblings": []},
    "files that are a number": {"sha": "0" * 40, "siblings": 3},
    "a file without a size": {"sha": "0" * 40, "siblings": [{"rfilename": CONFIG, "blobId": "0" * 40}]},
    "a size below zero": {"sha": "0" * 40, "siblings": [{"rfilename": CONFIG, "size": -1, "blobId": "0" * 40}]},
    "a name that is a number": {"sha": "0" * 40, "siblings": [{"rfilename": 3, "size": 1, "blobId": "0" * 40}]},
    "a size with too many digits": b'{"sha": "' + b"0" * 40 + b'", "siblings": [{"size": ' + b"9" * 9999 + b"}]}",
    "a digest that is a path": {"sha": "0" * 40, "siblings": [{"rfilename": CONFIG, "size": 1, "blobId": "../../x"}]},
    "a digest of large files that is a path": {
        "sha": "0" * 40,
        "siblings": [{"rfilename": CONFIG, "size": 1, "lfs": {"size": 1, "sha256": "/etc/passwd"}}],
    },
}


@pytest.mark.parametrize("answer", NO_HUBS.values(), ids=NO_HUBS)
def test_invalid_hub_responses_are_rejected(hub: HubServer, source: HubSource, tmp_path: Path, answer: Any) -> None:
    body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    hub.faults["info"] = Fault(reply=Reply(body=body))
    with pytest.raises(SourceError, match=f"{NAME}.* invalid response from the hub"):
        fetch(source, NAME)
    assert source.base_model_type(NAME, None) is None


# --- interrupted downloads


def test_interrupted_download_resumes(hub: HubServer, source: HubSource) -> None:
    hub.faults[WEIGHTS] = Fault(times=2, cut_after=100_000)
    check_contents(fetch(source, NAME))
    assert [request.headers.get("range") for request in hub.requests(WEIGHTS)] == [
        None,
        "bytes=100000-",
        "bytes=200000-",
    ]


def test_next_request_resumes_download(hub: HubServer, source: HubSource, tmp_path: Path) -> None:
    hub.faults[WEIGHTS] = Fault(cut_after=1000)
    with pytest.raises(SourceError, match=f"{NAME}.* cannot be reached"):
        fetch(source, NAME)
    assert len(hub.requests(WEIGHTS)) == 5
    hub.faults.clear()
    check_contents(fetch(source, NAME))
    assert hub.requests(WEIGHTS)[-1].headers["range"] == "bytes=5000-"
    assert not leftovers(tmp_path)


def test_no_retry_without_progress(hub: HubServer, source: HubSource) -> None:
    hub.faults[WEIGHTS] = Fault(cut_after=0)
    with pytest.raises(SourceError):
        fetch(source, NAME)
    assert len(hub.requests(WEIGHTS)) == 1


def test_download_restarts_without_range_support(hub: HubServer, source: HubSource) -> None:
    hub.supports_ranges = False
    hub.faults[WEIGHTS] = Fault(times=1, cut_after=100_000)
    check_contents(fetch(source, NAME))


def test_progress_is_logged(
    hub: HubServer, source: HubSource, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote, "LOG_INTERVAL_S", 0.0)
    caplog.set_level(logging.INFO, logger=remote.__name__)
    hub.faults[WEIGHTS] = Fault(times=1, cut_after=100_000)
    fetch(source, NAME)
    assert caplog.messages[-1].startswith(f"adapter '{NAME}': ")
    assert caplog.messages[-1].endswith(" of 400032 bytes, 99%")  # the last chunk is not written yet


DAMAGE = {
    "other bytes": bytes(len(ADAPTER[WEIGHTS])),
    "one bit": ADAPTER[WEIGHTS][:-1] + bytes([ADAPTER[WEIGHTS][-1] ^ 1]),
    "shorter": ADAPTER[WEIGHTS][:-1],
    "longer": ADAPTER[WEIGHTS] + b"x",
    "much longer": ADAPTER[WEIGHTS] * 20,
    "empty": b"",
}


@pytest.mark.parametrize("damaged", DAMAGE.values(), ids=DAMAGE)
def test_damaged_weights_are_rejected(hub: HubServer, source: HubSource, tmp_path: Path, damaged: bytes) -> None:
    hub.faults[WEIGHTS] = Fault(body=damaged)
    with pytest.raises(SourceError, match=f"{NAME}.*{WEIGHTS}: the size or checksum is wrong"):
        fetch(source, NAME)
    assert not leftovers(tmp_path)
    assert not list((tmp_path / "cache").rglob(WEIGHTS))
    hub.faults.clear()
    check_contents(fetch(source, NAME))


def test_damaged_small_file_is_rejected(hub: HubServer, source: HubSource, tmp_path: Path) -> None:
    hub.faults["tokenizer.json"] = Fault(body=b'{"version": "9.9"}')
    with pytest.raises(SourceError, match=f"{NAME}.*tokenizer.json: the size or checksum is wrong"):
        fetch(source, NAME)
    assert not leftovers(tmp_path)


def test_download_with_wrong_listed_size_is_rejected(hub: HubServer, source: HubSource, tmp_path: Path) -> None:
    listed = [describe(*item) for item in hub.repos[NAME].files.items()]
    for described in listed:
        if described["rfilename"] == WEIGHTS:
            described["lfs"]["size"] = 10
    hub.repos[NAME].announced = {"siblings": listed}
    with pytest.raises(SourceError, match="the size or checksum is wrong"):
        fetch(source, NAME)
    assert not leftovers(tmp_path)


def test_truncated_cached_file_is_downloaded_again(hub: HubServer, source: HubSource) -> None:
    path = fetch(source, NAME).folder / WEIGHTS
    path.resolve().write_bytes(b"cut")
    check_contents(fetch(source, NAME))


# --- checks before downloads


def test_rejected_config_downloads_no_weights(hub: HubServer, source: HubSource) -> None:
    def refuse(config: Any, base_model_type: Any) -> None:
        raise AdapterError(f"rank {config['r']} is not for us")

    with pytest.raises(AdapterError, match="rank 8 is not for us"):
        make_sources(source).fetch("hub", NAME, None, refuse)
    assert not hub.requests(WEIGHTS)


def test_oversized_adapter_is_not_downloaded(hub: HubServer, source: HubSource) -> None:
    with pytest.raises(AdapterError, match=f"{NAME}.* bytes, at most 1000 are allowed"):
        make_sources(source, max_bytes=1000).fetch("hub", NAME, None, accept)
    assert [hub.key(request) for request in hub.seen] == [CONFIG, "info"]


# --- concurrency


def test_concurrent_threads_download_once(hub: HubServer, source: HubSource) -> None:
    both_are_on_their_way = threading.Event()

    def wait_for_both(request: Request) -> None:
        if len(hub.requests("info")) == 2:
            both_are_on_their_way.set()
        if request.file == WEIGHTS:
            assert both_are_on_their_way.wait(30)

    hub.before = wait_for_both
    with ThreadPoolExecutor(2) as pool:
        fetched = list(pool.map(lambda _: fetch(source, NAME), range(2)))
    for each in fetched:
        check_contents(each)
    assert len(hub.requests(WEIGHTS)) == 1


FETCH_IN_A_CHILD = """
    from lorax_server.adapters.sources.hub import HubSource
    from tests.adapters.sources.adapters import check_contents, fetch
    check_contents(fetch(HubSource(Path(sys.argv[1]), sys.argv[2]), "owner/adapter"))
    assert "torch" not in sys.modules
"""


def test_concurrent_processes_download_once(hub: HubServer, tmp_path: Path) -> None:
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    run_children(2, FETCH_IN_A_CHILD, tmp_path / "cache", hub.url, **environment)
    assert len(hub.requests(WEIGHTS)) == 1
    # huggingface_hub would have sent a whoami request.
    assert {hub.key(request) for request in hub.seen} == {"info", *ADAPTER}


# --- the disk


DISK_FULL = """
    import resource
    from lorax_server.adapters.sources.hub import HubSource
    from lorax_server.errors import SourceError
    from tests.adapters.sources.adapters import fetch
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        fetch(HubSource(Path(sys.argv[1]), sys.argv[2]), "owner/adapter")
    except SourceError as error:
        print(error)
"""


def test_full_disk_is_reported(hub: HubServer, source: HubSource, tmp_path: Path) -> None:
    printed = run_child(DISK_FULL, tmp_path / "cache", hub.url)
    assert f"adapter '{NAME}': {WEIGHTS}: the server cannot store it (File too large)" in printed
    assert not leftovers(tmp_path)
    assert not list((tmp_path / "cache").rglob(WEIGHTS))
    check_contents(fetch(source, NAME))


def test_read_only_cache_is_reported(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(SourceError, match=f"{NAME}.* the server cannot store it"):
        fetch(HubSource(tmp_path / "cache", hub.url), NAME)


# --- offline


def test_offline_mode_uses_cache(hub: HubServer, source: HubSource, tmp_path: Path) -> None:
    hub.repos[NAME].branches = {"refs/pr/1": {**ADAPTER, WEIGHTS: b"others"}}
    online = fetch(source, NAME)
    fetch(source, f"{NAME}@refs/pr/1")
    hub.seen.clear()
    offline = HubSource(tmp_path / "cache", hub.url, offline=True)
    assert fetch(offline, NAME) == online
    assert fetch(offline, f"{NAME}@{online.version}") == online
    check_contents(fetch(offline, f"{NAME}@refs/pr/1"), {**ADAPTER, WEIGHTS: b"others"})
    for name in ("owner/other", f"{NAME}@dev", f"{NAME}@{'0' * 40}", f"{NAME}@{'0' * 300}"):
        with pytest.raises(AdapterNotFoundError, match=f"{name}.* the server is in offline mode"):
            fetch(offline, name)
    assert not hub.seen


def test_cache_is_readable_by_huggingface_hub(
    hub: HubServer, source: HubSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch(source, NAME)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    result = hf_hub_download(NAME, WEIGHTS, cache_dir=tmp_path / "cache", local_files_only=True)
    assert Path(result).read_bytes() == ADAPTER[WEIGHTS]
    scanned = scan_cache_dir(tmp_path / "cache")
    assert not scanned.warnings
    assert [repo.repo_id for repo in scanned.repos] == [NAME]
    assert scanned.size_on_disk == sum(map(len, ADAPTER.values()))


def test_offline_mode_uses_huggingface_hub_cache(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    for file in ADAPTER:
        hf_hub_download(NAME, file, cache_dir=tmp_path / "cache", endpoint=hub.url, token=False)
    close_session()
    hub.seen.clear()
    check_contents(fetch(HubSource(tmp_path / "cache", hub.url, offline=True), NAME))
    assert not hub.seen
    # Online, cached files are not downloaded.
    check_contents(fetch(HubSource(tmp_path / "cache", hub.url), NAME))
    assert not hub.requests(WEIGHTS)


# --- base models


def test_base_model_type_is_read_from_repository_info(hub: HubServer, source: HubSource) -> None:
    hub.repos["owner/base"] = Repo({"config.json": b'{"model_type": "other"}'}, SECRET, True, "llama")
    assert source.base_model_type("owner/base", None) == "llama"
    assert not hub.requests("config.json")


@pytest.mark.parametrize("offline", [False, True])
def test_base_model_type_is_read_from_config(hub: HubServer, source: HubSource, tmp_path: Path, offline: bool) -> None:
    hub.repos["owner/base"] = Repo({"config.json": b'{"model_type": "opt"}', WEIGHTS: b"large"})
    assert source.base_model_type("owner/base", None) == "opt"
    assert not hub.requests(WEIGHTS)
    assert HubSource(tmp_path / "cache", hub.url, offline=offline).base_model_type("owner/base", None) == "opt"


BASES = {
    "no config": Repo({"README.md": b""}),
    "no JSON": Repo({"config.json": b"{"}),
    "no type": Repo({"config.json": b"{}"}),
    "a type that is a number": Repo({"config.json": b'{"model_type": 3}'}),
    "a large config": Repo({"config.json": b'{"model_type": "opt"}' + b" " * 2**20}),
    "private": Repo({"config.json": b'{"model_type": "opt"}'}, SECRET),
    "gated and not described": Repo({"config.json": b'{"model_type": "opt"}'}, SECRET, True),
}


@pytest.mark.parametrize("repo", BASES.values(), ids=BASES)
def test_unknown_base_model_type_is_none(hub: HubServer, source: HubSource, repo: Repo) -> None:
    hub.repos["owner/base"] = repo
    assert source.base_model_type("owner/base", None) is None


def test_base_model_type_of_missing_model_is_none(hub: HubServer, source: HubSource) -> None:
    assert source.base_model_type("owner/none", None) is None
    hub.faults["info"] = Fault(reply=Reply(500))
    assert source.base_model_type(NAME, None) is None


# --- the fake hub


def test_fake_hub_digests_match_git() -> None:
    # Output of `git hash-object`.
    assert describe("x", b"hello\n")["blobId"] == "ce013625030ba8dba906f756967f9e9ca394464a"
    assert describe("x", bytes(20_000))["lfs"]["sha256"] == hashlib.sha256(bytes(20_000)).hexdigest()
