"""Layout, accessibility, parameters and reconnection of the page."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Route, expect

from tests.browser.conftest import HOSTILE
from tests.browser.playground import DEVICE, DISK, Playground
from tests.e2e.http_server import Server, serving

Visit = Callable[..., Playground]
NO_TEMPLATE = "This model has no chat template, so it continues your text."

# Text and background colors of the first visible element per selector.
pytestmark = pytest.mark.slow
CONTRAST = """(selectors) => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
    const over = (colours) => {
        canvas.clearRect(0, 0, 1, 1);
        for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
        return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const brightness = (rgb) => {
        const [r, g, b] = rgb.map((c) => c / 255).map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ratio = (element) => {
        const behind = [];
        for (let each = element; each; each = each.parentElement) {
            behind.unshift(getComputedStyle(each).backgroundColor);
        }
        const lights = [over(behind), over([...behind, getComputedStyle(element).color])].map(brightness).sort();
        return (Math.max(...lights) + 0.05) / (Math.min(...lights) + 0.05);
    };
    const seen = (selector) => [...document.querySelectorAll(selector)].find((element) => element.checkVisibility());
    return Object.fromEntries(selectors.map((selector) => [selector, ratio(seen(selector))]));
}"""
TEXTS = [
    *(
        "h1",
        "h1 span",
        "#served",
        "#health",
        "#theme",
        "footer a",
        "label",
        "#prompt",
        ".chip .name",
        ".chat[aria-current]",
    ),
    *("summary", ".note", "#send", "#models-open", ".tier h3", ".resident .name", ".resident .note", "#speeds td"),
    *(".bubble", ".answer h3", ".answer[data-state=done] .badge", ".answer[data-state=failed] .badge"),
    *(".error span", ".token[data-tint='4']", ".code-head span", ".code code", "p > code", ".body a", "blockquote p"),
]
MARKDOWN = "`code` and [link](https://example.org)\n\n> quote\n\n```python\nprint()\n```"


def test_no_horizontal_scroll_on_phone(visit: Visit) -> None:
    playground = visit(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True).open()
    playground.set(max_tokens="60", temperature="7")
    playground.at("#settings-close").tap()
    playground.send("x" * 200, "tiny", "first")
    expect(playground.at("#temperature-error")).to_be_visible()  # the settings open again
    playground.set(temperature="0")
    playground.show_tokens()
    playground.at("#settings-close").tap()
    playground.at("#send").tap()
    playground.wait()
    playground.answer("tiny").locator(".more summary").tap()
    playground.answer("first").locator(".token").last.tap()
    tooltip = playground.at("#tooltip").bounding_box()
    assert tooltip is not None
    assert tooltip["x"] >= 0
    assert tooltip["x"] + tooltip["width"] <= 390
    assert playground.page.evaluate("document.documentElement.scrollWidth") <= 390
    first, second = (playground.answer(model).bounding_box() for model in ("tiny", "first"))
    assert first is not None
    assert second is not None
    assert second["y"] >= first["y"] + first["height"]  # stacked vertically
    playground.at("#sidebar-open").tap()
    expect(playground.at("#chats")).to_contain_text("xxx")
    playground.at("#new-chat").tap()
    expect(playground.at("#sidebar")).to_be_hidden()
    expect(playground.at("#welcome")).to_be_visible()


def test_prompt_and_completions_fit_on_desktop(visit: Visit) -> None:
    playground = visit(viewport={"width": 1440, "height": 900}).open()
    playground.set(max_tokens="4")
    playground.at("#settings-close").click()
    playground.send_prompt("Is everything visible?", "tiny", "first", "second", "third")
    for model in ("tiny", "first", "second", "third"):
        expect(playground.answer(model)).to_be_in_viewport(ratio=1)
    expect(playground.at("#prompt")).to_be_in_viewport(ratio=1)
    prompt = playground.at("#composer").bounding_box()
    assert prompt is not None
    assert prompt["height"] <= 160
    expect(playground.at("#activity")).to_be_hidden()


def test_completions_are_side_by_side_on_wide_screen(playground: Playground) -> None:
    playground.set(max_tokens="4")
    playground.send_prompt("Stand in line", "tiny", "first", "second")
    boxes = [playground.answer(model).bounding_box() for model in ("tiny", "first", "second")]
    assert len({box["y"] for box in boxes if box}) == 1
    assert len({box["x"] for box in boxes if box}) == 3


def test_page_follows_light_and_dark_theme(visit: Visit) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    light, dark = (visit(color_scheme=scheme).open() for scheme in ("light", "dark"))
    seen = light.page.evaluate(colour), dark.page.evaluate(colour)
    assert seen[0] != seen[1]
    for theme, expected in (("light", seen[0]), ("dark", seen[1]), ("auto", seen[0])):
        light.at("#theme").click()
        expect(light.at("#theme")).to_have_text(f"Theme: {theme}")
        assert light.page.evaluate(colour) == expected
        light.page.reload()
        expect(light.at("#theme")).to_have_text(f"Theme: {theme}")
        assert light.page.evaluate(colour) == expected


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_sufficient_contrast(visit: Visit, scheme: str) -> None:
    playground = visit(color_scheme=scheme).open()
    playground.set(max_tokens="60")
    playground.show_tokens()
    playground.send_prompt("Can you read this?", "first")
    refused = json.dumps({"error": {"message": "no"}})
    events = [{"choices": [{"delta": {"content": MARKDOWN}, "finish_reason": "length"}]}]
    written = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    playground.page.route(
        "**/v1/chat/completions",
        lambda route: (
            route.fulfill(status=424, body=refused)
            if "second" in request_body(route)["model"]
            else route.fulfill(body=written, content_type="text/event-stream")
        ),
    )
    playground.send_prompt("And this?", "third", "second")
    playground.open_panel("activity")
    expect(playground.resident(DEVICE, "first")).to_be_visible()
    contrast = playground.page.evaluate(CONTRAST, TEXTS)
    assert {name: ratio for name, ratio in contrast.items() if ratio < 4.5} == {}


def request_body(route: Route) -> dict[str, Any]:
    body: Any = route.request.post_data_json
    assert isinstance(body, dict)
    return body


def test_reduced_motion_stops_animations(visit: Visit, server: Server) -> None:
    playground = visit(reduced_motion="reduce").open()
    playground.choose("first")
    with server.paused():
        playground.send("The quick brown fox", "first")
        expect(playground.answer("first")).to_have_attribute("data-state", "waiting")
        animation = "body => getComputedStyle(body, '::after').animationName"
        assert playground.answer("first").locator(".body").evaluate(animation) == "none"
        playground.page.emulate_media(reduced_motion="no-preference")
        assert playground.answer("first").locator(".body").evaluate(animation) == "blink"
    playground.page.keyboard.press("Escape")
    playground.wait()


def test_page_is_usable_with_keyboard_only(playground: Playground) -> None:
    keyboard = playground.page.keyboard
    expect(playground.at("#prompt")).to_be_focused()
    playground.at("h1").click()
    playground.at(".skip").focus()
    keyboard.press("Enter")
    expect(playground.at("#prompt")).to_be_focused()
    tab_to(playground, "#settings-open", "Shift+Tab")
    keyboard.press("Enter")
    expect(playground.at("#settings-close")).to_be_focused()
    tab_to(playground, "#max_tokens")
    keyboard.type("20")
    tab_to(playground, "#probabilities")
    keyboard.press("Space")
    keyboard.press("Escape")
    expect(playground.at("#settings")).to_be_hidden()
    expect(playground.at("#settings-open")).to_be_focused()
    tab_to(playground, "#models-open")
    keyboard.press("Enter")
    expect(playground.at("#search")).to_be_focused()
    keyboard.type("secon")
    expect(playground.option("second")).to_have_class("active")
    expect(playground.at("#search")).to_have_attribute("aria-activedescendant", "option-0")
    keyboard.press("Enter")
    expect(playground.option("second")).to_have_attribute("aria-selected", "true")
    keyboard.press("Escape")
    expect(playground.at("#models-open")).to_be_focused()
    tab_to(playground, "#prompt")
    keyboard.type("Typed")
    keyboard.press("Shift+Enter")
    keyboard.type("in two lines")
    keyboard.press("Enter")
    playground.wait()
    expect(playground.at(".bubble")).to_have_text("Typed\nin two lines")
    assert playground.completion_text("second")
    token = playground.answer("tiny").locator(".token")
    token.first.focus()
    expect(playground.at("#tooltip")).to_be_visible()
    keyboard.press("ArrowRight")
    expect(token.nth(1)).to_be_focused()
    expect(token.nth(1)).to_have_attribute("aria-describedby", "tooltip")
    keyboard.press("Control+Home")  # left to the browser
    expect(token.nth(1)).to_be_focused()
    keyboard.press("End")
    expect(token.last).to_be_focused()
    keyboard.press("Tab")  # a completion is one tab stop
    expect(playground.at("#tooltip")).to_be_hidden()
    expect(playground.answer("tiny").locator("footer button").first).to_be_focused()


def tab_to(playground: Playground, selector: str, key: str = "Tab") -> None:
    for _ in range(60):
        playground.page.keyboard.press(key)
        if playground.page.evaluate("(selector) => document.activeElement.matches(selector)", selector):
            return
    raise AssertionError(f"{key} does not lead to {selector}")


def test_held_enter_key_sends_one_request(playground: Playground) -> None:
    playground.set(max_tokens="8")
    playground.choose("tiny")
    playground.at("#prompt").fill("Once")
    playground.at("#prompt").focus()
    for key in ("Enter", "Enter", "Enter"):
        playground.page.keyboard.down(key)
    playground.wait()
    expect(playground.at(".turn")).to_have_count(1)
    expect(playground.at("#prompt")).to_have_value("")
    expect(playground.at("#prompt-error")).to_be_hidden()


def test_each_escape_press_does_one_action(playground: Playground, server: Server) -> None:
    keyboard, running = playground.page.keyboard, playground.at("body[data-running=true]")
    playground.set(max_tokens="30000")
    playground.show_tokens()
    playground.open_panel("activity")
    playground.send("Never stop", "first")
    expect(playground.answer("first").locator(".token").first).to_be_attached()
    with server.paused():
        playground.answer("first").locator(".token").first.hover()
        expect(playground.at("#tooltip")).to_be_visible()
        keyboard.press("Escape")
        expect(playground.at("#tooltip")).to_be_hidden()
        playground.open_picker()
        keyboard.press("Escape")
        expect(playground.at("#picker")).to_be_hidden()
        playground.at("#filter").fill("second")
        keyboard.press("Escape")
        expect(playground.at("#filter")).to_have_value("")
        expect(running).to_be_attached()
        playground.at("#prompt").focus()
        keyboard.press("Escape")
        expect(running).not_to_be_attached()
    expect(playground.answer("first").locator(".badge")).to_have_text("stopped by you")


def test_focus_is_kept_when_adapters_update(playground: Playground, server: Server) -> None:
    adapters = server.send("GET", "/v1/adapters").json
    adapters["data"].append(adapters["data"][0] | {"id": "newcomer"})
    playground.choose("first", "third")
    playground.chip("third").get_by_role("button").focus()
    playground.open_panel("activity")
    playground.chip("third").get_by_role("button").focus()
    playground.page.route("**/v1/adapters", lambda route: route.fulfill(json=adapters))
    playground.refresh()
    expect(playground.at(".resident[data-adapter=newcomer]")).to_be_visible()
    expect(playground.chip("third").get_by_role("button")).to_be_focused()


def test_page_works_behind_path_prefix(visit: Visit, server: Server) -> None:
    """Open the page behind a proxy with a path prefix."""
    prefix = f"{server.url}/some/where"
    playground = visit(prefix)
    playground.page.route(
        f"{prefix}/**", lambda route: route.continue_(url=route.request.url.replace(prefix, server.url))
    )
    playground.open(path="ui/")
    playground.set(max_tokens="4")
    playground.send_prompt("Where am I?", "first")
    assert playground.completion_text("first")
    assert [each for each in playground.requested_urls if not each.startswith(f"{prefix}/")] == []


def test_all_controls_have_accessible_names(playground: Playground) -> None:
    nameless = """[...document.querySelectorAll("input, select, textarea, button, a, summary")]
        .filter((each) => !each.labels?.length && !each.ariaLabel && !each.textContent.trim()).map((each) => each.id)"""
    playground.set(max_tokens="4")
    playground.send_prompt("Is everything labeled?", "first", "second")
    assert playground.page.evaluate(nameless) == []


# --- Request parameters -----------------------------------------------------------------------------------------------


def test_parameters_are_sent(playground: Playground) -> None:
    playground.set(max_tokens="7", temperature="0.5", top_p="0.9", top_k="40", seed="-3", system=" Be brief. ")
    with playground.page.expect_request("**/v1/chat/completions") as sent:
        playground.send_prompt("Say it", "first")
    assert sent.value.post_data_json == {
        "model": "first",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say it"}],
        **{"max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "seed": -3},
        **{"stream": True, "stream_options": {"include_usage": True}},
    }
    curl = playground.answer("first").locator(".curl code").text_content() or ""
    assert json.loads(curl.partition(" -d '")[2].removesuffix("'")) == sent.value.post_data_json
    playground.reload()
    playground.show_tokens()
    playground.at("#new-chat").click()
    playground.set(top_p="", top_k="", seed="", system="", temperature="", mode="text")
    expect(playground.at("#max_tokens")).to_have_value("7")
    with playground.page.expect_request("**/v1/completions") as sent:
        playground.send_prompt("Go on", "first")
    assert sent.value.post_data_json == {
        **{"model": "first", "prompt": "Go on", "max_tokens": 7, "logprobs": 5},
        **{"stream": True, "stream_options": {"include_usage": True}},
    }


BAD_VALUES = (
    *(("max_tokens", ""), ("max_tokens", "0"), ("max_tokens", "1.5"), ("temperature", "2.1"), ("temperature", "-1")),
    *(("top_p", "0"), ("top_p", "1.1"), ("top_k", "-1"), ("seed", "0.5"), ("seed", "1e30")),
    *(("schema", "{"), ("schema", "[1]"), ("schema", "null")),
)


def test_invalid_parameters_are_rejected(playground: Playground) -> None:
    """Use one page for all values, because opening a page is slow."""
    for name, value in BAD_VALUES:
        before = playground.at(f"#{name}").input_value()
        playground.set(**{name: value})
        playground.send("Hello", "tiny")
        expect(playground.at("#prompt-error")).to_have_text("Correct the settings.")
        expect(playground.at(f"#{name}-error")).to_contain_text("Not valid JSON" if value == "{" else "Must be a ")
        expect(playground.at(f"#{name}")).to_be_focused()
        playground.at("#prompt").fill("")  # clears its error
        expect(playground.at("[id$=-error]:not(:empty)")).to_have_count(1)
        playground.set(**{name: before})
    expect(playground.at(".turn")).to_have_count(0)
    assert not any("completions" in address for address in playground.requested_urls)


def test_prompt_and_model_are_required(playground: Playground) -> None:
    playground.send("  ", "tiny")
    expect(playground.at("#prompt-error")).to_have_text("Enter a message.")
    playground.chip("tiny").get_by_role("button").click()
    playground.at("#prompt").fill("Hello")
    playground.at("#send").click()
    expect(playground.at("#prompt-error")).to_have_text("Add a model at the top of the page.")
    expect(playground.at(".turn")).to_have_count(0)


def test_examples_are_filled_in(visit: Visit) -> None:
    examples = [
        {"title": "One", "prompt": "First prompt", "models": ["base", "third", "gone"]},
        {"title": "Two", "prompt": "Second prompt", "models": ["second"]},
    ]
    playground = visit()
    playground.page.route("**/ui/examples.json", lambda route: route.fulfill(json=examples))
    playground.open()
    expect(playground.at("#prompt")).to_have_value("")
    for place, models in enumerate((["tiny", "third"], ["second"])):
        playground.at("#examples button").nth(place).click()
        expect(playground.at("#prompt")).to_have_value(str(examples[place]["prompt"]))
        assert playground.selected() == models


def test_examples_load_after_failure(visit: Visit) -> None:
    examples = [{"title": "One", "prompt": "First prompt", "models": ["second"]}]
    playground = visit()
    playground.page.route("**/ui/examples.json", fail)
    playground.open("lost")
    playground.page.route("**/ui/examples.json", lambda route: route.fulfill(json=examples))
    playground.refresh()
    expect(playground.at("#examples button")).to_contain_text("First prompt")
    expect(playground.health).to_have_text("ready")


def fail(route: Route) -> None:
    route.fulfill(status=503, json={"error": "not now"})


# --- Adapter list and reconnection ------------------------------------------------------------------------------------


def test_thousand_adapters_are_shown(visit: Visit) -> None:
    names = [f"adapter-{number:04}" for number in range(1000)]
    base = {"id": "tiny", "parent": None}
    models = {"data": [base, *({"id": name, "parent": "tiny"} for name in names)]}
    nothing: dict[str, Any] = {"source": "local", "bytes": None, "pinned": False, "requests": 0, "uses": 0}
    adapters = {"data": [{"id": name, "state": "on disk", "error": None, **nothing} for name in names]}
    adapters["data"][7] |= {"state": "being prepared", "requests": 2}
    adapters["data"][8] |= {"state": "failed", "error": "its files are broken"}
    playground = visit()
    playground.page.route("**/v1/models", lambda route: route.fulfill(json=models))
    playground.page.route("**/v1/adapters", lambda route: route.fulfill(json=adapters))
    playground.open()
    playground.open_panel("activity")
    expect(playground.tier(DISK).locator("h3 .note")).to_have_text("998")
    expect(playground.tier(DISK)).to_contain_text("and 968 more")
    expect(playground.tier("loading")).to_contain_text("2 running")
    expect(playground.tier("failed")).to_contain_text("its files are broken")
    playground.open_picker()
    expect(playground.at("#picker-note")).to_have_text("1,001 models. Type to search.")
    assert playground.at(".resident, [role=option]").count() < 100
    playground.at("#search").fill("-0500")
    playground.option("adapter-0500").click()
    expect(playground.chip("adapter-0500")).to_be_visible()
    playground.page.keyboard.press("Escape")
    playground.at("#filter").fill("0999")
    expect(playground.tier(DISK).locator(".resident .name")).to_have_text(["adapter-0999"])


def test_at_most_six_models_are_compared(playground: Playground) -> None:
    playground.choose("tiny", "first", "second", "third", "moved", HOSTILE)
    playground.load("team/deep")
    expect(playground.at("#picker-error")).to_have_text("Remove a model first: at most 6 can be compared.")
    assert len(playground.selected()) == 6


def test_filter_queries_server_for_more_adapters(visit: Visit) -> None:
    """The filter queries the server for names that are not on the page."""
    nothing: dict[str, Any] = {"source": "local", "bytes": None, "pinned": False, "requests": 0, "uses": 0}
    queries: list[str] = []
    near = ["near-by"]

    def respond(route: Route) -> None:
        queries.append(route.request.url.partition("?")[2])
        names = ["far-away"] if "search=far" in queries[-1] else near
        data = [{"id": name, "state": "on disk", "error": None, **nothing} for name in names]
        route.fulfill(json={"data": data, "has_more": names is near, "next": "name:near-by"})

    playground = visit()
    playground.page.route("**/v1/adapters*", respond)
    playground.open().open_panel("activity")
    expect(playground.at("#activity-note")).to_contain_text("shown; search to find more")
    playground.at("#filter").fill("far")
    expect(playground.resident(DISK, "far-away")).to_be_visible()
    assert "search=far" in queries[-1]
    playground.at("#filter").fill("")
    expect(playground.resident(DISK, "near-by")).to_be_visible()
    playground.open_picker()
    playground.at("#search").fill("far")
    expect(playground.option("far-away")).to_contain_text("on disk")
    playground.at("#search").fill("")
    expect(playground.option("near-by")).to_contain_text("on disk")
    with playground.page.expect_request("**/v1/models"):  # the model list has changed
        near.append("newly-named")


def test_page_reconnects_to_different_server(visit: Visit, server: Server) -> None:
    playground = visit()
    info = server.send("GET", "/info").json | {"max_total_tokens": 64}
    playground.page.route("**/info", lambda route: route.fulfill(json=info), times=1)
    playground.open()
    expect(playground.at("#max_tokens")).to_have_value("32")
    playground.page.route("**/v1/chat/completions", refuse_chat)
    playground.send_prompt("With a template?", "tiny", "first")
    expect(playground.answer("first")).to_contain_text(NO_TEMPLATE)
    playground.page.unroute("**/v1/chat/completions")

    models = {"data": [{"id": "other", "parent": None}, {"id": "first", "parent": "other"}]}
    playground.page.route("**/v1/models", lambda route: route.fulfill(json=models))
    playground.page.route("**/v1/adapters", fail)
    playground.refresh()
    expect(playground.health).to_have_text("The server reports an error: not now")
    playground.page.unroute("**/v1/adapters")
    playground.refresh()
    expect(playground.at("#served")).to_have_text("other")
    expect(playground.page).to_have_title("other · lorax playground")
    assert playground.selected() == ["other", "first"]
    expect(playground.at("#max_tokens")).to_have_value("1024")
    with playground.page.expect_request("**/v1/chat/completions"):
        playground.send_prompt("And now?", "first")


def refuse_chat(route: Route) -> None:
    route.fulfill(status=400, json={"error": {"message": "no", "code": "no_chat_template"}})


def test_page_adapts_to_server_without_chat_template(browser: Browser, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        (tmp_path / "model" / name).unlink(missing_ok=True)
    with browser.new_context() as context:
        with serving(folder) as server:
            playground = Playground(context.new_page(), server.url).open()
        expect(playground.health).to_contain_text("Cannot reach the server. Check that it is running")
        playground.send("Anybody?", *playground.selected())
        expect(playground.at(".answer .error").first).to_contain_text("Cannot reach the server.")
        with serving(tmp_path, "--port", str(server.port), "--served-model-name", "other") as server:
            expect(playground.health).to_have_text("ready")
            expect(playground.at("#served")).to_have_text("other")
            continue_without_template(playground, server)


def continue_without_template(playground: Playground, server: Server) -> None:
    playground.at("#new-chat").click()
    playground.set(max_tokens="8")
    playground.send_prompt("Once", "first")
    body = {"model": "first", "prompt": "Once", "max_tokens": 8, "temperature": 0}
    text = server.post("/v1/completions", body).json["choices"][0]["text"]
    assert playground.completion_text("first") == text
    expect(playground.answer("first")).to_contain_text(NO_TEMPLATE)
    expect(playground.answer("first").locator(".curl code")).to_contain_text("v1/completions")
    playground.answer("first").get_by_role("button", name="Continue").click()
    playground.wait()
    more = server.post("/v1/completions", body | {"prompt": "Once" + text}).json["choices"][0]["text"]
    assert playground.completion_text("first") == text + more
