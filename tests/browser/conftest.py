"""Fixtures: a browser, a server with a tiny model and distinct adapters, and a page."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser
from safetensors.torch import load_file, save_file

from tests.browser.playground import Playground, launch_browser, open_playground, serve_pages
from tests.e2e.http_server import Server, serving, write_model

HOSTILE = '<img src=x onerror="window.hacked=1">'
NAMES = ("third", "moved", HOSTILE, "team/deep")  # in addition to first and second; the last one is not listed
LENGTH = 32_768  # long enough to interact during generation


def write_models(folder: Path) -> None:
    write_model(folder)
    config = folder / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": LENGTH}))
    for place, name in enumerate(NAMES, 2):
        shutil.copytree(folder / "adapters" / "first", folder / "adapters" / name)
        weights = folder / "adapters" / name / "adapter_model.safetensors"
        save_file({key: tensor * place for key, tensor in load_file(weights).items()}, weights)


@pytest.fixture(scope="package")  # blocks event loops in other tests
def browser() -> Iterator[Browser]:
    with launch_browser() as browser:
        yield browser


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory, browser: Browser, forks: ForkServerContext) -> Path:
    folder = tmp_path_factory.mktemp("playground")
    write_models(folder)
    return folder


class OtherOriginHandler(BaseHTTPRequestHandler):
    """A page from another origin."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>elsewhere</title>")

    def log_message(self, *arguments: Any) -> None:
        """Suppress the request log."""


@pytest.fixture(scope="package")
def other_origin(browser: Browser) -> Iterator[str]:
    """An origin that CORS allows."""
    with serve_pages(OtherOriginHandler) as origin:
        yield origin


@pytest.fixture(scope="package")
def server(folder: Path, other_origin: str) -> Iterator[Server]:
    with serving(folder, "--served-model-name", "tiny", "--cors-allow-origin", other_origin) as server:
        yield server


@pytest.fixture
def visit(browser: Browser, server: Server) -> Iterator[Callable[..., Playground]]:
    """Return a function that creates a page without opening it. Options are passed to the browser context."""
    with ExitStack() as stack:

        def begin(url: str = server.url, **options: Any) -> Playground:
            return stack.enter_context(open_playground(browser, url, **options))

        yield begin


@pytest.fixture
def playground(visit: Callable[..., Playground]) -> Playground:
    return visit(viewport={"width": 1280, "height": 900}).open()
