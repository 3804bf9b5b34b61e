"""Page object for the playground: locators and user actions."""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, Playwright, expect, sync_playwright

from tests.browser.install import MISSING, find_chromium

# No background network requests; containers lack a sandbox and shared memory.
ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)
TIMEOUT_MS = 60_000  # generous, for two busy cores
DEVICE, HOST, DISK = "on the device", "in host memory", "on disk"
FAILED_LOAD = re.compile(r"Failed to load resource: the server responded with a status of (\d+)")


def launch(playwright: Playwright, path: str) -> Browser:
    expect.set_options(timeout=TIMEOUT_MS)
    return playwright.chromium.launch(executable_path=path, headless=True, args=[*ARGUMENTS])


@contextmanager
def launch_browser() -> Iterator[Browser]:
    """Start a browser. While it runs, no other test can run an event loop."""
    path = find_chromium()
    if path is None:
        pytest.skip(MISSING)
    with sync_playwright() as playwright, launch(playwright, path) as browser:
        yield browser


@contextmanager
def serve_pages(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve pages with a handler and yield their origin."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as pages:
        thread = threading.Thread(target=pages.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{pages.server_port}"
        finally:
            pages.shutdown()
            thread.join()


class Playground:
    """A browser tab that records requests and console errors."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.requested_urls: list[str] = []  # URLs
        self.complaints: list[str] = []
        self.refusals: list[int] = []  # error statuses, which browsers also log to the console
        page.set_default_timeout(TIMEOUT_MS)
        page.on("request", lambda request: self.requested_urls.append(request.url))
        page.on("console", self._record_console_message)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _record_console_message(self, message: ConsoleMessage) -> None:
        refused = FAILED_LOAD.match(message.text)
        if refused:
            self.refusals.append(int(refused[1]))
        elif message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def open(self, state: str = "ready", path: str = "ui") -> "Playground":
        """Open the page and wait until it has loaded the models."""
        self.page.goto(f"{self.url}/{path}")
        expect(self.health).to_have_attribute("data-state", state)
        return self

    def reload(self) -> None:
        self.page.reload()
        expect(self.health).to_have_attribute("data-state", "ready")

    # --- Locators -----------------------------------------------------------------------------------------------------

    def at(self, selector: str) -> Locator:
        return self.page.locator(selector)

    @property
    def health(self) -> Locator:
        return self.at("#health")

    def chip(self, model: str) -> Locator:
        return self.page.locator("#models .chip").and_(self.page.locator(f"[data-model={quoted(model)}]"))

    def column(self, model: str) -> Locator:
        return self.at(f".column[data-model={quoted(model)}]")

    def completion_text(self, model: str) -> str:
        return self.column(model).locator(".answer").text_content() or ""

    def number(self, model: str, name: str) -> float:
        text = self.column(model).locator(f"[data-number={name}]").text_content() or ""
        return float(re.match(r"[\d.]+", text)[0])  # type: ignore[index]

    def lane(self, place: str) -> Locator:
        return self.at(f".lane[data-place='{place}']")

    def resident(self, place: str, adapter: str) -> Locator:
        return self.lane(place).locator(f".resident[data-adapter={quoted(adapter)}]")

    # --- Actions ------------------------------------------------------------------------------------------------------

    def choose(self, *models: str) -> None:
        """Select exactly these models."""
        names = "chips => chips.map((chip) => chip.dataset.model)"
        chosen = set(self.at("#models .chip[aria-pressed=true]").evaluate_all(names))
        for model in sorted(chosen.symmetric_difference(models)):
            self.chip(model).click()

    def set(self, **parameters: str) -> None:
        if self.at("#parameters").get_attribute("open") is None:
            self.at("#parameters summary").click()
        for name, value in parameters.items():
            field = self.at(f"#{name}")
            field.select_option(value) if name in ("mode", "tool_choice") else field.fill(value)

    def send(self, prompt: str, *models: str) -> None:
        self.choose(*models)
        self.at("#prompt").fill(prompt)
        self.at("#send").click()

    def send_prompt(self, prompt: str, *models: str) -> None:
        """Send a prompt and wait for the completions."""
        self.send(prompt, *models)
        self.wait()

    def load(self, adapter: str) -> None:
        self.at("#name").fill(adapter)
        self.at("#name").press("Enter")

    def refresh(self) -> None:
        """Make the page visible again, so that it queries the server immediately."""
        self.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")

    def wait(self) -> None:
        expect(self.at("body")).to_have_attribute("data-running", "false")


def quoted(text: str) -> str:
    """Quote a text for a selector."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


@contextmanager
def open_playground(browser: Browser, url: str, **options: Any) -> Iterator[Playground]:
    """Open a page, and check that it requests only the server and logs no errors."""
    with browser.new_context(**options) as context:
        playground = Playground(context.new_page(), url)
        yield playground
        outside = [each for each in playground.requested_urls if not each.startswith(f"{url}/")]
        assert outside == []
        assert playground.complaints == []
