"""OpenAI's SDK in a browser, on a page from another origin allowed with `--cors-allow-origin`.

The page imports the package files directly, without a bundler.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Page

from tests.browser.playground import TIMEOUT_MS, launch_browser
from tests.clients.conftest import Question, Server
from tests.clients.test_node import check, script_arguments


@pytest.fixture(scope="module")  # blocks event loops in other tests
def browser() -> Iterator[Browser]:
    with launch_browser() as browser:
        yield browser


@contextmanager
def visiting(browser: Browser, origin: str) -> Iterator[Page]:
    with browser.new_context() as context:
        page = context.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        page.goto(f"{origin}/page.html")
        page.wait_for_function("window.ask !== undefined")
        yield page


def test_page_from_allowed_origin_gets_completion(
    browser: Browser, server: Server, questions: dict[str, Question]
) -> None:
    with visiting(browser, server.origin) as page:
        result = page.evaluate("asked => window.ask(asked)", script_arguments(server, questions))
    check(result, questions)


def test_page_from_forbidden_origin_is_blocked(browser: Browser, server: Server) -> None:
    """Open the same page with another host name, which is a different origin."""
    with visiting(browser, server.origin.replace("127.0.0.1", "localhost")) as page:
        send_requests = "asked => window.ask(asked).then(() => null, (error) => error.constructor.name)"
        assert page.evaluate(send_requests, script_arguments(server, {})) == "APIConnectionError"
