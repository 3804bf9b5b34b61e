"""Completions in the playground: side by side, streamed, with token details."""

import json
import math
import re
from typing import Any

import pytest
from playwright.sync_api import Route, expect

from tests.browser.conftest import HOSTILE
from tests.browser.playground import DEVICE, DISK, FAILED, UNLISTED, Playground
from tests.e2e.http_server import Server

pytestmark = pytest.mark.slow

MODELS = ("tiny", "first", "second", "third")
UNKNOWN = "nobody"
NO_RATE = "not measured"

# Records the number of tokens per completion at each page change.
WATCH_GROWTH = """() => {
    window.growth = {};
    new MutationObserver(() => {
        for (const answer of document.querySelectorAll(".answer")) {
            const seen = (window.growth[answer.dataset.model] ??= []);
            const count = answer.querySelectorAll(".token").length;
            if (count && seen.at(-1) !== count) seen.push(count);
        }
    }).observe(document.getElementById("turns"), {childList: true, subtree: true});
}"""

# Delivers one event per frame, because busy machines draw few frames.
PACE = r"""() => {
    const { fetch } = window;
    const drawn = async () => { for (const _ of "12") await new Promise(requestAnimationFrame); };
    window.fetch = async (...request) => {
        const response = await fetch(...request);
        if (!response.headers.get("content-type")?.startsWith("text/event-stream")) return response;
        const paced = new TransformStream({
            async transform(text, controller) {
                for (const event of text.split(/(?<=\n\n)/)) {
                    controller.enqueue(event);
                    await drawn();
                }
            },
        });
        const texts = response.body.pipeThrough(new TextDecoderStream()).pipeThrough(paced);
        return new Response(texts.pipeThrough(new TextEncoderStream()), response);
    };
}"""

# Server state: `count` dropped requests; no running requests.
DROPPED = """async (count) => {
    const text = await (await fetch("../metrics")).text();
    return text.includes(`lorax_request_failure{err="dropped"} ${count}.0\\n`);
}"""
IDLE = """async () => {
    const { data } = await (await fetch("../v1/adapters")).json();
    return data.every((adapter) => adapter.requests === 0);
}"""


# Reads an endless stream byte by byte and returns its events and whether it was cancelled.
READ_BYTES = """async (bytes) => {
    const { stream } = await import(new URL("api.js", location));
    const result = { texts: [], error: "", isLeft: false };
    const body = new ReadableStream({
        start: (controller) => bytes.forEach((byte) => controller.enqueue(Uint8Array.of(byte))),
        cancel: () => { result.isLeft = true; },
    });
    const { fetch } = window;
    window.fetch = async () => { window.fetch = fetch; return new Response(body); };
    try {
        for await (const { text } of stream("somewhere", {})) result.texts.push(text);
    } catch (error) {
        result.error = error.message;
    }
    for (let turn = 0; turn < 1000 && !result.isLeft; turn += 1) await new Promise((done) => setTimeout(done));
    return result;
}"""


def chat(server: Server, model: str, prompt: str, **more: Any) -> Any:
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "temperature": 0, **more}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]


def test_base_model_and_three_adapters_complete_prompt(playground: Playground, server: Server) -> None:
    playground.set(max_tokens="80")
    playground.show_tokens()  # Markdown would change the text
    playground.page.evaluate(WATCH_GROWTH)
    playground.page.evaluate(PACE)
    playground.send_prompt("Hello there", *MODELS)
    answers = {model: playground.completion_text(model) for model in MODELS}
    assert len(set(answers.values())) == 4
    for model, answer in answers.items():
        choice = chat(server, model, "Hello there", max_tokens=80)
        assert answer == choice["message"]["content"]
        assert playground.fact(model, "reason") == choice["finish_reason"]
    growth = playground.page.evaluate("window.growth")
    assert all(len(growth[model]) > 1 for model in MODELS)  # tokens appeared incrementally
    assert all(seen == sorted(seen) for seen in growth.values())


# A clock that advances by `step` milliseconds per read.
CLOCK = "(step) => { let now = 0; performance.now = () => (now += step); }"


def test_completion_statistics_are_shown(playground: Playground, server: Server) -> None:
    playground.set(max_tokens="80")
    playground.page.evaluate(CLOCK, 100)  # otherwise all tokens may arrive together
    playground.send_prompt("How fast?", "tiny", "first")
    playground.open_panel("activity")
    for place, model in enumerate(("tiny", "first")):
        expected = chat(server, model, "How fast?", max_tokens=80, logprobs=True)
        count = str(len(expected["logprobs"]["content"]))
        assert playground.fact(model, "count") == count
        assert playground.fact(model, "rate").endswith(" tokens/s")
        assert playground.fact(model, "first").endswith(("ms", "s"))
        row = playground.at("#speeds tr").nth(place)
        expect(row.locator("th")).to_have_text(model)
        expect(row.locator("td").last).to_have_text(count)


