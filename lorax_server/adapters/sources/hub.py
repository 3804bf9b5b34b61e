"""Adapters and base models from a HuggingFace hub, cached in the layout of huggingface_hub.

Requests use a client of our own: huggingface_hub (2.4) has one client per process, whose cookies all callers share,
retries for a minute if a server hangs, and reads descriptions of any size. `download.py` lists why files are not
downloaded by `snapshot_download`.
"""

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
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

from lorax_server.adapters.sources.remote import RemoteSource
from lorax_server.adapters.sources.source import AdapterFiles
from lorax_server.errors import AdapterAccessError, AdapterError, AdapterNotFoundError, SourceError
from lorax_server.files.names import CONFIG_FILE
from lorax_server.files.strict_json import parse_json

REVISION = re.compile(r"(?!.*(\.\.|//))[A-Za-z0-9][\w./-]*", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")
DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
MAX_INFO_BYTES = 1 << 22


class HubSource(RemoteSource):
    """Repositories of a hub. A name is `owner/name` or `owner/name@revision`.

    Requests use the caller's token, otherwise the configured one, otherwise none; never a token stored on this machine.
    Offline, no request is sent, and all clients may use the files in the cache.
    """

    kind = "hub"

    def __init__(
        self,
        cache_dir: Path,
        endpoint: str | None = None,
        token: str | None = None,
        offline: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(cache_dir, **options)
        if self._budget is not None and not offline:  # offline, nothing could be downloaded again
            self._budget.add(cache_dir)
        self._endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
        self._token = token
        self._offline = offline
        self._tls = httpx2.create_ssl_context()

    def authorize(self, name: str, token: str | None) -> None:
        """Open a file: the file list of a gated repository is public."""
        repo, revision = self._parse(name)
        if self._offline:
            return
        what, url = self._what(name), self._file_url(repo, revision, CONFIG_FILE)
        with self._connect(token) as client, _requesting(what), client.stream("GET", url) as response:
            # `find` reports that the file is missing.
            if (response.status_code, response.headers.get("x-error-code")) != (404, "EntryNotFound"):
                _check_status(response, what)

    def find(self, name: str, token: str | None) -> AdapterFiles:
        repo, revision = self._parse(name)
        if self._offline:
            return self._find_cached(name)
        files = self._read_info(repo, self._request_info(name, token))
        if not COMMIT.fullmatch(revision):
            ref = self._repo_folder(repo) / "refs" / revision
            with suppress(OSError):  # only needed offline
                ref.parent.mkdir(parents=True, exist_ok=True)
                ref.write_text(files.version)
        return files

    def base_model_type(self, name: str, token: str | None) -> str | None:
        """Request the description first, which is public even if the files are not."""
        try:
            config = None if self._offline else self._request_info(name, token).get("config")
        except AdapterError:
            return None
        described = config.get("model_type") if isinstance(config, dict) else None
        return described if isinstance(described, str) else super().base_model_type(name, token)

    def _request_info(self, name: str, token: str | None) -> Mapping[str, Any]:
        repo, revision = self._parse(name)
        url = f"{self._endpoint}/api/models/{repo}/revision/{quote(revision, safe='')}?blobs=true"
        what, content, deadline = self._what(name), bytearray(), time.monotonic() + self._timeout_s
        with self._connect(token) as client, _requesting(what), client.stream("GET", url) as response:
            _check_status(response, what)
            for chunk in response.iter_raw():  # not decompressed, which could take any space
                content += chunk
                if len(content) > MAX_INFO_BYTES:
                    raise _not_a_hub(what)
                if time.monotonic() > deadline:
                    raise SourceError(f"{what}: the hub answers too slowly; try again later")
        try:
            return parse_json(bytes(content))
        except ValueError as error:
            raise _not_a_hub(what) from error

    def _read_info(self, repo: str, info: Mapping[str, Any]) -> AdapterFiles:
        """Read and check a repository description: its commit and digests become parts of paths."""
        try:
            siblings = {sibling["rfilename"]: sibling for sibling in info["siblings"]}
            chosen = {file: siblings[file].get("lfs") or siblings[file] for file in self._choose(siblings)}
            sizes = {file: int(entry["size"]) for file, entry in chosen.items()}
            digests = {file: entry.get("sha256") or entry["blobId"] for file, entry in chosen.items()}
            is_valid = COMMIT.fullmatch(info["sha"]) and all(map(DIGEST.fullmatch, digests.values()))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _not_a_hub(self._what(repo)) from error
        if not is_valid or any(size < 0 for size in sizes.values()):
            raise _not_a_hub(self._what(repo))
        return AdapterFiles(self.kind, repo, info["sha"], sizes, digests)

    def _find_cached(self, name: str) -> AdapterFiles:
        repo, revision = self._parse(name)
        ref = self._repo_folder(repo) / "refs" / revision
        commit = ref.read_text() if os.path.isfile(ref) else revision
        folder = self._repo_folder(repo) / "snapshots" / commit
        paths = folder.rglob("*") if os.path.isdir(folder) else ()  # Path.is_dir would raise if the name is too long
        found = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths if path.is_file()}
        sizes = {file: found[file] for file in self._choose(found)} if found else {}
        if not sizes:
            raise self._not_cached(name)
        return AdapterFiles(self.kind, repo, commit, sizes)

    def _repo_folder(self, name: str) -> Path:
        return self._cache_dir / repo_folder_name(repo_id=name, repo_type="model")

    def _blob_name(self, files: AdapterFiles, file: str) -> str:
        if self._offline:
            raise self._not_cached(files.name)
        return files.tags[file]

    def _connect(self, token: str | None) -> httpx2.Client:
        # No client is shared: cookies of one caller must not be sent for another.
        headers = {"user-agent": "lorax_server", "accept-encoding": "identity"}
        if bearer := token or self._token:
            headers["authorization"] = f"Bearer {bearer}"
        return httpx2.Client(headers=headers, timeout=self._timeout_s, follow_redirects=True, verify=self._tls)

    @contextmanager
    def _open(
        self, client: httpx2.Client, files: AdapterFiles, file: str, offset: int
    ) -> Iterator[tuple[int, Iterator[bytes]]]:
        what, url = self._what(files.name), self._file_url(files.name, files.version, file)
        headers = {"range": f"bytes={offset}-"} if offset else {}
        with _requesting(what), client.stream("GET", url, headers=headers) as response:
            _check_status(response, what)
            # A server may ignore the range, and send the whole file.
            yield offset if response.status_code == 206 else 0, response.iter_raw()

    def _make_check(self, client: httpx2.Client, files: AdapterFiles, file: str) -> Callable[[Path], bool]:  # noqa: ARG002
        return partial(_has_digest, size=files.sizes[file], digest=files.tags[file])

    def _file_url(self, repo: str, revision: str, file: str) -> str:
        return f"{self._endpoint}/{repo}/resolve/{quote(revision, safe='')}/{quote(file)}"

    def _parse(self, name: str) -> tuple[str, str]:
        repo, at, revision = name.partition("@")
        try:
            validate_repo_id(repo)
        except HFValidationError:
            repo = ""
        if not repo or (at and not REVISION.fullmatch(revision)):
            raise AdapterNotFoundError(f"{self._what(name)}: a hub's names look like owner/name or owner/name@revision")
        return repo, revision or constants.DEFAULT_REVISION

    def _not_cached(self, name: str) -> AdapterNotFoundError:
        return AdapterNotFoundError(f"{self._what(name)}: it is not in the cache, and the server is offline")


@contextmanager
def _requesting(what: str) -> Iterator[None]:
    try:
        yield
    except httpx2.HTTPError as error:
        reason = type(error).__name__
        raise SourceError(f"{what}: the hub cannot be reached ({reason}); try again later") from error


def _check_status(response: httpx2.Response, what: str) -> None:
    status = response.status_code
    if status in (401, 403):
        raise AdapterAccessError(
            f"{what}: the hub refuses it ({status}); it may be private, gated or not exist. Check the name, "
            "or give a token that may read it"
        )
    if status == 404:
        raise AdapterNotFoundError(f"{what}: the hub has no such repository, revision or file; check the name")
    if not response.is_success:
        raise SourceError(f"{what}: the hub answers with status {status}; try again later")


def _not_a_hub(what: str) -> SourceError:
    return SourceError(f"{what}: what answers is not a hub; check the server's hub endpoint")


def _has_digest(path: Path, size: int, digest: str) -> bool:
    """Verify a file by its digest: sha256 for large files, git's blob hash for others."""
    start = partial(hashlib.sha1, b"blob %d\0" % size, usedforsecurity=False)
    with path.open("rb") as file:
        return hashlib.file_digest(file, hashlib.sha256 if len(digest) == 64 else start).hexdigest() == digest
