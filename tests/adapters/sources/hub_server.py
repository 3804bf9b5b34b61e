"""A fake hub that implements the download API of the Hugging Face hub."""

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from tests.adapters.sources.server import Reply, Request, Server

# Larger files are stored in Git LFS, which names them by SHA-256.
LARGE = 10_000


def commit_of(files: dict[str, bytes]) -> str:
    return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


def blob_of(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def describe(file: str, content: bytes) -> dict[str, Any]:
    """Return a file entry as the hub API lists it."""
    described = {"rfilename": file, "size": len(content), "blobId": blob_of(content)}
    if len(content) > LARGE:
        pointer = b"a pointer to it"
        digest = hashlib.sha256(content).hexdigest()
        described["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": len(pointer)}
    return described


@dataclass
class Repo:
    files: dict[str, bytes]
    token: str | None = None  # required to read the repository
    gated: bool = False  # the file list is public, the files are not
    model_type: str | None = None  # in the repository info
    branches: dict[str, dict[str, bytes]] = field(default_factory=dict)
    announced: dict[str, Any] = field(default_factory=dict)  # overrides for API responses

    def at(self, revision: str) -> dict[str, bytes] | None:
        states = {"main": self.files, **self.branches}
        return states.get(revision) or next((state for state in states.values() if commit_of(state) == revision), None)


class HubServer(Server):
    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.supports_ranges = True
        self.files_are_at: str | None = None  # redirect file downloads to this server
        super().__init__()

    def key(self, request: Request) -> str:
        return "info" if request.path.startswith("/api/") else request.file

    def respond(self, request: Request) -> Reply:
        path = request.path.partition("?")[0]
        if result := re.fullmatch(r"/api/models/(.+)/revision/([^/]+)", path):
            return self.describe(request, result[1], unquote(result[2]))
        if result := re.fullmatch(r"/(.+)/resolve/([^/]+)/(.+)", path):  # slashes in revisions are quoted
            return self.send_file(request, result[1], unquote(result[2]), unquote(result[3]))
        return Reply(404)

    def describe(self, request: Request, name: str, revision: str) -> Reply:
        repo, files = self.repos.get(name), self.files_of(name, revision)
        if repo is None or files is None or not may_see(request, repo):
            return error_reply(repo, files)
        info: dict[str, Any]
        info = {"id": name, "sha": commit_of(files), "siblings": [describe(*item) for item in files.items()]}
        if repo.model_type:
            info["config"] = {"model_type": repo.model_type}
        return Reply(headers={"Content-Type": "application/json"}, body=json.dumps(info | repo.announced).encode())

    def send_file(self, request: Request, name: str, revision: str, file: str) -> Reply:
        repo, files = self.repos.get(name), self.files_of(name, revision)
        if repo is None or files is None or not may_read(request, repo):
            return error_reply(repo, files)
        headers = {"X-Repo-Commit": commit_of(files)}
        if file not in files:
            return Reply(404, headers | {"X-Error-Code": "EntryNotFound"})
        if self.files_are_at is not None:
            return Reply(302, headers | {"Location": self.files_are_at + request.path})
        described = describe(file, files[file])
        headers["ETag"] = f'"{described["lfs"]["sha256"] if "lfs" in described else described["blobId"]}"'
        return self.send_range(request, headers, files[file])

    def send_range(self, request: Request, headers: dict[str, str], content: bytes) -> Reply:
        wanted = re.fullmatch(r"bytes=(\d+)-", request.headers.get("range", ""))
        if wanted is None or not self.supports_ranges:
            return Reply(200, headers | {"Content-Length": str(len(content))}, content)
        start = int(wanted[1])
        if start >= len(content):
            return Reply(416)
        return Reply(
            206, headers | {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}, content[start:]
        )

    def files_of(self, name: str, revision: str) -> dict[str, bytes] | None:
        return self.repos[name].at(revision) if name in self.repos else None


def may_read(request: Request, repo: Repo) -> bool:
    return repo.token is None or request.headers.get("authorization") == f"Bearer {repo.token}"


def may_see(request: Request, repo: Repo) -> bool:
    return repo.gated or may_read(request, repo)


def error_reply(repo: Repo | None, files: dict[str, bytes] | None) -> Reply:
    if repo is None:
        return Reply(404, {"X-Error-Code": "RepoNotFound"})
    if files is None:
        return Reply(404, {"X-Error-Code": "RevisionNotFound"})
    if repo.gated:
        return Reply(403, {"X-Error-Code": "GatedRepo"})
    return Reply(401, {"X-Error-Message": "Invalid username or password."})
