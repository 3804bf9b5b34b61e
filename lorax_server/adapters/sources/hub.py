"""Provides adapters and base models from a Hugging Face hub, and caches them in the layout of huggingface_hub.

Requests do not use huggingface_hub (2.4), because it shares cookies between all callers in a process, retries for a
minute if a server hangs, and does not limit response sizes. See also `download.py`.
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

REVISION_PATTERN = re.compile(r"(?!.*(\.\.|//))[A-Za-z0-9][\w./-]*", re.ASCII)
COMMIT_PATTERN = re.compile(r"[0-9a-f]{40}")
DIGEST_PATTERN = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
MAX_INFO_BYTES = 1 << 22


class HubSource(RemoteSource):
    """A source of adapters in hub repositories. A name is `owner/name` or `owner/name@revision`.

    Requests use the caller's token or the configured token, never a token stored on this machine. In offline mode, all
    clients may use the files in the cache.
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
        if self._budget is not None and not offline:  # in offline mode, evicted files could not be downloaded again
            self._budget.add_cache(cache_dir)
        self._endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
        self._token = token
        self._offline = offline
        self._tls = httpx2.create_ssl_context()

    def authorize(self, name: str, token: str | None) -> None:
        """Raise an error unless the token grants access to the files. Listing files is not enough, because even gated
        repositories have a public file list.
        """
        repo, revision = self._parse_name(name)
        if self._offline:
            return
        label, url = self._label(name), self._file_url(repo, revision, CONFIG_FILE)
        with self._connect(token) as client, _convert_http_errors(label), client.stream("GET", url) as response:
            # `find` reports missing files.
            if (response.status_code, response.headers.get("x-error-code")) != (404, "EntryNotFound"):
                _check_status(response, label)

    def find(self, name: str, token: str | None) -> AdapterFiles:
        repo, revision = self._parse_name(name)
        if self._offline:
            return self._find_in_cache(name)
        files = self._read_info(repo, self._request_info(name, token))
        if not COMMIT_PATTERN.fullmatch(revision):
            ref = self._repo_folder(repo) / "refs" / revision
            with suppress(OSError):  # the file is needed only in offline mode
                ref.parent.mkdir(parents=True, exist_ok=True)
                ref.write_text(files.version)
        return files

    def base_model_type(self, name: str, token: str | None) -> str | None:
        """Return `model_type` from the repository info, or None. The info is public even if the files are gated."""
        try:
            config = None if self._offline else self._request_info(name, token).get("config")
        except AdapterError:
            return None
        described = config.get("model_type") if isinstance(config, dict) else None
        return described if isinstance(described, str) else super().base_model_type(name, token)

    def _request_info(self, name: str, token: str | None) -> Mapping[str, Any]:
        repo, revision = self._parse_name(name)
        url = f"{self._endpoint}/api/models/{repo}/revision/{quote(revision, safe='')}?blobs=true"
        label, content, deadline = self._label(name), bytearray(), time.monotonic() + self._timeout_s
        with self._connect(token) as client, _convert_http_errors(label), client.stream("GET", url) as response:
            _check_status(response, label)
            for chunk in response.iter_raw():  # without decompression, whose output size is unlimited
                content += chunk
                if len(content) > MAX_INFO_BYTES:
                    raise _make_response_error(label)
                if time.monotonic() > deadline:
                    raise SourceError(f"{label}: the hub responds too slowly; try again later")
        try:
            return parse_json(bytes(content))
        except ValueError as error:
            raise _make_response_error(label) from error

    def _read_info(self, repo: str, info: Mapping[str, Any]) -> AdapterFiles:
        """Validate the repository info and return its files. The commit and the digests must be valid, because they
        become paths.
        """
        try:
            siblings = {sibling["rfilename"]: sibling for sibling in info["siblings"]}
            chosen = {file: siblings[file].get("lfs") or siblings[file] for file in self._select_files(siblings)}
            sizes = {file: int(entry["size"]) for file, entry in chosen.items()}
            digests = {file: entry.get("sha256") or entry["blobId"] for file, entry in chosen.items()}
            is_valid = COMMIT_PATTERN.fullmatch(info["sha"]) and all(map(DIGEST_PATTERN.fullmatch, digests.values()))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _make_response_error(self._label(repo)) from error
        if not is_valid or any(size < 0 for size in sizes.values()):
            raise _make_response_error(self._label(repo))
        return AdapterFiles(self.kind, repo, info["sha"], sizes, digests)

    def _find_in_cache(self, name: str) -> AdapterFiles:
        repo, revision = self._parse_name(name)
        ref = self._repo_folder(repo) / "refs" / revision
        commit = ref.read_text() if os.path.isfile(ref) else revision
        folder = self._repo_folder(repo) / "snapshots" / commit
        paths = folder.rglob("*") if os.path.isdir(folder) else ()  # Path.is_dir raises if the name is too long
        found = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths if path.is_file()}
        sizes = {file: found[file] for file in self._select_files(found)} if found else {}
        if not sizes:
            raise self._make_not_cached_error(name)
        return AdapterFiles(self.kind, repo, commit, sizes)

    def _repo_folder(self, name: str) -> Path:
        return self._cache_dir / repo_folder_name(repo_id=name, repo_type="model")

    def _blob_name(self, files: AdapterFiles, file: str) -> str:
        if self._offline:
            raise self._make_not_cached_error(files.name)
        return files.tags[file]

    def _connect(self, token: str | None) -> httpx2.Client:
        # Clients are not shared, because cookies must not leak between callers.
        headers = {"user-agent": "lorax_server", "accept-encoding": "identity"}
        if bearer := token or self._token:
            headers["authorization"] = f"Bearer {bearer}"
        return httpx2.Client(headers=headers, timeout=self._timeout_s, follow_redirects=True, verify=self._tls)

    @contextmanager
    def _open(
        self, client: httpx2.Client, files: AdapterFiles, file: str, offset: int
    ) -> Iterator[tuple[int, Iterator[bytes]]]:
        label, url = self._label(files.name), self._file_url(files.name, files.version, file)
        headers = {"range": f"bytes={offset}-"} if offset else {}
        with _convert_http_errors(label), client.stream("GET", url, headers=headers) as response:
            _check_status(response, label)
            # Servers may ignore the range and send the whole file.
            yield offset if response.status_code == 206 else 0, response.iter_raw()

    def _make_checksum_test(self, client: httpx2.Client, files: AdapterFiles, file: str) -> Callable[[Path], bool]:  # noqa: ARG002
        return partial(_has_digest, size=files.sizes[file], digest=files.tags[file])

    def _file_url(self, repo: str, revision: str, file: str) -> str:
        return f"{self._endpoint}/{repo}/resolve/{quote(revision, safe='')}/{quote(file)}"

    def _parse_name(self, name: str) -> tuple[str, str]:
        repo, at, revision = name.partition("@")
        try:
            validate_repo_id(repo)
        except HFValidationError:
            repo = ""
        if not repo or (at and not REVISION_PATTERN.fullmatch(revision)):
            raise AdapterNotFoundError(
                f"{self._label(name)}: hub names have the form owner/name or owner/name@revision"
            )
        return repo, revision or constants.DEFAULT_REVISION

    def _make_not_cached_error(self, name: str) -> AdapterNotFoundError:
        return AdapterNotFoundError(f"{self._label(name)}: not found in the cache, and the server is in offline mode")


