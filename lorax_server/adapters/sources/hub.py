"""Adapters from a HuggingFace hub, kept in the layout of huggingface_hub's cache.

The cache's layout and the rules for names are huggingface_hub's. The requests are our own: its functions send one
to huggingface.co for telemetry, wait for minutes when a server hangs, share cookies between callers, and throw an
interrupted download away (version 2.4).
"""

import hashlib
import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
from huggingface_hub import constants
from huggingface_hub.errors import HFValidationError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined] # public, but imported lazily

from lorax_server.adapters.sources.caches import COMMIT, HubCache
from lorax_server.adapters.sources.disk_budget import DiskBudget
from lorax_server.adapters.sources.download import storing
from lorax_server.adapters.sources.remote import RemoteSource
from lorax_server.adapters.sources.source import AdapterFiles
from lorax_server.errors import AdapterAccessError, AdapterError, AdapterNotFoundError, SourceError
from lorax_server.files.adapter_files import is_known, known_files
from lorax_server.files.names import CONFIG_FILE
from lorax_server.files.strict_json import parse_json

REVISION = re.compile(r"(?!.*(\.\.|//))[A-Za-z0-9][\w./-]*", re.ASCII)
MAX_INFO_BYTES = 1 << 22
DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class HubSource(RemoteSource):
    """Repositories of a hub. A name is `owner/name` or `owner/name@revision`.

    The request's token is used, else the configured one, else none; never one that lies around on the machine. Offline,
    no request is sent, and all clients may use what is in the cache.
    """

    kind = "hub"

    def __init__(
        self,
        cache_dir: Path,
        endpoint: str | None = None,
        token: str | None = None,
        offline: bool = False,
        timeout_s: float = 10.0,
        budget: DiskBudget | None = None,
    ) -> None:
        super().__init__(HubCache(cache_dir), budget or DiskBudget(cache_dir), timeout_s)
        self._budget.add(self._cache, is_fixed=offline)
        self._cache_dir = cache_dir
        self._endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
        self._token = token
        self._offline = offline
        self._tls = httpx2.create_ssl_context()

    def authorize(self, name: str, token: str | None) -> None:
        """Open a file: the list of files of a gated repository is public."""
        repo, revision = _parse(name)
        if self._offline:
            return
        url = self._file_url(repo, revision, CONFIG_FILE)
        with self._client(token) as client, _asking(name), client.stream("GET", url) as response:
            # Without this file it is no adapter, which `find` tells.
            if (response.status_code, response.headers.get("x-error-code")) != (404, "EntryNotFound"):
                _check_status(response, name)

    def find(self, name: str, token: str | None) -> AdapterFiles:
        repo, revision = _parse(name)
        if self._offline:
            return self._find_cached(name)
        files = _read_info(repo, self._info(name, token))
        if not COMMIT.fullmatch(revision):
            self._remember(repo, revision, files.version)
        return files

    def _folder_of(self, files: AdapterFiles) -> Path:
        return self._repo_folder(files.name) / "snapshots" / files.version

    def _path_of(self, files: AdapterFiles, file: str) -> Path:
        if self._offline:
            raise _not_cached(files.name)
        return self._repo_folder(files.name) / "blobs" / files.tags[file]

    def _download_all(self, files: AdapterFiles, paths: Mapping[str, Path], token: str | None) -> None:
        with self._client(token) as client:
            for file, blob in paths.items():
                open_at = partial(_open, client, self._file_url(files.name, files.version, file), files.name)
                is_right = partial(_is_right, size=files.sizes[file], digest=blob.name)
                self._download(files, file, blob, open_at, is_right)
                _link(self._folder_of(files) / file, blob, files.name)

    def base_model_type(self, name: str, token: str | None) -> str | None:
        """Ask for the description first, which is public even where a model's files are not."""
        try:
            config = None if self._offline else self._info(name, token).get("config")
        except AdapterError:
            return None
        described = config.get("model_type") if isinstance(config, dict) else None
        return described if isinstance(described, str) else super().base_model_type(name, token)

    def _info(self, name: str, token: str | None) -> Mapping[str, Any]:
        repo, revision = _parse(name)
        url = f"{self._endpoint}/api/models/{repo}/revision/{quote(revision, safe='')}"
        content, deadline = bytearray(), time.monotonic() + self._timeout_s
        with self._client(token) as client, _asking(name), client.stream("GET", url, params={"blobs": "true"}) as reply:
            _check_status(reply, name)
            for chunk in reply.iter_raw():  # not decompressed: that could be of any size
                content += chunk
                if len(content) > MAX_INFO_BYTES:
                    raise _not_a_hub(name)
                if time.monotonic() > deadline:
                    raise SourceError(f"adapter {name!r}: the hub answers too slowly; try again later")
        try:
            return parse_json(bytes(content))
        except ValueError as error:
            raise _not_a_hub(name) from error

    def _find_cached(self, name: str) -> AdapterFiles:
        repo, revision = _parse(name)
        ref = self._repo_folder(repo) / "refs" / revision
        commit = ref.read_text() if os.path.isfile(ref) else revision
        folder = self._repo_folder(repo) / "snapshots" / commit
        if not os.path.isdir(folder):  # also of a name that is too long for the file system, where Path would raise
            raise _not_cached(name)
        found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        if not any(map(is_known, found)):
            raise _not_cached(name)
        sizes = {file: found[file].stat().st_size for file in known_files(found)}
        return AdapterFiles(self.kind, repo, commit, sizes)

    def _remember(self, repo: str, revision: str, commit: str) -> None:
        """Note the commit of a branch for use offline. Serving does not depend on it."""
        path = self._repo_folder(repo) / "refs" / revision
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(commit)

    def _client(self, token: str | None) -> httpx2.Client:
        # No client is shared: cookies of one request must not serve another.
        headers = {"user-agent": "lorax_server", "accept-encoding": "identity"}
        if bearer := token or self._token:
            headers["authorization"] = f"Bearer {bearer}"
        return httpx2.Client(headers=headers, timeout=self._timeout_s, follow_redirects=True, verify=self._tls)

    def _file_url(self, repo: str, revision: str, file: str) -> str:
        return f"{self._endpoint}/{repo}/resolve/{quote(revision, safe='')}/{file}"

    def _repo_folder(self, repo: str) -> Path:
        return self._cache_dir / repo_folder_name(repo_id=repo, repo_type="model")


