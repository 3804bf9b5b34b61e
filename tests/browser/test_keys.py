"""The playground on a server with keys: the key is validated and stored in the tab only."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Route, expect

from tests.browser.playground import Playground, open_playground
from tests.e2e.http_server import Server, serving

KEY, WRONG = "secret-key", "wrong-key"

# Disables browser storage.
pytestmark = pytest.mark.slow
FORBID_STORAGE = """for (const kind of ["localStorage", "sessionStorage"]) {
    Object.defineProperty(window, kind, { get() { throw new DOMException("forbidden", "SecurityError"); } });
}"""


@pytest.fixture(scope="module")
def server_with_key(folder: Path) -> Iterator[Server]:
    with serving(folder, "--api-key", KEY, "--served-model-name", "tiny") as server:
        yield server


@pytest.fixture
def playground(browser: Browser, server_with_key: Server) -> Iterator[Playground]:
    with open_playground(browser, server_with_key.url) as playground:
        yield playground
        assert set(playground.refusals) <= {401}


def enter_key(playground: Playground, key: str) -> None:
    playground.at("#key").fill(key)
    playground.at("#key").press("Enter")


def check_key_is_accepted(playground: Playground) -> None:
    expect(playground.health).to_have_attribute("data-state", "ready")
    expect(playground.at("#key-form")).to_be_hidden()


def test_key_is_stored_in_tab_only(playground: Playground) -> None:
    playground.open("locked")
    expect(playground.at("#key")).to_be_visible()
    expect(playground.at("#models .chip")).to_have_count(0)
    enter_key(playground, WRONG)
    expect(playground.at("#key-error")).to_contain_text("The server rejected this key.")
    enter_key(playground, KEY)
    check_key_is_accepted(playground)
    playground.set(max_tokens="8")
    playground.send_prompt("May I?", "tiny", "first")
    assert playground.completion_text("first")
    curl = playground.answer("first").locator(".curl code").text_content() or ""
    assert "Bearer $LORAX_API_KEY" in curl
    assert KEY not in playground.page.content()
    assert KEY not in json.dumps(playground.page.evaluate("({...localStorage})"))
    playground.page.reload()
    check_key_is_accepted(playground)
    playground.at("#key-open").click()
    playground.at("#key-forget").click()
    expect(playground.health).to_have_attribute("data-state", "locked")
    assert "lorax-key" not in playground.page.evaluate("Object.keys(sessionStorage)")


def test_invalid_key_is_not_sent(playground: Playground) -> None:
    playground.open("locked")
    for key, reason in ((" ", "Enter a key."), ("ключ", "Invalid key"), ("two words", "Invalid key")):
        enter_key(playground, key)
        expect(playground.at("#key-error")).to_contain_text(reason)
        expect(playground.at("#key")).to_have_attribute("aria-invalid", "true")
    assert not any(address.endswith("/v1/models") for address in playground.requested_urls)


def test_key_is_replaced_only_by_accepted_key(playground: Playground) -> None:
    playground.open("locked")
    expect(playground.at("#key-cancel")).to_be_hidden()
    enter_key(playground, KEY)
    check_key_is_accepted(playground)
    playground.at("#key-open").click()
    for key, reason in (("", "Enter a key."), (WRONG, "The server rejected this key.")):
        enter_key(playground, key)
        expect(playground.at("#key-error")).to_contain_text(reason)
    playground.at("#key-cancel").click()
    expect(playground.at("#key-open")).to_be_focused()
    playground.page.reload()
    check_key_is_accepted(playground)


def test_late_response_to_previous_key_is_ignored(playground: Playground) -> None:
    def be_late(route: Route) -> None:
        enter_key(playground, KEY)
        expect(playground.at("#key-form")).to_be_hidden()
        route.continue_()  # unchanged: without a key

    playground.open("locked")
    playground.page.route("**/info", be_late, times=1)
    playground.refresh()
    check_key_is_accepted(playground)


def test_key_form_closes_if_server_needs_no_key(playground: Playground) -> None:
    playground.open("locked")
    enter_key(playground, WRONG)
    expect(playground.at("#key-error")).to_be_visible()
    playground.page.route("**/info", lambda route: route.continue_(headers=with_key(route)))
    playground.page.route("**/v1/*", lambda route: route.continue_(headers=with_key(route)))
    playground.refresh()
    check_key_is_accepted(playground)


def with_key(route: Route) -> dict[str, str]:
    return route.request.headers | {"authorization": f"Bearer {KEY}"}


def test_page_works_without_storage(playground: Playground) -> None:
    playground.page.add_init_script(FORBID_STORAGE)
    playground.open("locked")
    enter_key(playground, KEY)
    check_key_is_accepted(playground)
    playground.at("#theme").click()
    expect(playground.at("#theme")).to_have_text("Theme: light")
    playground.set(max_tokens="4")
    playground.send_prompt("Even so?", "tiny")
    assert playground.completion_text("tiny")