@contextmanager
def _convert_http_errors(label: str) -> Iterator[None]:
    try:
        yield
    except httpx2.HTTPError as error:
        reason = type(error).__name__
        raise SourceError(f"{label}: the hub cannot be reached ({reason}); try again later") from error


def _check_status(response: httpx2.Response, label: str) -> None:
    status = response.status_code
    if status in (401, 403):
        raise AdapterAccessError(
            f"{label}: the hub denies access ({status}); it may be private, gated or missing. Check the name, "
            "or pass a token with read access"
        )
    if status == 404:
        raise AdapterNotFoundError(f"{label}: the hub has no such repository, revision or file; check the name")
    if not response.is_success:
        raise SourceError(f"{label}: the hub returned status {status}; try again later")


def _make_response_error(label: str) -> SourceError:
    return SourceError(f"{label}: invalid response from the hub; check the server's hub endpoint")


def _has_digest(path: Path, size: int, digest: str) -> bool:
    """Return True if the file has this digest (SHA-256 for LFS files, otherwise the Git blob hash)."""
    start = partial(hashlib.sha1, b"blob %d\0" % size, usedforsecurity=False)
    with path.open("rb") as file:
        return hashlib.file_digest(file, hashlib.sha256 if len(digest) == 64 else start).hexdigest() == digest
