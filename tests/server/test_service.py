"""The service around a request: caller, deadline, resources, records; the engine is a script."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response

from lorax_server.config import EngineConfig, ModelConfig, ServerConfig
from lorax_server.errors import (
    AdapterAccessError,
    AdapterNotFoundError,
    ConfigError,
    EngineError,
    LoraxError,
    OverloadedError,
    SourceError,
)
from lorax_server.server.access.keys import KeyRing
from lorax_server.server.access.model_names import AdapterKey
from lorax_server.server.http.error_responses import json_response
from lorax_server.server.http.sse import EventStream, encode_event
from lorax_server.server.request_context import CLIENT_DISCONNECTED_STATUS, RequestContext
from lorax_server.server.service import Service
from lorax_server.server.telemetry.logs import EXTRA_KEY
from lorax_server.types import FinishReason, Resolved
from tests.server.bench import PLACES, Bench, ScriptedClient, Work, body_of, for_adapter, ids, settle, streamed, whole


@pytest.fixture
def records(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Return a function that finds the fields of logged requests."""
    with caplog.at_level(logging.INFO):
        yield lambda: [getattr(each, EXTRA_KEY) for each in caplog.records if hasattr(each, EXTRA_KEY)]


Records = Callable[[], list[dict[str, Any]]]


# --- Whole answers ----------------------------------------------------------------------------------------------------


def test_an_answer_is_noted_once_and_gives_back_its_place(records: Records) -> None:
    async def check() -> None:
        bench = Bench()
        answer = bench.ask(whole)
        await settle()
        assert (bench.rate_limits.num_running, len(bench.service.running)) == (1, 1)
        bench.engine.give(1, *ids("quick brown"), end=FinishReason.LENGTH)
        response = await answer
        assert (response.status_code, body_of(response)) == (200, {"text": "quick brown"})
        assert response.headers["x-prompt-tokens"] == str(len(ids("ask")))
        bench.check_all_is_given_back()

    asyncio.run(check())
    (record,) = records()
    assert record["status"] == 200
    assert record["finish_reasons"] == "length"
    assert record["generated_tokens"] == len(ids("quick brown"))
    assert (record["queue_ms"], record["adapter_ms"], record["cached_tokens"]) == (250, 125, 3)
    assert record["is_dropped"] is False


def test_a_client_that_leaves_before_its_answer_ends_it(records: Records) -> None:
    async def check() -> None:
        bench = Bench()
        answer = bench.ask(whole)
        await settle()
        bench.peer.leave()
        assert (await answer).status_code == CLIENT_DISCONNECTED_STATUS
        assert bench.engine.aborted == [1]
        bench.check_all_is_given_back()

    asyncio.run(check())
    (record,) = records()
    assert record["is_dropped"] is True


def test_one_that_is_cancelled_gives_back_its_place(records: Records) -> None:
    async def check() -> None:
        bench = Bench()
        answer = bench.ask(whole)
        await settle()
        answer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answer
        assert bench.engine.aborted == [1]
        bench.check_all_is_given_back()

    asyncio.run(check())
    assert len(records()) == 1


@pytest.mark.parametrize("work", [whole, for_adapter, streamed])
def test_what_takes_too_long_is_given_up(work: Work, records: Records) -> None:
    """Time out before the engine is asked, too, and before it has resolved the adapter's name."""

    async def check() -> None:
        bench = Bench(request_timeout_s=0.01)
        response = await bench.ask(work)
        assert response.status_code == 504
        assert body_of(response) == {"error": "there was no answer within 0.01 s", "error_type": "timeout"}
        assert bench.engine.aborted == [request.request_id for request in bench.engine.added]
        bench.check_all_is_given_back()

    asyncio.run(check())
    assert [record["status"] for record in records()] == [504]


@pytest.mark.parametrize(("own", "asked", "expected"), [(5, "3", 3), (5, "9", 5), (None, "3.5", 3.5), (5, None, 5)])
def test_a_request_may_ask_for_less_time_than_it_has(own: float | None, asked: str | None, expected: float) -> None:
    async def check() -> None:
        async def tell(call: RequestContext) -> Response:
            return json_response(call.timeout_s)

        headers = {} if asked is None else {"x_request_timeout": asked}
        assert body_of(await Bench(request_timeout_s=own).ask(tell, **headers)) == expected

    asyncio.run(check())


@pytest.mark.parametrize("asked", ["", "soon", "0", "-1", "nan", "inf", "1e999", "9" * 5000])
def test_a_time_that_is_none_is_refused(asked: str, records: Records) -> None:
    async def check() -> None:
        bench = Bench()
        response = await bench.ask(whole, x_request_timeout=asked)
        assert response.status_code == 422
        assert len(response.body) < 200
        bench.check_all_is_given_back()

    asyncio.run(check())
    assert len(records()) == 1


