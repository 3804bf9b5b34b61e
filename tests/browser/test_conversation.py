"""Conversations in the playground: history, editing, regenerating and stored chats."""

import json
from typing import Any

import pytest
from playwright.sync_api import Route, expect

from tests.browser.playground import Playground
from tests.e2e.http_server import Server

pytestmark = pytest.mark.slow


def mock_chat(playground: Playground, *texts: str, reason: str = "stop") -> list[Any]:
    """Respond with these texts in turn, and return the received requests."""
    requests: list[Any] = []

    def fulfill(route: Route) -> None:
        text = texts[len(requests) % len(texts)]
        requests.append(route.request.post_data_json)
        event = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": reason}]}
        route.fulfill(body=f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n", content_type="text/event-stream")

    playground.page.route("**/v1/chat/completions", fulfill)
    return requests


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_model_sees_its_earlier_completions(playground: Playground, server: Server) -> None:
    playground.set(max_tokens="8")
    playground.show_tokens()
    playground.send_prompt("One", "tiny", "first")
    first = playground.completion_text("first")
    playground.send_prompt("Two", "tiny", "first")
    body = {"model": "first", "messages": [user("One"), assistant(first), user("Two")], "max_tokens": 8}
    choice = server.post("/v1/chat/completions", {**body, "temperature": 0}).json["choices"][0]
    assert playground.completion_text("first") == choice["message"]["content"]


@pytest.mark.slow
def test_model_added_later_sees_only_its_own_turns(playground: Playground) -> None:
    requests = mock_chat(playground, "Answer")
    playground.send_prompt("One", "tiny")
    playground.send_prompt("Two", "first")
    playground.send_prompt("Three", "first")
    assert [request["messages"] for request in requests] == [
        [user("One")],
        [user("Two")],
        [user("Two"), assistant("Answer"), user("Three")],
    ]


@pytest.mark.slow
def test_failed_turns_and_reasoning_are_not_sent_again(playground: Playground) -> None:
    requests = mock_chat(playground, "<think>Quietly.</think>\n\nLoudly.")
    playground.send_prompt("One", "first")
    assert playground.completion_text("first") == "Loudly."
    expect(playground.answer("first").locator(".reasoning")).to_contain_text("Quietly.")
    playground.page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(status=500, json={"error": "no"}), times=1
    )
    playground.send_prompt("Two", "first")
    expect(playground.answer("first").locator(".error")).to_contain_text("look at the server's log")
    playground.send_prompt("Three", "first")
    assert requests[-1]["messages"] == [user("One"), assistant("Loudly."), user("Three")]


def test_regenerate_replaces_completion(playground: Playground) -> None:
    requests = mock_chat(playground, "Old", "New")
    playground.send_prompt("Again?", "first")
    playground.answer("first").get_by_role("button", name="Regenerate").click()
    expect(playground.answer("first").locator(".body")).to_have_text("New")
    assert requests[0] == requests[1]
    expect(playground.at(".turn")).to_have_count(1)


def test_edited_message_replaces_later_turns(playground: Playground) -> None:
    requests = mock_chat(playground, "Answer")
    for text in ("One", "Two", "Three"):
        playground.send_prompt(text, "first")
    playground.at(".turn").nth(1).get_by_role("button", name="Edit message").click()
    field = playground.at(".turn textarea")
    expect(field).to_have_value("Two")
    field.fill("Second")
    field.press("Enter")
    playground.wait()
    expect(playground.at(".bubble")).to_have_text(["One", "Second"])
    assert requests[-1]["messages"] == [user("One"), assistant("Answer"), user("Second")]
    playground.at(".turn").first.get_by_role("button", name="Edit message").click()
    field.press("Escape")
    expect(playground.at(".bubble")).to_have_text(["One", "Second"])


@pytest.mark.slow
def test_token_limit_is_explained(playground: Playground) -> None:
    playground.set(max_tokens="5")
    mock_chat(playground, "Too long", reason="length")
    playground.send_prompt("Go on", "first")
    expect(playground.answer("first").locator(".badge")).to_have_text("cut off")
    expect(playground.answer("first")).to_contain_text("Stopped at the limit of 5 tokens. Raise Max tokens")


@pytest.mark.slow
def test_completion_can_be_copied(playground: Playground) -> None:
    playground.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    mock_chat(playground, "**Bold**\n\n```sh\nls -l\n```")
    playground.send_prompt("Copy", "first")
    for name, text in (("Copy code", "ls -l"), ("Copy completion of first", "**Bold**\n\n```sh\nls -l\n```")):
        playground.answer("first").get_by_role("button", name=name).click()
        expect(playground.answer("first").get_by_text("Copied")).to_have_count(1)
        assert playground.page.evaluate("navigator.clipboard.readText()") == text
        expect(playground.answer("first").get_by_text("Copied")).to_have_count(0)


@pytest.mark.slow
def test_chats_are_kept_until_tab_closes(playground: Playground) -> None:
    requests = mock_chat(playground, "Answer")
    playground.send_prompt("First chat", "first")
    playground.at("#new-chat").click()
    expect(playground.at("#welcome")).to_be_visible()
    playground.send_prompt("Second chat", "second")
    playground.reload()
    expect(playground.at(".bubble")).to_have_text(["Second chat"])
    playground.at("#chats").get_by_role("button", name="First chat", exact=True).click()
    expect(playground.at(".bubble")).to_have_text(["First chat"])
    playground.send_prompt("More", "first")
    assert requests[-1]["messages"] == [user("First chat"), assistant("Answer"), user("More")]
    playground.at("#chats").get_by_role("button", name="Delete chat: First chat").click()
    expect(playground.at("#chats .chat")).to_have_text(["Second chat"])
    assert "chats" not in json.dumps(playground.page.evaluate("({...localStorage})"))


@pytest.mark.slow
def test_chats_are_kept_in_browser_on_request(playground: Playground) -> None:
    mock_chat(playground, "Answer")
    playground.send_prompt("Remember this", "first")
    playground.open_panel("settings")
    playground.at("#keep-chats").check()
    other = Playground(playground.page.context.new_page(), playground.url).open()
    expect(other.at(".bubble")).to_have_text(["Remember this"])
    other.open_panel("settings")
    other.at("#keep-chats").uncheck()
    assert "lorax-chats" not in other.page.evaluate("Object.keys(localStorage)")


@pytest.mark.slow
def test_chats_can_be_switched_during_generation(playground: Playground) -> None:
    playground.set(max_tokens="30000")
    playground.send("Never stop", "first")
    expect(playground.answer("first")).to_have_attribute("data-state", "running")
    playground.at("#new-chat").click()
    playground.wait()
    playground.at("#chats .chat").click()
    expect(playground.answer("first").locator(".badge")).to_have_text("stopped by you")


@pytest.mark.slow
def test_view_scrolls_with_new_text_unless_user_scrolled_up(playground: Playground) -> None:
    mock_chat(playground, "\n\n".join(["A paragraph."] * 60))
    at_end = "() => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 2"
    playground.send_prompt("Long", "first")
    playground.page.wait_for_function(at_end)
    expect(playground.at("#latest")).to_be_hidden()
    playground.page.evaluate("scroller.scrollTop = 0")
    playground.at("#latest").click()
    playground.page.wait_for_function(at_end)
