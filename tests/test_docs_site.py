"""`make docs` builds a complete site that needs no other host."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow  # starts a server, and converts every page


class References(HTMLParser):
    """Collects the targets of links, and the sources of scripts, styles and images."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.assets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "link" and values.get("rel") in ("stylesheet", "icon", "preload"):
            self.assets.append(values["href"])
        if "src" in values:
            self.assets.append(values["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "--quiet", "build", "--strict", "--site-dir", str(folder)]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def read_references(page: Path) -> References:
    references = References()
    references.feed(page.read_text())
    return references


def test_every_document_is_a_page(site: Path) -> None:
    names = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert names <= {path.relative_to(site) for path in site.rglob("*.html")}


def test_pages_use_no_remote_assets(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert [each for each in read_references(page).assets if urlsplit(each).netloc] == [], page.name


def test_links_between_pages_lead_to_files(site: Path) -> None:
    count = 0
    for page in site.rglob("*.html"):
        if page.name == "404.html":  # its links start at the root of a host
            continue
        references = read_references(page)
        for link in references.links + references.assets:
            path = unquote(urlsplit(link).path)
            if path and not urlsplit(link).scheme and not urlsplit(link).netloc:
                assert (page.parent / path).exists(), f"{page.name}: {link}"
                count += 1
    assert count > 1000


def test_python_and_http_references_are_complete(site: Path) -> None:
    python = (site / "python-api.html").read_text()
    for name in ("LLM.generate", "LLM.stream", "SamplingParams", "StopParams"):
        assert re.search(rf'id="lorax_server\.\w+\.{re.escape(name)}"', python), name
    assert "/v1/chat/completions" in (site / "openapi.json").read_text()
    assert (site / "redoc.standalone.js").stat().st_size > 500_000