def test_a_mistake_of_ours_is_written_down_and_not_told(records: Records, caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        bench = Bench()

        async def mistaken(call: RequestContext) -> Response:
            await call.admit(1, False)
            raise KeyError("a secret")

        for path, error in (("/generate", "Internal server error"), ("/v1/completions", None)):
            response = await bench.ask(mistaken, path)
            assert response.status_code == 500
            assert b"secret" not in response.body
            assert error is None or body_of(response)["error"] == error
        bench.check_all_is_given_back()

    asyncio.run(check())
    assert [record["error_type"] for record in records()] == ["internal", "internal"]
    assert sum(each.exc_info is not None for each in caplog.records) == 2


def test_who_comes_when_all_places_are_taken_takes_none(records: Records) -> None:
    async def check() -> None:
        bench = Bench()
        waiting = [bench.ask(whole) for _ in range(PLACES)]
        await settle()
        response = await bench.ask(whole)
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        assert bench.rate_limits.num_running == PLACES
        for i in range(PLACES):
            bench.engine.fail(i + 1, OverloadedError("full", 7.2))
        for each in waiting:
            assert (await each).headers["retry-after"] == "8"
        bench.check_all_is_given_back()

    asyncio.run(check())
    assert [record["error_type"] for record in records()] == ["overloaded"] * (PLACES + 1)


def test_a_lost_engine_is_an_error_that_says_when_to_come_back() -> None:
    async def check() -> None:
        bench = Bench()
        answer = bench.ask(whole)
        await settle()
        bench.engine._fail_all("the engine process ended", 3.0)
        for response in (await answer, await bench.ask(whole), await bench.ask(streamed)):
            assert (response.status_code, response.headers["retry-after"]) == (503, "3")
        assert not bench.service.is_ready
        bench.check_all_is_given_back()

    asyncio.run(check())


# --- Streams ----------------------------------------------------------------------------------------------------------


def test_a_stream_ends_its_call_itself(records: Records) -> None:
    async def check() -> None:
        bench = Bench()
        answer = bench.ask(streamed)
        await settle()
        bench.engine.give(1, *ids("quick"))
        response = await answer
        assert isinstance(response, EventStream)
        assert (bench.rate_limits.num_running, records()) == (1, [])
        reading = asyncio.create_task(bench.read(response))
        await settle()
        bench.engine.give(1, *ids(" brown"), end=FinishReason.EOS_TOKEN)
        await reading
        assert bench.peer.body == encode_event("quick") + encode_event(" brown")
        bench.check_all_is_given_back()

    asyncio.run(check())
    (record,) = records()
    assert record["is_streamed"] is True
    assert record["finish_reasons"] == "eos_token"


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_client_that_leaves_in_the_middle_ends_the_engines_work(has_begun: bool, records: Records) -> None:
    """Cover a client to which not even the head of the response could be written."""

    async def check() -> None:
        bench = Bench()
        answer = bench.ask(streamed)
        await settle()
        bench.engine.give(1, *ids("quick"))
        response = await answer

        async def block(message: dict[str, Any]) -> None:
            await asyncio.Event().wait()

        if not has_begun:
            bench.peer._before_send = block
        reading = asyncio.create_task(bench.read(response))
        await settle()
        assert bool(bench.peer.sent) == has_begun
        bench.peer.leave()
        await reading
        assert bench.engine.aborted == [1]
        bench.check_all_is_given_back()

    asyncio.run(check())
    (record,) = records()
    assert record["is_dropped"] is True


def test_what_goes_wrong_at_once_has_a_status_and_later_an_event(
    records: Records, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        for count in (0, 1):
            bench = Bench()
            answer = bench.ask(streamed)
            await settle()
            bench.engine.give(1, *ids("quick")[:count])
            await settle()
            bench.engine.fail(1, AdapterNotFoundError("it is gone"))
            response = await answer
            assert response.status_code == (200 if count else 424)
            await bench.read(response)
            told = json.loads(bench.peer.body.split(b"data: ")[-1])
            assert told["error"].endswith("it is gone")
            bench.check_all_is_given_back()

    asyncio.run(check())
    assert [(record["status"], record["error_type"]) for record in records()] == [
        (424, "generation"),
        (200, "generation"),
    ]
    assert not any(each.exc_info for each in caplog.records)  # it is not the server's error


def test_a_mistake_within_a_stream_is_its_last_event(records: Records, caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        bench = Bench()

        async def mistaken(call: RequestContext) -> Response:
            await call.admit(1, True)

            async def events() -> AsyncGenerator[bytes, None]:
                yield encode_event("quick")
                raise KeyError("a secret")

            return EventStream(await call.await_first_event(events()), 1000.0)

        await bench.read(await bench.ask(mistaken, "/v1/completions"))
        first, last = bench.peer.body.split(b"\n\n")[:2]
        assert first == b'data: "quick"'
        assert json.loads(last[6:])["error"]["message"] == "Internal server error"
        bench.check_all_is_given_back()

    asyncio.run(check())
    assert [record["error_type"] for record in records()] == ["internal"]
    assert sum(each.exc_info is not None for each in caplog.records) == 1


def test_a_stream_whose_first_token_takes_long_begins_without_it() -> None:
    async def check() -> None:
        bench = Bench(keep_alive_s=0.001)
        response = await bench.ask(streamed)
        assert isinstance(response, EventStream)
        reading = asyncio.create_task(bench.read(response))
        await settle()
        bench.engine.give(1, *ids("quick"), end=FinishReason.LENGTH)
        await reading
        assert bench.peer.body == encode_event("quick")
        bench.check_all_is_given_back()

    asyncio.run(check())


def test_a_deadline_within_a_stream_is_its_last_event() -> None:
    async def check() -> None:
        bench = Bench(keep_alive_s=0.001)
        response = await bench.ask(streamed, x_request_timeout="0.5")
        assert response.status_code == 200
        await bench.read(response)
        assert bench.peer.body == encode_event({"error": "there was no answer within 0.5 s", "error_type": "timeout"})
        assert bench.engine.aborted == [1]
        bench.check_all_is_given_back()

    asyncio.run(check())


# --- Adapters and permissions to read them ----------------------------------------------------------------------------


def test_a_bearer_is_shown_only_to_a_source_that_refuses_who_has_none() -> None:
    async def check(answers: dict[str, Any]) -> list[str | None]:
        bench = Bench()
        bench.engine.answers = answers
        response = await bench.ask(for_adapter, authorization="Bearer secret")
        assert body_of(response) == "hash"
        assert response.status_code == 200
        tokens = [message.refs[0].token for message in bench.engine.sent if hasattr(message, "refs")]
        assert bench.service.adapter_index.is_private(AdapterKey("hub", "owner/it")) == (tokens[-1] is not None)
        return tokens

    assert asyncio.run(check({"owner/it": Resolved("hash")})) == [None]
    for error in (AdapterAccessError("no"), AdapterNotFoundError("no")):
        assert asyncio.run(check({"owner/it": error, "secret": Resolved("hash")})) == [None, "secret"]


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (AdapterNotFoundError("no such name"), AdapterAccessError("bad token"), "no such name"),
        (AdapterNotFoundError("no such name"), AdapterNotFoundError("not here"), "no such name"),
        (AdapterAccessError("private"), AdapterAccessError("bad token"), "bad token"),
        (AdapterAccessError("private"), AdapterNotFoundError("no such name"), "no such name"),
        (AdapterNotFoundError("no such name"), SourceError("down"), "down"),
    ],
)
def test_a_bearer_that_does_not_help(first: LoraxError, second: LoraxError, told: str) -> None:
    async def check() -> None:
        bench = Bench()
        bench.engine.answers = {"owner/it": first, "secret": second}
        response = await bench.ask(for_adapter, authorization="Bearer secret")
        assert told in body_of(response)["error"]

    asyncio.run(check())


# --- The end ----------------------------------------------------------------------------------------------------------


def test_who_comes_when_the_server_is_stopping_is_sent_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        bench = Bench()
        going = bench.ask(whole)
        await settle()
        with caplog.at_level(logging.INFO):
            bench.service.drain()
            bench.service.drain()
        assert not bench.service.is_ready
        with pytest.raises(EngineError, match="shutting down") as caught:
            bench.ask(whole)
        assert caught.value.retry_after_s == 1
        bench.engine.give(1, *ids("quick"), end=FinishReason.LENGTH)
        assert (await going).status_code == 200
        bench.check_all_is_given_back()

    asyncio.run(check())
    assert sum("for 1 requests" in each.getMessage() for each in caplog.records) == 1


@pytest.mark.parametrize("work", [whole, for_adapter, streamed])
def test_what_is_not_done_by_then_is_told_why_it_ends(work: Work, records: Records) -> None:
    async def check() -> None:
        bench = Bench(drain_s=0.0)
        answer = bench.ask(work)
        await settle()
        bench.service.drain()
        response = await answer
        assert response.status_code == 503
        assert "the server is shutting down" in body_of(response)["error"]
        bench.check_all_is_given_back()

    asyncio.run(check())
    assert len(records()) == 1


def test_a_stream_that_is_not_done_by_then_ends_with_an_event() -> None:
    async def check() -> None:
        bench = Bench(keep_alive_s=0.001, drain_s=0.0)
        response = await bench.ask(streamed)
        reading = asyncio.create_task(bench.read(response))
        await settle()
        bench.service.drain()
        await reading
        assert b"the server is shutting down" in bench.peer.body
        bench.check_all_is_given_back()

    asyncio.run(check())


def test_a_server_that_cannot_start_leaves_nothing_running(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{")

    async def check() -> None:
        engine = ScriptedClient()
        config = ServerConfig(EngineConfig(ModelConfig(tmp_path)), "base")
        with pytest.raises(ConfigError):
            await Service.start(config, engine, KeyRing((), None, None))
        assert engine.is_closed
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(check())
