"""The playground serves its files, and no others, with safe headers."""

import asyncio
import fnmatch
import json
import re
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lorax_server.errors import ConfigError
from lorax_server.server.app import make_app
from lorax_server.server.routes.playground import UI_FOLDER
from tests.server.service_harness import Peer, ServiceHarness

ROOT = UI_FOLDER.parent.parent
FILES = sorted(path.name for path in UI_FOLDER.iterdir())
KINDS = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class PlaygroundResponse(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class PlaygroundApp:
    """The ASGI application, called without a socket."""

    def __init__(self, **config: Any) -> None:
        harness = ServiceHarness(**config)
        self.app = make_app(harness.service)

    def get(self, path: str, method: str = "GET", **headers: str) -> PlaygroundResponse:
        return asyncio.run(self._get(path, method, headers))

    async def _get(self, path: str, method: str, headers: dict[str, str]) -> PlaygroundResponse:
        peer = Peer()
        named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "headers": named}
        scope |= {"query_string": b"", "server": ("host", 80), "scheme": "http", "root_path": "", "http_version": "1.1"}
        peer.arrivals.put_nowait({"type": "http.request", "body": b"", "more_body": False})
        await self.app(scope, peer.receive, peer.send)
        start = peer.sent[0]
        return PlaygroundResponse(
            start["status"], {name.decode(): value.decode() for name, value in start["headers"]}, peer.body
        )


@pytest.fixture(scope="module")
def page() -> PlaygroundApp:
    return PlaygroundApp(api_keys=("secret",))  # the page itself needs no key


def read_text(name: str) -> str:
    return (UI_FOLDER / name).read_text()


@pytest.mark.parametrize("name", FILES)
def test_playground_files_are_served(page: PlaygroundApp, name: str) -> None:
    response = page.get(f"/ui/{name}")
    assert (response.status, response.body) == (200, (UI_FOLDER / name).read_bytes())
    assert response.headers["content-type"] == KINDS[Path(name).suffix]
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-cache"


def test_ui_redirects_to_trailing_slash(page: PlaygroundApp) -> None:
    assert page.get("/ui/").body == (UI_FOLDER / "index.html").read_bytes()
    moved = page.get("/ui")
    assert (moved.status, moved.headers["location"]) == (307, "ui/")


def test_content_security_policy_allows_only_own_origin(page: PlaygroundApp) -> None:
    policy = page.get("/ui/").headers["content-security-policy"].split("; ")
    assert "default-src 'self'" in policy
    assert {"base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"} <= set(policy)
    assert not any("unsafe" in rule or "*" in rule for rule in policy)


def test_matching_etag_returns_304(page: PlaygroundApp) -> None:
    etag = page.get("/ui/main.js").headers["etag"]
    again = page.get("/ui/main.js", if_none_match=etag)
    assert (again.status, again.body, again.headers["etag"]) == (304, b"", etag)
    assert page.get("/ui/main.js", if_none_match='"another"').status == 200
    assert page.get("/ui/api.js").headers["etag"] != etag


@pytest.mark.parametrize(
    "path",
    [
        "/ui/nothing.js",
        "/ui/../config.py",
        "/ui/..%2fconfig.py",
        "/ui/%2e%2e/config.py",
        "/ui/..\\config.py",
        "/ui//etc/passwd",
        "/ui/./main.js",
        "/ui/main.js/",
        "/ui/\x00",
        "/ui/MAIN.JS",
        "/uix",
    ],
)
def test_unknown_paths_return_404(page: PlaygroundApp, path: str) -> None:
    response = page.get(path)
    assert response.status == 404
    assert json.loads(response.body) == {"error": "Not Found", "error_type": "not_found"}


def test_playground_is_read_only(page: PlaygroundApp) -> None:
    response = page.get("/ui/main.js", method="DELETE")
    assert (response.status, response.headers["allow"]) == (405, "GET, HEAD")
    assert page.get("/ui/main.js", method="HEAD").status == 200


def test_playground_is_not_in_openapi(page: PlaygroundApp) -> None:
    assert not [path for path in page.app.openapi()["paths"] if path.startswith("/ui")]


def test_examples_file_is_served(page: PlaygroundApp, tmp_path: Path) -> None:
    assert json.loads(page.get("/ui/examples.json").body) == []
    examples = [{"title": "One", "prompt": "What?", "models": ["base"]}]
    (tmp_path / "examples.json").write_text(json.dumps(examples))
    response = PlaygroundApp(examples=tmp_path / "examples.json").get("/ui/examples.json")
    assert (json.loads(response.body), response.headers["content-type"]) == (examples, "application/json")


def test_missing_examples_file_is_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the examples file"):
        PlaygroundApp(examples=tmp_path / "none.json")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "truncated"),
        ("{}", "Expected `array`"),
        ("[1]", "Expected `object`"),
        ('[{"title": "One", "prompt": "What?"}]', "missing required field `models`"),
        ('[{"title": "One", "prompt": null, "models": []}]', r"\$\[0\].prompt"),
        ('[{"title": "One", "prompt": "What?", "models": "base"}]', r"\$\[0\].models"),
    ],
)
def test_invalid_examples_file_is_config_error(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / "examples.json").write_text(content)
    with pytest.raises(ConfigError, match=f"examples.json: must be a JSON list of .*{reason}"):
        PlaygroundApp(examples=tmp_path / "examples.json")


# --- File contents ----------------------------------------------------------------------------------------------------


def test_wheel_includes_playground_files() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for name in FILES:
        assert any(fnmatch.fnmatch(f"ui/{name}", pattern) for pattern in patterns["lorax_server"])


@pytest.mark.parametrize("name", FILES)
def test_files_contain_no_external_urls(name: str) -> None:
    """Files contain no external URLs, except the SVG namespace."""
    content = read_text(name).replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|//[a-z]+\.|@import|data:[a-z]+/", content)


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".js")])
def test_scripts_avoid_html_injection_and_missing_imports(name: str) -> None:
    content = read_text(name)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", content)
    for imported in re.findall(r'from "\./(.+?)"', content):
        assert imported in FILES


def test_page_complies_with_content_security_policy() -> None:
    content = read_text("index.html")
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", content)
    assert all("src=" in tag for tag in re.findall(r"<script\b.*?>", content))
    for name in re.findall(r'(?:src|href)="([^"#.][^"]*)"', content):
        assert name in FILES


def test_playground_files_are_small() -> None:
    assert all(len(read_text(name).splitlines()) <= 400 for name in FILES)
    assert all(len(line) <= 120 for name in FILES for line in read_text(name).splitlines())
