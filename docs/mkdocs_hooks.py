"""MkDocs hooks: add pages that are not in this folder to the site.

These are the README and other Markdown files of the repository, the Python API from docstrings, and the HTTP API from
the OpenAPI document of a running server.
"""

import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import fastapi_offline
from mkdocs.structure.files import File, Files

DOCS = Path(__file__).parent
ROOT = DOCS.parent
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
    "SECURITY.md": "security-policy.md",
    "demo/README.md": "demo.md",
}
FILES = (
    "LICENSE",
    "demo/results.json",
    "deploy/grafana-dashboard.json",
    "deploy/prometheus-alerts.yml",
    "deploy/ray/serve.yaml",
)
REDOC = Path(fastapi_offline.__file__).parent / "static/redoc.standalone.js"
PYTHON_API = """\
# Python API

`LLM` runs the engine inside a Python script, without HTTP.

::: lorax_server.llm.LLM

::: lorax_server.types
    options:
      members: [SamplingParams, StopParams, Structure, Alternatives]
"""
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
READY = re.compile(rb"ready: (http://\S+)")
HTTP_API = """\
<!DOCTYPE html>
<title>HTTP API - lorax_server</title>
<meta charset="utf-8">
<redoc spec-url="openapi.json"></redoc>
<script src="redoc.standalone.js"></script>
"""


def on_files(files: Files, config: Any) -> Files:
    """Add pages and files from other folders, and generated references."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=_map_links((ROOT / source).read_text(), ROOT / source)))
    for path in (*(ROOT / name for name in FILES), REDOC):
        files.append(File.generated(config, path.name, abs_src_path=str(path)))
    files.append(File.generated(config, "python-api.md", content=PYTHON_API))
    files.append(File.generated(config, "http-reference.html", content=HTTP_API))
    files.append(File.generated(config, "openapi.json", content=_fetch_openapi()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Correct links from pages in `docs/` to files outside of it."""
    is_generated = page.file.generated_by is not None
    return markdown if is_generated else _map_links(markdown, Path(page.file.abs_src_path))


def _map_links(markdown: str, source: Path) -> str:
    """Replace links from `source` to files outside `docs/` by links to their copies on the site."""

    def replace(match: re.Match[str]) -> str:
        target = (source.parent / match[1]).resolve()
        name = target.relative_to(ROOT).as_posix()
        if target.is_relative_to(DOCS):
            site_path = target.relative_to(DOCS).as_posix()
        else:
            site_path = target.name if name in FILES else PAGES[name]
        folder = source.parent.relative_to(DOCS) if source.is_relative_to(DOCS) else Path()
        return "](" + "../" * len(folder.parts) + site_path

    return LINK.sub(replace, markdown)


def _fetch_openapi() -> bytes:
    """Return the OpenAPI document of a server with the demo model."""
    command = [sys.executable, "-m", "lorax_server.cli", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT) as server:
        try:
            assert server.stdout is not None
            lines = []
            for line in server.stdout:
                lines.append(line)
                if found := READY.search(line):
                    with urllib.request.urlopen(f"{found[1].decode()}/openapi.json") as response:
                        document: bytes = response.read()
                        return document
            raise RuntimeError(b"the server did not start:\n" + b"".join(lines))
        finally:
            server.terminate()
