"""One prompt for several adapters: choices, streams, limits, permissions and errors."""

from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from lorax_server.errors import AdapterNotFoundError
from lorax_server.server.access.keys import KeyRing
from tests.server.fake_server import Reply, Routes, chat, complete, generate
from tests.server.routes.test_routes import CHAT, COMPLETIONS, KEYS, NATIVE, STREAM, set_template
from tests.server.service_harness import ids

ADAPTERS = ["poet", "base", "pirate"]
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    NATIVE: (NATIVE, generate(adapter_ids=ADAPTERS)),
    COMPLETIONS: (COMPLETIONS, complete(models=ADAPTERS)),
    CHAT: (CHAT, chat(models=ADAPTERS)),
}


@pytest.fixture
def routes() -> Routes:
    routes = Routes(["poet", "pirate"])
    set_template(routes)
    return routes


def check_requests(routes: Routes, count: int = 1) -> None:
    """Check that each adapter got the same prompt `count` times, and that the prompt was tokenized once."""
    identities = ["hash of poet", "", "hash of pirate"]
    assert [each.adapter_identity for each in routes.engine.added] == [
        name for name in identities for _ in range(count)
    ]
    assert len({id(each.prompt_ids) for each in routes.engine.added}) == 1


@pytest.mark.parametrize("path", REQUESTS)
def test_response_has_a_choice_for_each_adapter(path: str, routes: Routes) -> None:
    reply = routes.post(*REQUESTS[path])
    assert reply.status == 200
    check_requests(routes)
    choices = reply.json["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert [choice.get("model") or choice["adapter_id"] for choice in choices] == ADAPTERS
    assert reply.headers["x-adapter-id"] == "poet,__base_model__,pirate"
    assert reply.headers["x-adapter-hash"] == "hash of poet,hash of pirate"
    assert "x-adapter-tier" not in reply.headers
    if path != NATIVE:
        assert reply.json["model"] == "poet,base,pirate"
        usage, num_prompt_tokens = reply.json["usage"], len(routes.engine.added[0].prompt_ids)
        assert usage["prompt_tokens"] == 3 * num_prompt_tokens
        assert usage["completion_tokens"] == 3 * len(ids("quick"))
        assert usage["prompt_tokens_details"]["cached_tokens"] == 9  # three for each adapter


def test_details_and_lists_of_the_lorax_routes(routes: Routes) -> None:
    details = routes.post(NATIVE, generate(adapter_ids=ADAPTERS, details=True)).json["choices"]
    assert [choice["details"]["generated_tokens"] for choice in details] == [len(ids("quick"))] * 3
    items = routes.post("/", generate(adapter_ids=ADAPTERS)).json
    assert [(item["index"], item["adapter_id"], item["generated_text"]) for item in items] == [
        (index, name, "quick") for index, name in enumerate(ADAPTERS)
    ]


@pytest.mark.parametrize(("path", "make"), [(COMPLETIONS, complete), (CHAT, chat)])
def test_several_choices_per_model_are_grouped_by_model(path: str, make: Any, routes: Routes) -> None:
    choices = routes.post(path, make(models=ADAPTERS, n=2, seed=3)).json["choices"]
    assert [choice["model"] for choice in choices] == ["poet", "poet", "base", "base", "pirate", "pirate"]
    check_requests(routes, 2)
    seeds = [each.sampling.seed for each in routes.engine.added]
    assert seeds == seeds[:2] * 3  # as in separate requests with this seed


def test_several_prompts_are_grouped_by_model(routes: Routes) -> None:
    choices = routes.post(COMPLETIONS, complete(prompt=["ask", "tell"], models=["poet", "pirate"], echo=True)).json
    assert [(choice["model"], choice["text"]) for choice in choices["choices"]] == [
        ("poet", "askquick"),
        ("poet", "tellquick"),
        ("pirate", "askquick"),
        ("pirate", "tellquick"),
    ]


def read_stream(reply: Reply) -> dict[tuple[int, str], str]:
    """Return the text of each choice in a stream."""
    texts: dict[tuple[int, str], str] = {}
    for event in reply.events:
        for choice in event.get("choices", [event]):
            text = choice["token"]["text"] if "token" in choice else choice.get("text")
            if text is None:
                text = choice["delta"].get("content") or ""
            key = choice["index"], choice.get("model") or choice["adapter_id"]
            texts[key] = texts.get(key, "") + text
    return texts


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (STREAM, generate(adapter_ids=ADAPTERS)),
        (COMPLETIONS, complete(models=ADAPTERS, stream=True)),
        (CHAT, chat(models=ADAPTERS, stream=True)),
    ],
)
def test_streams_are_interleaved(path: str, body: dict[str, Any], routes: Routes) -> None:
    reply = routes.post(path, body)
    assert reply.status == 200
    assert read_stream(reply) == dict.fromkeys(enumerate(ADAPTERS), "quick")
    choices = [choice for event in reply.events for choice in event.get("choices", [event])]
    assert [choice["index"] for choice in choices] != sorted(choice["index"] for choice in choices)


