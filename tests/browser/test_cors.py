"""Cross-origin requests from a browser, with the headers of OpenAI's SDK."""

from typing import Any

import pytest
from playwright.sync_api import Browser, Error

from tests.e2e.http_server import Server

pytestmark = pytest.mark.slow

SEND_PROMPT_SCRIPT = """async ({ url, body }) => {
    const headers = {
        "authorization": "Bearer any", "content-type": "application/json", "x-stainless-lang": "js",
        "x-stainless-os": "Unknown", "x-stainless-retry-count": "0", "x-stainless-runtime": "browser:chrome",
    };
    const init = { method: "POST", headers, body: JSON.stringify(body) };
    const reply = await fetch(`${url}/v1/chat/completions`, init);
    return { status: reply.status, id: reply.headers.get("x-request-id"), text: await reply.text() };
}"""
BODY: dict[str, Any] = {"model": "first", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


def send_prompt(browser: Browser, url: str, origin: str, **more: Any) -> Any:
    """Send a request from a page at `origin` and return the result."""
    context = browser.new_context()
    try:
        page = context.new_page()
        page.goto(f"{origin}/")
        return page.evaluate(SEND_PROMPT_SCRIPT, {"url": url, "body": {**BODY, **more}})
    finally:
        context.close()


def test_allowed_page_may_send_sdk_headers(browser: Browser, server: Server, other_origin: str) -> None:
    whole = send_prompt(browser, server.url, other_origin)
    assert (whole["status"], bool(whole["id"])) == (200, True)
    streamed = send_prompt(browser, server.url, other_origin, stream=True)
    assert streamed["text"].endswith("data: [DONE]\n\n")


def test_forbidden_page_gets_no_response(browser: Browser, server: Server, other_origin: str) -> None:
    with pytest.raises(Error, match="Failed to fetch"):
        send_prompt(browser, server.url, other_origin.replace("127.0.0.1", "localhost"))  # another origin