@pytest.mark.parametrize(("step_ms", "rate"), [(5, NO_RATE), (100, "10.0 tokens/s")])
def test_rate_is_hidden_if_tokens_arrive_together(playground: Playground, step_ms: int, rate: str) -> None:
    answer(playground, *({"choices": [{"delta": {"content": text}}]} for text in "abc"))
    playground.page.evaluate(CLOCK, step_ms)
    playground.send_prompt("How fast?", "tiny")
    assert playground.fact("tiny", "count") == "3"
    assert playground.fact("tiny", "rate") == rate


def answer(playground: Playground, *events: dict[str, Any]) -> None:
    """Respond to chat requests with these events."""
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    playground.page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body))


def test_completions_are_announced_to_screen_readers(playground: Playground) -> None:
    answer(playground, {"choices": [{"delta": {"content": "Fine."}, "finish_reason": "stop"}]})
    playground.send_prompt("How are you?", "tiny", "first")
    expect(playground.at("#status")).to_have_text("tiny: done; first: done")
    playground.send_prompt("And now?", "tiny")
    expect(playground.at("#status")).to_have_text("tiny: Fine.")


@pytest.mark.parametrize(
    ("last", "error"),
    [
        ("[DONE]", ""),
        (json.dumps({"error": {"message": "the engine failed"}}), "the engine failed"),
        ("{", "JSON"),
    ],
)
def test_stream_in_small_chunks_is_shown_completely(playground: Playground, last: str, error: str) -> None:
    texts = ["a 🦥", "é\n\ndata: not this", "한"]
    events = [f"data: {json.dumps({'text': text}, ensure_ascii=False)}\n\n" for text in texts]
    body = ":\n\n".join([*events, f"data: {last}\n\n"])
    result = playground.page.evaluate(READ_BYTES, list(body.encode()))
    assert (result["texts"], result["isLeft"]) == (texts, True)
    assert error in result["error"] if error else not result["error"]


def test_token_probabilities_are_shown(playground: Playground, server: Server) -> None:
    playground.set(max_tokens="12")
    playground.show_tokens()
    playground.send_prompt("Why?", "first")
    expected = chat(server, "first", "Why?", max_tokens=12, logprobs=True, top_logprobs=5)["logprobs"]["content"]
    tokens, tooltip = playground.answer("first").locator(".token"), playground.at("#tooltip")
    expect(tooltip).to_be_hidden()
    expect(tokens).to_have_count(len(expected))
    for place, token in enumerate(expected[:3]):
        tokens.nth(place).hover()
        expect(tooltip).to_be_visible()
        assert share(tooltip.locator("strong").text_content()) == pytest.approx(probability(token), abs=0.01)
        rows = tooltip.locator("tr td:last-child").all_text_contents()
        assert [share(row) for row in rows] == pytest.approx(
            [probability(other) for other in token["top_logprobs"]], abs=0.01
        )
        expect(tokens.nth(place)).to_have_attribute("aria-describedby", "tooltip")
    playground.at("h1").hover()
    expect(tooltip).to_be_hidden()


def share(text: str | None) -> float:
    return float((text or "").removesuffix(" %"))


def probability(token: dict[str, Any]) -> float:
    return 100 * math.exp(token["logprob"])


def test_plain_text_mode_sends_completion_request(playground: Playground, server: Server) -> None:
    playground.set(mode="text", max_tokens="30")
    playground.show_tokens()
    playground.send_prompt("Once upon", "second")
    body = {"model": "second", "prompt": "Once upon", "max_tokens": 30, "temperature": 0, "logprobs": 5}
    choice = server.post("/v1/completions", body).json["choices"][0]
    assert playground.completion_text("second") == choice["text"]
    tokens = playground.answer("second").locator(".token")
    expect(tokens).to_have_count(len(choice["logprobs"]["tokens"]))
    tokens.first.hover()
    likeliest = math.exp(max(choice["logprobs"]["top_logprobs"][0].values()))
    assert share(playground.at("#tooltip strong").text_content()) == pytest.approx(100 * likeliest, abs=0.01)


