"""The playground's files: they are served as they are, and no other file is."""

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
from tests.server.bench import Bench, Peer

ROOT = UI_FOLDER.parent.parent
FILES = sorted(path.name for path in UI_FOLDER.iterdir())
KINDS = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class Page:
    """The whole application, asked without a socket."""

    def __init__(self, **config: Any) -> None:
        bench = Bench(**config)
        self.app = make_app(bench.service)

    def get(self, path: str, method: str = "GET", **headers: str) -> Answer:
        return asyncio.run(self._get(path, method, headers))

    async def _get(self, path: str, method: str, headers: dict[str, str]) -> Answer:
        peer = Peer()
        named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "headers": named}
        scope |= {"query_string": b"", "server": ("host", 80), "scheme": "http", "root_path": "", "http_version": "1.1"}
        peer.arrivals.put_nowait({"type": "http.request", "body": b"", "more_body": False})
        await self.app(scope, peer.receive, peer.send)
        start = peer.sent[0]
        return Answer(start["status"], {name.decode(): value.decode() for name, value in start["headers"]}, peer.body)


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(api_keys=("secret",))  # which the page itself does not ask for


def text_of(name: str) -> str:
    return (UI_FOLDER / name).read_text()


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_served(page: Page, name: str) -> None:
    answer = page.get(f"/ui/{name}")
    assert (answer.status, answer.body) == (200, (UI_FOLDER / name).read_bytes())
    assert answer.headers["content-type"] == KINDS[Path(name).suffix]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-cache"


def test_the_page_is_at_the_folder_to_which_the_path_without_a_slash_leads(page: Page) -> None:
    assert page.get("/ui/").body == (UI_FOLDER / "index.html").read_bytes()
    moved = page.get("/ui")
    assert (moved.status, moved.headers["location"]) == (307, "ui/")


def test_the_policy_lets_nothing_in_from_elsewhere(page: Page) -> None:
    policy = page.get("/ui/").headers["content-security-policy"].split("; ")
    assert "default-src 'self'" in policy
    assert {"base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"} <= set(policy)
    assert not any("unsafe" in rule or "*" in rule for rule in policy)


def test_what_a_browser_has_is_not_sent_again(page: Page) -> None:
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
def test_nothing_else_is_there(page: Page, path: str) -> None:
    answer = page.get(path)
    assert answer.status == 404
    assert json.loads(answer.body) == {"error": "Not Found", "error_type": "not_found"}


def test_it_is_read_only(page: Page) -> None:
    answer = page.get("/ui/main.js", method="DELETE")
    assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")
    assert page.get("/ui/main.js", method="HEAD").status == 200


def test_the_api_does_not_tell_of_it(page: Page) -> None:
    assert not [path for path in page.app.openapi()["paths"] if path.startswith("/ui")]


def test_examples_are_those_of_the_model(page: Page, tmp_path: Path) -> None:
    assert json.loads(page.get("/ui/examples.json").body) == []
    examples = [{"title": "One", "prompt": "What?", "models": ["base"]}]
    (tmp_path / "examples.json").write_text(json.dumps(examples))
    answer = Page(examples=tmp_path / "examples.json").get("/ui/examples.json")
    assert (json.loads(answer.body), answer.headers["content-type"]) == (examples, "application/json")


def test_examples_that_cannot_be_read_are_a_mistake_of_the_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the examples file"):
        Page(examples=tmp_path / "none.json")


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
def test_examples_of_another_form_are_a_mistake_of_the_settings(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / "examples.json").write_text(content)
    with pytest.raises(ConfigError, match=f"examples.json: must be a JSON list of .*{reason}"):
        Page(examples=tmp_path / "examples.json")


# --- Contents of the files --------------------------------------------------------------------------------------------


def test_a_wheel_has_them() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for name in FILES:
        assert any(fnmatch.fnmatch(f"ui/{name}", pattern) for pattern in patterns["lorax_server"])


@pytest.mark.parametrize("name", FILES)
def test_they_name_nothing_outside(name: str) -> None:
    """Find no address in a file; the name of a format is none."""
    content = text_of(name).replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|//[a-z]+\.|@import|data:[a-z]+/", content)


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".js")])
def test_scripts_write_text_only_and_import_what_there_is(name: str) -> None:
    content = text_of(name)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", content)
    for imported in re.findall(r'from "\./(.+?)"', content):
        assert imported in FILES


def test_the_page_has_nothing_that_the_policy_forbids() -> None:
    content = text_of("index.html")
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", content)
    assert all("src=" in tag for tag in re.findall(r"<script\b.*?>", content))
    for name in re.findall(r'(?:src|href)="([^"#.][^"]*)"', content):
        assert name in FILES


def test_files_are_short() -> None:
    assert all(len(text_of(name).splitlines()) <= 400 for name in FILES)
    assert all(len(line) <= 120 for name in FILES for line in text_of(name).splitlines())
