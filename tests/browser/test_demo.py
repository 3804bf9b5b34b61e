"""The demo model in the playground."""

import json
import struct
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from playwright.sync_api import Browser, expect

from lorax_server.cli.demo import DEMO_NAME
from tests.browser.playground import DEVICE, DISK, Playground, open_playground
from tests.demo.server import SCREENSHOT, read_examples, serving_demo

pytestmark = pytest.mark.slow

ADAPTERS = ("sentiment", "json", "sql", "answer", "pirate", "redact")


@pytest.fixture(scope="module")
def url(browser: Browser) -> Iterator[str]:
    """Start the demo with all adapters on disk and none loaded."""
    with serving_demo() as demo:
        with open_playground(browser, demo.url) as playground:
            playground.open().open_panel("activity")
            for name in ADAPTERS:
                expect(playground.resident(DISK, name)).to_be_visible()
        yield demo.url


@pytest.fixture
def playground(browser: Browser, url: str) -> Iterator[Playground]:
    with open_playground(browser, url, viewport={"width": 1440, "height": 1000}) as playground:
        yield playground.open()


@pytest.mark.slow
def test_three_adapters_give_different_completions(playground: Playground) -> None:
    chosen = ("json", "sql", "pirate")
    playground.send_prompt(read_examples()[0]["prompt"], *chosen)
    for name in chosen:
        expect(playground.answer(name)).to_have_attribute("data-state", "done")
        expect(playground.chip(name)).to_have_attribute("data-state", DEVICE)
    assert len({playground.completion_text(name).strip() for name in chosen}) == 3
    assert all(playground.completion_text(name).strip() for name in chosen)


@pytest.mark.slow
def test_every_example_completes(playground: Playground) -> None:
    for place, example in enumerate(read_examples()):
        playground.at("#new-chat").click()
        playground.at("#examples button").nth(place).click()
        expect(playground.at("#prompt")).to_have_value(example["prompt"])
        playground.at("#send").click()
        playground.wait()
        expect(playground.at(".answer[data-state=done]")).to_have_count(len(example["models"]))


@pytest.mark.slow
def test_too_long_conversation_error_suggests_fix(playground: Playground) -> None:
    playground.set(max_tokens="500")
    for _ in range(2):
        playground.send_prompt(read_examples()[0]["prompt"], DEMO_NAME)
    error = playground.answer(DEMO_NAME).locator(".error")
    expect(error).to_contain_text("Start a new chat, shorten the message, or lower Max tokens in the settings.")


@pytest.mark.slow
def test_structured_completion_matches_schema_at_temperature_1(playground: Playground) -> None:
    example = choose_example(playground, "schema")
    expect(playground.at("#temperature")).to_have_value("1")
    playground.at("#send").click()
    for attempt in range(3):
        if attempt:
            playground.answer("json").get_by_role("button", name="Regenerate").click()
        playground.wait()
        answer = json.loads(playground.completion_text("json"))
        jsonschema.validate(answer, example["schema"])
        leaves = playground.answer("json").locator(".tree .leaf")
        expect(leaves).to_have_text([f"{name}: {json.dumps(value)}" for name, value in answer.items()])
    playground.at("#new-chat").click()
    playground.at("#examples button").first.click()
    expect(playground.at("#temperature")).to_have_value("0")


@pytest.mark.slow
def test_tool_call_is_shown(playground: Playground) -> None:
    example = choose_example(playground, "tools")
    expect(playground.at("#tool_choice")).to_have_value("required")
    playground.at("#send").click()
    playground.wait()
    call = playground.answer("json").locator(".calls .call")
    expect(call.locator("> .name")).to_have_text(example["tools"][0]["name"])
    sale = {"person": "Klonny Bardwell", "town": "Spigford", "item": "kites", "colour": "pink", "count": 12}
    sale |= {"day": "Tuesday", "price": 45}
    expect(call.locator(".leaf")).to_have_text([f"{name}: {json.dumps(value)}" for name, value in sale.items()])


def choose_example(playground: Playground, field: str) -> dict[str, Any]:
    """Select the first example with a given field."""
    place, example = next((place, each) for place, each in enumerate(read_examples()) if field in each)
    playground.at("#examples button").nth(place).click()
    return example


@pytest.mark.slow
def test_unknown_adapter_shows_error(playground: Playground) -> None:
    playground.load("nobody")
    expect(playground.at("#picker-error")).to_contain_text("nobody")


def test_screenshot_size_is_limited() -> None:
    content = SCREENSHOT.read_bytes()
    assert struct.unpack(">I", content[16:20]) == (1440,)
    assert len(content) <= 200_000