@pytest.mark.slow
def test_token_probabilities_are_optional(playground: Playground) -> None:
    playground.set(max_tokens="60")
    with playground.page.expect_request("**/v1/chat/completions") as sent:
        playground.send_prompt("Surprise me", "tiny")
    assert "logprobs" not in (sent.value.post_data_json or {})
    expect(playground.answer("tiny").locator(".token")).to_have_count(0)
    playground.show_tokens()
    playground.send_prompt("Surprise me", "tiny")
    colors = "[...document.querySelectorAll('.token')].map((token) => getComputedStyle(token).backgroundColor)"
    assert len(set(playground.page.evaluate(colors))) > 1
    playground.at("#probabilities").uncheck()
    expect(playground.at(".token")).to_have_count(0)
    playground.at("#probabilities").check()
    playground.reload()
    expect(playground.at("#probabilities")).to_be_checked()


def test_adapters_move_between_tiers(playground: Playground) -> None:
    playground.set(max_tokens="8")
    playground.open_panel("activity")
    expect(playground.resident(DISK, "moved")).to_be_visible()
    playground.send_prompt("Where are you?", "moved")
    expect(playground.resident(DEVICE, "moved")).to_contain_text("1 use")
    expect(playground.resident(DISK, "moved")).to_have_count(0)
    expect(playground.chip("moved")).to_have_attribute("data-state", DEVICE)
    assert playground.fact("moved", "tier") == "on disk"
    playground.send_prompt("And now?", "moved")
    expect(playground.resident(DEVICE, "moved")).to_contain_text("2 uses")
    assert playground.fact("moved", "tier") == "on the device"


def test_adapter_is_loaded_by_name(playground: Playground) -> None:
    playground.open_picker()
    playground.at("#search").fill("team/deep")
    playground.at("#search").press("Enter")
    expect(playground.chip("team/deep")).to_have_attribute("data-state", DEVICE)
    expect(playground.at("#search")).to_have_value("")
    expect(playground.at("#search")).to_be_focused()
    playground.page.keyboard.press("Escape")
    playground.set(max_tokens="8")
    playground.send_prompt("Who are you?", "team/deep")
    assert playground.completion_text("team/deep")


@pytest.mark.slow
def test_loaded_adapter_missing_from_list_is_shown_separately(playground: Playground) -> None:
    nothing: dict[str, Any] = {"data": []}
    playground.page.route("**/v1/adapters?also=team%2Fdeep", lambda route: route.fulfill(json=nothing))
    playground.load("team/deep")
    expect(playground.chip("team/deep")).to_have_attribute("data-state", UNLISTED)
    playground.page.keyboard.press("Escape")
    playground.open_panel("activity")
    expect(playground.resident(UNLISTED, "team/deep")).to_be_visible()


@pytest.mark.slow
def test_load_can_be_cancelled(playground: Playground) -> None:
    playground.page.route("**/v1/completions", lambda _: playground.at("#load-cancel").click())
    playground.load("team/deep")
    expect(playground.at("#picker-error")).to_have_text("Loading was cancelled.")
    expect(playground.at("#loading")).to_be_hidden()
    expect(playground.at("#search")).to_have_value("team/deep")
    expect(playground.chip("team/deep")).to_have_count(0)


def test_unknown_adapter_error_is_shown_in_list(playground: Playground, server: Server) -> None:
    reason = server.post("/v1/completions", {"model": UNKNOWN, "prompt": "?"}).json["error"]["message"]
    playground.load(UNKNOWN)
    expect(playground.at("#picker-error")).to_have_text(reason)
    expect(playground.chip(UNKNOWN)).to_have_count(0)
    assert playground.refusals == [404]
    playground.at("#search").fill("")
    expect(playground.at("#picker-error")).to_be_hidden()


def test_missing_adapter_fails_only_its_completion(playground: Playground) -> None:
    def refuse(route: Route) -> None:
        if (route.request.post_data_json or {})["model"] == "second":
            error = {"message": f"no such adapter {HOSTILE}", "type": "not_found_error"}
            route.fulfill(status=404, json={"error": error})
        else:
            route.continue_()

    playground.page.route("**/v1/chat/completions", refuse)
    playground.set(max_tokens="8")
    playground.send_prompt("Still there?", "first", "second")
    error = playground.answer("second").locator(".error")
    expect(error).to_contain_text(f"no such adapter {HOSTILE}")
    expect(error).to_contain_text("Choose another model.")
    expect(playground.answer("second")).to_have_attribute("data-state", "failed")
    assert playground.completion_text("first")
    assert playground.page.evaluate("window.hacked") is None


def test_failed_adapter_is_marked_before_use(playground: Playground, server: Server) -> None:
    adapters = server.send("GET", "/v1/adapters").json
    for adapter in adapters["data"]:
        if adapter["id"] == "second":
            adapter |= {"state": "failed", "error": "its weights are truncated"}
    playground.page.route("**/v1/adapters*", lambda route: route.fulfill(json=adapters))
    playground.refresh()
    playground.open_picker()
    expect(playground.option("second")).to_have_attribute("data-state", FAILED)
    expect(playground.option("second")).to_contain_text("its weights are truncated")
    playground.option("second").click()
    expect(playground.chip("second")).to_contain_text("failed")
    playground.page.keyboard.press("Escape")
    playground.open_panel("activity")
    expect(playground.resident(FAILED, "second")).to_contain_text("its weights are truncated")