def test_openai_client_accepts_the_model_of_a_choice(routes: Routes) -> None:
    completion = ChatCompletion.model_validate(routes.post(*REQUESTS[CHAT]).json)
    assert [(choice.model_extra or {})["model"] for choice in completion.choices] == ADAPTERS
    chunk = ChatCompletionChunk.model_validate(routes.post(CHAT, chat(models=ADAPTERS, stream=True)).events[0])
    assert (chunk.choices[0].model_extra or {})["model"] in ADAPTERS
    text = Completion.model_validate(routes.post(*REQUESTS[COMPLETIONS]).json)
    assert (text.choices[2].model_extra or {})["model"] == "pirate"


# --- Errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (COMPLETIONS, complete("poet", models=["pirate"]), "`model` and `models` name different models"),
        (CHAT, chat(models=["pirate"], adapter_id="poet"), "`adapter_id` or `models`"),
        (CHAT, chat(models=["pirate"], merged_adapters={"ids": ["poet"]}), "`merged_adapters` or `models`"),
        (CHAT, chat(models=["poet", "pirate"], n=65), "at most 128 completions"),
        (COMPLETIONS, complete(models=["poet", "pirate"], n=65), "at most 128 completions"),
        (NATIVE, generate(adapter_id="poet", adapter_ids=["pirate"]), "`adapter_ids` may be provided"),
        (NATIVE, generate(adapter_ids=["pirate"], best_of=2, temperature=0.5), "`best_of` != 1"),
    ],
)
def test_conflicting_fields_are_rejected(path: str, body: dict[str, Any], message: str, routes: Routes) -> None:
    reply = routes.post(path, body)
    assert reply.status in (400, 422)
    assert message in reply.message
    assert not routes.engine.added


@pytest.mark.parametrize("names", [[], ["poet"] * 33, ["poet", 3], "poet", {"poet": 1}, [["poet"]], [None]])
@pytest.mark.parametrize(
    ("path", "make", "field"),
    [(NATIVE, generate, "adapter_ids"), (COMPLETIONS, complete, "models"), (CHAT, chat, "models")],
)
def test_invalid_lists_are_rejected(path: str, make: Any, field: str, names: Any, routes: Routes) -> None:
    reply = routes.post(path, make(**{field: names}))
    assert reply.status in (400, 422)
    assert field in reply.message
    assert not routes.engine.added


@pytest.mark.parametrize("path", REQUESTS)
def test_unknown_adapter_fails_like_a_single_request(path: str, routes: Routes) -> None:
    routes.resolutions["pirate"] = AdapterNotFoundError("adapter 'pirate' not found")
    single = {NATIVE: generate(adapter_id="pirate"), COMPLETIONS: complete("pirate"), CHAT: chat("pirate")}[path]
    expected, reply = routes.post(path, single), routes.post(*REQUESTS[path])
    assert (reply.status, reply.message) == (expected.status, expected.message)
    if path != NATIVE:
        assert [each.json["error"]["param"] for each in (expected, reply)] == ["model", "models"]
    assert not routes.engine.added


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize("name", ["secret", "base"])
def test_every_adapter_is_authorized(path: str, name: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    routes = Routes(["poet", "pirate", "secret"], keys_file=file)
    set_template(routes)
    field, make = {
        NATIVE: ("adapter_ids", generate),
        COMPLETIONS: ("models", complete),
        CHAT: ("models", chat),
    }[path]
    assert routes.post(path, make(**{field: ["poet", "pirate"]}), "some").status == 200
    routes.engine.sent.clear()
    assert routes.post(path, make(**{field: ["poet", name]}), "some").status == 403
    assert not routes.engine.added


def test_each_adapter_counts_as_a_request(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[keys.slow]\nkey = "slow"\nrequests_per_minute = 3\nmax_concurrent = 3\n')
    routes = Routes(["poet", "pirate"])
    routes.service.keys = KeyRing(routes.service.config.api_keys, None, file)
    body = complete(models=["poet", "pirate"])
    assert routes.post(COMPLETIONS, complete(models=["poet"] * 4), "slow").status == 400  # more than may run
    assert [routes.post(COMPLETIONS, body, "slow").status for _ in range(3)] == [200, 200, 429]


def test_new_adapters_are_charged_separately(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    routes = Routes(keys_file=file)
    body = generate(adapter_ids=["o/a", "o/b", "o/c"], adapter_source="hub")
    assert routes.post(NATIVE, body, "few").status == 429
    assert routes.post(NATIVE, body, "boss").status == 200


def test_adapter_metrics_do_not_list_combinations(routes: Routes) -> None:
    """Clients can send any number of combinations, which would use up the labels for adapters."""
    routes.post(*REQUESTS[COMPLETIONS])
    lines = routes.get("/metrics").body.decode().splitlines()
    labels = [line for line in lines if line.startswith("lorax_adapter_requests_total{")]
    assert labels == ['lorax_adapter_requests_total{adapter="other"} 1.0']


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (NATIVE, generate(models=["poet"]), "use `adapter_ids` instead"),
        (CHAT, chat(adapter_ids=["poet"]), "use `models` instead"),
        (COMPLETIONS, complete(adapter_ids=["poet"]), "use `models` instead"),
        ("/v1/responses", {"input": "a", "models": ["poet"]}, "`models` is not supported"),
    ],
)
def test_field_of_another_route_is_rejected(path: str, body: dict[str, Any], message: str, routes: Routes) -> None:
    """Otherwise, the base model would complete the prompt."""
    reply = routes.post(path, body)
    assert reply.status in (400, 422)
    assert message in reply.message