def _parse(name: str) -> tuple[str, str]:
    repo, at, revision = name.partition("@")
    try:
        validate_repo_id(repo)
    except HFValidationError:
        repo = ""
    if not repo or (at and not REVISION.fullmatch(revision)):
        raise AdapterNotFoundError(f"adapter {name!r}: a hub's names look like owner/name or owner/name@revision")
    return repo, revision or constants.DEFAULT_REVISION


def _not_cached(name: str) -> AdapterNotFoundError:
    return AdapterNotFoundError(f"adapter {name!r}: it is not in the cache, and the server is offline")


@contextmanager
def _asking(name: str) -> Iterator[None]:
    try:
        yield
    except httpx2.HTTPError as error:
        reason = type(error).__name__
        raise SourceError(f"adapter {name!r}: the hub cannot be reached ({reason}); try again later") from error


def _check_status(response: httpx2.Response, name: str) -> None:
    status = response.status_code
    if status in (401, 403):
        raise AdapterAccessError(
            f"adapter {name!r}: the hub refuses it ({status}); it may be private, gated or not exist. Check the name, "
            "or give a token that may read it"
        )
    if status == 404:
        raise AdapterNotFoundError(
            f"adapter {name!r}: the hub has no such repository, revision or file; check the name"
        )
    if not response.is_success:
        raise SourceError(f"adapter {name!r}: the hub answers with status {status}; try again later")


def _not_a_hub(name: str) -> SourceError:
    return SourceError(f"adapter {name!r}: what answers is not a hub; check the server's hub endpoint")


def _read_info(repo: str, info: Mapping[str, Any]) -> AdapterFiles:
    """Read a hub's description of a repository, and check it: commit and digests become parts of paths."""
    sizes: dict[str, int] = {}
    digests: dict[str, str] = {}
    try:
        for sibling in info["siblings"]:
            file, large = sibling["rfilename"], sibling.get("lfs")
            if is_known(file):
                sizes[file] = int((large or sibling)["size"])
                digests[file] = large["sha256"] if large else sibling["blobId"]
        is_right = COMMIT.fullmatch(info["sha"]) and all(map(DIGEST.fullmatch, digests.values()))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _not_a_hub(repo) from error
    if not is_right or any(size < 0 for size in sizes.values()):
        raise _not_a_hub(repo)
    return AdapterFiles(HubSource.kind, repo, info["sha"], sizes, digests)


@contextmanager
def _open(client: httpx2.Client, url: str, name: str, offset: int) -> Iterator[tuple[int, Iterator[bytes]]]:
    headers = {"range": f"bytes={offset}-"} if offset else {}
    with _asking(name), client.stream("GET", url, headers=headers) as response:
        _check_status(response, name)
        # A server may ignore the range, and send the whole file.
        yield offset if response.status_code == 206 else 0, response.iter_raw()


def _is_right(path: Path, size: int, digest: str) -> bool:
    """Check a file by its digest: sha256 for large files, git's blob hash for others."""
    start = partial(hashlib.sha1, b"blob %d\0" % size, usedforsecurity=False)
    with path.open("rb") as file:
        return hashlib.file_digest(file, hashlib.sha256 if len(digest) == 64 else start).hexdigest() == digest


def _link(path: Path, blob: Path, name: str) -> None:
    with storing(f"adapter {name!r}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        new.symlink_to(os.path.relpath(blob, path.parent))
        os.replace(new, path)