def test_error_during_stream_is_shown(playground: Playground) -> None:
    begun = {"choices": [{"index": 0, "delta": {"content": "So far"}, "logprobs": None, "finish_reason": None}]}
    failed = {"error": {"message": "the engine failed", "type": "server_error"}}
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in (begun, failed))
    playground.page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body))
    playground.send_prompt("Go on", "tiny")
    assert playground.completion_text("tiny") == "So far"
    expect(playground.answer("tiny").locator(".error")).to_contain_text("the engine failed")


def test_stop_cancels_running_requests(playground: Playground, server: Server) -> None:
    before = re.search(r'lorax_request_failure{err="dropped"} (\d+)', server.send("GET", "/metrics").body.decode())
    playground.set(max_tokens="30000")
    playground.open_panel("activity")
    playground.send("Never stop", "tiny", "first")
    for model in ("tiny", "first"):
        expect(playground.answer(model)).to_have_attribute("data-state", "running")
    playground.page.keyboard.press("Escape")
    for model in ("tiny", "first"):
        expect(playground.answer(model).locator(".badge")).to_have_text("stopped by you")
        assert 0 < int(playground.fact(model, "count")) < 30_000
    expect(playground.at("#stop")).to_be_hidden()
    playground.page.wait_for_function(DROPPED, arg=2 + int(before[1] if before else 0))
    playground.page.wait_for_function(IDLE)
    expect(playground.at("#activity-note")).to_contain_text("0 requests running")


def test_structured_completion_is_shown_as_tree(playground: Playground) -> None:
    record = {
        "name": {"enum": ["<b>x</b>"]},
        "tags": {"type": "array", "items": {"const": 1}, "maxItems": 2, "minItems": 2},
    }
    schema = {"type": "object", "properties": record, "required": ["name", "tags"], "additionalProperties": False}
    playground.set(max_tokens="60", schema=json.dumps(schema))
    with playground.page.expect_request("**/v1/chat/completions") as sent:
        playground.send_prompt("Hello", "first")
    response_format = (sent.value.post_data_json or {})["response_format"]
    assert response_format == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, "strict": True},
    }
    answer, tree = playground.completion_text("first"), playground.answer("first").locator(".tree")
    assert json.loads(answer) == {"name": "<b>x</b>", "tags": [1, 1]}
    expect(tree.locator("summary").first).to_have_text("2 fields")
    expect(tree.locator(".leaf").first).to_have_text('name: "<b>x</b>"')
    playground.set(schema="")
    playground.send_prompt("Hello", "first")
    expect(playground.answer("first").locator(".tree")).to_be_hidden()


def test_hostile_completion_is_escaped(playground: Playground) -> None:
    pieces = ["<script>window.hacked=1</script>", HOSTILE, "\n</div>"]
    events = [
        {"choices": [{"delta": {"content": text}, "logprobs": {"content": [hostile_token(text)]}}]} for text in pieces
    ]
    answer(playground, *events, {"choices": [{"delta": {}, "finish_reason": "stop"}]})
    playground.send_prompt("Attack", "tiny")
    assert playground.completion_text("tiny") == "".join(pieces).replace("\n", "")  # a line break element
    playground.show_tokens()
    playground.answer("tiny").locator(".token").nth(1).hover()
    assert playground.completion_text("tiny") == "".join(pieces)
    expect(playground.at("#tooltip tr th")).to_have_text(HOSTILE.replace(" ", "␣"))
    assert playground.page.evaluate("window.hacked") is None
    expect(playground.at("#turns img, #tooltip img, #turns script")).to_have_count(0)


def hostile_token(text: str) -> dict[str, Any]:
    return {"token": text, "logprob": -0.1, "top_logprobs": [{"token": text, "logprob": -0.1}]}


def test_hostile_name_is_escaped(playground: Playground) -> None:
    playground.open_panel("activity")
    expect(playground.at("#tiers .resident").filter(has_text=HOSTILE)).to_have_count(1)  # in any tier
    playground.set(max_tokens="4")
    playground.send_prompt("Who?", HOSTILE)
    expect(playground.answer(HOSTILE).locator("h3")).to_have_text(HOSTILE)
    expect(playground.chip(HOSTILE)).to_have_attribute("data-state", DEVICE)
    assert playground.page.evaluate("window.hacked") is None
