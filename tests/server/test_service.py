"""`Service` and `RequestContext`: timeouts, permits, logs and shutdown, with a scripted engine."""

import asyncio
import copy
import json
import logging
import re
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
    InputError,
    LoraxError,
    OverloadedError,
    SourceError,
)
from lorax_server.server import generations, request_context
from lorax_server.server.access.keys import KeyRing
from lorax_server.server.access.model_names import AdapterKey
from lorax_server.server.http.error_responses import json_response
from lorax_server.server.http.sse import EventStream, encode_event
from lorax_server.server.request_context import CLIENT_DISCONNECTED_STATUS, RequestContext
from lorax_server.server.routes.pooling import _encode_prompts
from lorax_server.server.service import Service
from lorax_server.server.telemetry.logs import EXTRA_KEY
from lorax_server.text.tokenizer import EncodedText
from lorax_server.types import FinishReason, Output, Pooled, ResolvedAdapter
from tests.server.service_harness import (
    MAX_RUNNING,
    ScriptedEngine,
    ServiceHarness,
    Work,
    ids,
    parse_body,
    resolve_adapter,
    settle,
    streamed,
    tokenizer,
    whole,
)


@pytest.fixture
def records(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Return a function that lists the fields of logged requests."""
    with caplog.at_level(logging.INFO):
        yield lambda: [getattr(each, EXTRA_KEY) for each in caplog.records if hasattr(each, EXTRA_KEY)]


Records = Callable[[], list[dict[str, Any]]]


# --- Whole responses --------------------------------------------------------------------------------------------------


def test_finished_request_is_logged_once_and_releases_permit(records: Records) -> None:
    async def check() -> None:
        harness = ServiceHarness()
        answer = harness.submit(whole)
        await settle()
        assert (harness.rate_limits.num_running, len(harness.service.running)) == (1, 1)
        harness.engine.emit_tokens(1, *ids("quick brown"), end=FinishReason.LENGTH)
        response = await answer
        assert (response.status_code, parse_body(response)) == (200, {"text": "quick brown"})
        assert response.headers["x-prompt-tokens"] == str(len(ids("ask")))
        harness.assert_all_released()

    asyncio.run(check())
    (record,) = records()
    assert record["status"] == 200
    assert record["finish_reasons"] == "length"
    assert record["generated_tokens"] == len(ids("quick brown"))
    assert (record["queue_ms"], record["adapter_ms"], record["cached_tokens"]) == (250, 125, 3)
    assert record["is_dropped"] is False


def test_long_request_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(request_context, "LONG_REQUEST_S", 0.01)

    async def check() -> None:
        harness = ServiceHarness()
        answer = harness.submit(whole)
        await settle()
        harness.engine.emit_tokens(1, *ids("quick"))
        await asyncio.sleep(0.05)
        harness.engine.emit_tokens(1, *ids("brown"), end=FinishReason.LENGTH)
        await answer

    asyncio.run(check())
    (message,) = [record.message for record in caplog.records if "still running" in record.message]
    pattern = r"request it is still running after 0.01 s and has \d+ tokens; set a token limit in the request, or use "
    assert re.match(f"{pattern}--request-timeout-s", message)


def test_disconnect_before_response_aborts_request(records: Records) -> None:
    async def check() -> None:
        harness = ServiceHarness()
        answer = harness.submit(whole)
        await settle()
        harness.peer.disconnect()
        assert (await answer).status_code == CLIENT_DISCONNECTED_STATUS
        assert harness.engine.aborted == [1]
        harness.assert_all_released()

    asyncio.run(check())
    (record,) = records()
    assert record["is_dropped"] is True


def test_cancelled_request_releases_permit(records: Records) -> None:
    async def check() -> None:
        harness = ServiceHarness()
        answer = harness.submit(whole)
        await settle()
        answer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answer
        assert harness.engine.aborted == [1]
        harness.assert_all_released()

    asyncio.run(check())
    assert len(records()) == 1


@pytest.mark.parametrize("work", [whole, resolve_adapter, streamed])
def test_timeout_returns_504(work: Work, records: Records) -> None:
    """Also covers timeouts before submission to the engine and during adapter resolution."""

    async def check() -> None:
        harness = ServiceHarness(request_timeout_s=0.01)
        response = await harness.submit(work)
        assert response.status_code == 504
        assert parse_body(response) == {"error": "the request timed out after 0.01 s", "error_type": "timeout"}
        assert harness.engine.aborted == [request.request_id for request in harness.engine.added]
        harness.assert_all_released()

    asyncio.run(check())
    assert [record["status"] for record in records()] == [504]


@pytest.mark.parametrize(
    ("limit_s", "header", "expected"), [(500, "300", 300), (500, "900", 500), (None, "300.5", 300.5), (500, None, 500)]
)
def test_timeout_header_can_only_shorten_timeout(limit_s: float | None, header: str | None, expected: float) -> None:
    async def check() -> None:
        async def return_timeout(call: RequestContext) -> Response:
            return json_response(call.timeout_s)

        headers = {} if header is None else {"x_request_timeout": header}
        assert parse_body(await ServiceHarness(request_timeout_s=limit_s).submit(return_timeout, **headers)) == expected

    asyncio.run(check())


@pytest.mark.parametrize("header", ["", "soon", "0", "-1", "nan", "inf", "1e999", "9" * 5000])
def test_invalid_timeout_header_is_rejected(header: str, records: Records) -> None:
    async def check() -> None:
        harness = ServiceHarness()
        response = await harness.submit(whole, x_request_timeout=header)
        assert response.status_code == 422
        assert len(response.body) < 200
        harness.assert_all_released()

    asyncio.run(check())
    assert len(records()) == 1


def test_internal_error_is_logged_and_hidden_from_client(records: Records, caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        harness = ServiceHarness()

        async def broken_route(call: RequestContext) -> Response:
            await call.admit(1, False)
            raise KeyError("a secret")

        for path, error in (("/generate", "Internal server error"), ("/v1/completions", None)):
            response = await harness.submit(broken_route, path)
            assert response.status_code == 500
            assert b"secret" not in response.body
            assert error is None or parse_body(response)["error"] == error
        harness.assert_all_released()

    asyncio.run(check())
    assert [record["error_type"] for record in records()] == ["internal", "internal"]
    assert sum(each.exc_info is not None for each in caplog.records) == 2


def test_request_above_concurrency_limit_returns_429(records: Records) -> None:
    async def check() -> None:
        harness = ServiceHarness()
        waiting = [harness.submit(whole) for _ in range(MAX_RUNNING)]
        await settle()
        response = await harness.submit(whole)
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        assert harness.rate_limits.num_running == MAX_RUNNING
        for i in range(MAX_RUNNING):
            harness.engine.fail(i + 1, OverloadedError("full", 7.2))
        for each in waiting:
            assert (await each).headers["retry-after"] == "8"
        harness.assert_all_released()

    asyncio.run(check())
    assert [record["error_type"] for record in records()] == ["overloaded"] * (MAX_RUNNING + 1)


def test_engine_crash_returns_503_with_retry_after() -> None:
    async def check() -> None:
        harness = ServiceHarness()
        answer = harness.submit(whole)
        await settle()
        harness.engine._fail_all("the engine process ended", 3.0)
        for response in (await answer, await harness.submit(whole), await harness.submit(streamed)):
            assert (response.status_code, response.headers["retry-after"]) == (503, "3")
        assert not harness.service.is_ready
        harness.assert_all_released()

    asyncio.run(check())


# --- Streams ----------------------------------------------------------------------------------------------------------


def test_stream_releases_permit_after_last_event(records: Records) -> None:
    async def check() -> None:
        harness = ServiceHarness()
        answer = harness.submit(streamed)
        await settle()
        harness.engine.emit_tokens(1, *ids("quick"))
        response = await answer
        assert isinstance(response, EventStream)
        assert (harness.rate_limits.num_running, records()) == (1, [])
        reading = asyncio.create_task(harness.read(response))
        await settle()
        harness.engine.emit_tokens(1, *ids(" brown"), end=FinishReason.EOS_TOKEN)
        await reading
        assert harness.peer.body == encode_event("quick") + encode_event(" brown")
        harness.assert_all_released()

    asyncio.run(check())
    (record,) = records()
    assert record["is_streamed"] is True
    assert record["finish_reasons"] == "eos_token"


@pytest.mark.parametrize("has_started", [True, False])
def test_disconnect_during_stream_aborts_engine_request(has_started: bool, records: Records) -> None:
    """Also covers a client that never received the response headers."""

    async def check() -> None:
        harness = ServiceHarness()
        answer = harness.submit(streamed)
        await settle()
        harness.engine.emit_tokens(1, *ids("quick"))
        response = await answer

        async def block(message: dict[str, Any]) -> None:
            await asyncio.Event().wait()

        if not has_started:
            harness.peer._before_send = block
        reading = asyncio.create_task(harness.read(response))
        await settle()
        assert bool(harness.peer.sent) == has_started
        harness.peer.disconnect()
        await reading
        assert harness.engine.aborted == [1]
        harness.assert_all_released()

    asyncio.run(check())
    (record,) = records()
    assert record["is_dropped"] is True


def test_early_failure_sets_status_and_late_failure_sends_event(
    records: Records, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        for count in (0, 1):
            harness = ServiceHarness()
            answer = harness.submit(streamed)
            await settle()
            harness.engine.emit_tokens(1, *ids("quick")[:count])
            await settle()
            harness.engine.fail(1, AdapterNotFoundError("it is gone"))
            response = await answer
            assert response.status_code == (200 if count else 424)
            await harness.read(response)
            message = json.loads(harness.peer.body.split(b"data: ")[-1])
            assert message["error"].endswith("it is gone")
            harness.assert_all_released()

    asyncio.run(check())
    assert [(record["status"], record["error_type"]) for record in records()] == [
        (424, "generation"),
        (200, "generation"),
    ]
    assert not any(each.exc_info for each in caplog.records)  # not an internal error


def test_internal_error_during_stream_is_last_event(records: Records, caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        harness = ServiceHarness()

        async def broken_route(call: RequestContext) -> Response:
            await call.admit(1, True)

            async def events() -> AsyncGenerator[bytes, None]:
                yield encode_event("quick")
                raise KeyError("a secret")

            return EventStream(await call.await_first_event(events()), 1000.0)

        await harness.read(await harness.submit(broken_route, "/v1/completions"))
        first, last = harness.peer.body.split(b"\n\n")[:2]
        assert first == b'data: "quick"'
        assert json.loads(last[6:])["error"]["message"] == "Internal server error"
        harness.assert_all_released()

    asyncio.run(check())
    assert [record["error_type"] for record in records()] == ["internal"]
    assert sum(each.exc_info is not None for each in caplog.records) == 1


def test_slow_first_token_starts_stream_early() -> None:
    async def check() -> None:
        harness = ServiceHarness(keep_alive_s=0.001)
        response = await harness.submit(streamed)
        assert isinstance(response, EventStream)
        reading = asyncio.create_task(harness.read(response))
        await settle()
        harness.engine.emit_tokens(1, *ids("quick"), end=FinishReason.LENGTH)
        await reading
        assert harness.peer.body == encode_event("quick")
        harness.assert_all_released()

    asyncio.run(check())


def test_timeout_during_stream_is_last_event() -> None:
    async def check() -> None:
        harness = ServiceHarness(keep_alive_s=0.001)
        response = await harness.submit(streamed, x_request_timeout="0.5")
        assert response.status_code == 200
        await harness.read(response)
        assert harness.peer.body == encode_event(
            {"error": "the request timed out after 0.5 s", "error_type": "timeout"}
        )
        assert harness.engine.aborted == [1]
        harness.assert_all_released()

    asyncio.run(check())


# --- Adapter access tokens --------------------------------------------------------------------------------------------


def test_bearer_token_is_sent_only_if_source_requires_it() -> None:
    async def check(answers: dict[str, Any]) -> list[str | None]:
        harness = ServiceHarness()
        harness.engine.resolutions = answers
        response = await harness.submit(resolve_adapter, authorization="Bearer secret")
        assert parse_body(response) == "hash"
        assert response.status_code == 200
        tokens = [message.refs[0].token for message in harness.engine.sent if hasattr(message, "refs")]
        assert harness.service.adapter_index.is_private(AdapterKey("hub", "owner/it")) == (tokens[-1] is not None)
        return tokens

    assert asyncio.run(check({"owner/it": ResolvedAdapter("hash")})) == [None]
    for error in (AdapterAccessError("no"), AdapterNotFoundError("no")):
        assert asyncio.run(check({"owner/it": error, "secret": ResolvedAdapter("hash")})) == [None, "secret"]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (AdapterNotFoundError("no such name"), AdapterAccessError("bad token"), "no such name"),
        (AdapterNotFoundError("no such name"), AdapterNotFoundError("not here"), "no such name"),
        (AdapterAccessError("private"), AdapterAccessError("bad token"), "bad token"),
        (AdapterAccessError("private"), AdapterNotFoundError("no such name"), "no such name"),
        (AdapterNotFoundError("no such name"), SourceError("down"), "down"),
    ],
)
def test_insufficient_bearer_token_error_states_reason(first: LoraxError, second: LoraxError, message: str) -> None:
    async def check() -> None:
        harness = ServiceHarness()
        harness.engine.resolutions = {"owner/it": first, "secret": second}
        response = await harness.submit(resolve_adapter, authorization="Bearer secret")
        assert message in parse_body(response)["error"]

    asyncio.run(check())


# --- Shutdown ---------------------------------------------------------------------------------------------------------


def test_new_request_during_drain_is_rejected(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        harness = ServiceHarness()
        running = harness.submit(whole)
        await settle()
        with caplog.at_level(logging.INFO):
            harness.service.drain()
            harness.service.drain()
        assert not harness.service.is_ready
        with pytest.raises(EngineError, match="shutting down") as caught:
            harness.submit(whole)
        assert caught.value.retry_after_s == 1
        harness.engine.emit_tokens(1, *ids("quick"), end=FinishReason.LENGTH)
        assert (await running).status_code == 200
        harness.assert_all_released()

    asyncio.run(check())
    assert sum("for 1 requests" in each.getMessage() for each in caplog.records) == 1


@pytest.mark.parametrize("work", [whole, resolve_adapter, streamed])
def test_unfinished_request_after_drain_returns_503(work: Work, records: Records) -> None:
    async def check() -> None:
        harness = ServiceHarness(drain_s=0.0)
        answer = harness.submit(work)
        await settle()
        harness.service.drain()
        response = await answer
        assert response.status_code == 503
        assert "the server is shutting down" in parse_body(response)["error"]
        harness.assert_all_released()

    asyncio.run(check())
    assert len(records()) == 1


def test_unfinished_stream_after_drain_sends_error_event() -> None:
    async def check() -> None:
        harness = ServiceHarness(keep_alive_s=0.001, drain_s=0.0)
        response = await harness.submit(streamed)
        reading = asyncio.create_task(harness.read(response))
        await settle()
        harness.service.drain()
        await reading
        assert b"the server is shutting down" in harness.peer.body
        harness.assert_all_released()

    asyncio.run(check())


def test_failed_startup_closes_engine_and_tasks(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{")

    async def check() -> None:
        engine = ScriptedEngine()
        config = ServerConfig(EngineConfig(ModelConfig(tmp_path)), "base")
        with pytest.raises(ConfigError):
            await Service.start(config, engine, KeyRing((), None, None))
        assert engine.is_closed
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(check())


# --- Pooled inputs ----------------------------------------------------------------------------------------------------


def start_pooling(service: ServiceHarness, count: int) -> "asyncio.Task[Response]":
    async def pool(call: RequestContext) -> Response:
        await call.admit(1, False)
        call.record_model(call.service.model_names.base_selection)
        model = await call.resolve(call.service.model_names.base_selection)
        pooled = await call.pool(model, [EncodedText([1])] * count)
        return json_response([each.shape[0] for each in pooled])

    return service.submit(pool)


def emit_pooled(service: ServiceHarness, request_id: int) -> None:
    service.engine._deliver(Output(request_id, (), FinishReason.LENGTH, pooled=Pooled(b"", (request_id,))))


def test_inputs_are_submitted_as_earlier_inputs_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generations, "MAX_INPUTS_IN_FLIGHT", 2)

    async def check() -> None:
        service = ServiceHarness()
        running = start_pooling(service, 4)
        for request_id, num_added in ((2, 3), (1, 4), (4, 4), (3, 4)):
            await settle()
            emit_pooled(service, request_id)
            await settle()
            assert len(service.engine.added) == num_added
        assert parse_body(await running) == [1, 2, 3, 4]
        service.assert_all_released()

    asyncio.run(check())


@pytest.mark.parametrize("fails", [False, True])
def test_no_inputs_are_submitted_after_disconnect_or_failure(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    monkeypatch.setattr(generations, "MAX_INPUTS_IN_FLIGHT", 2)

    async def check() -> None:
        service = ServiceHarness()
        running = start_pooling(service, 4)
        await settle()
        if fails:
            service.engine.fail(1, EngineError("out of luck"))
        else:
            service.peer.disconnect()
        assert (await running).status_code == (EngineError.status if fails else CLIENT_DISCONNECTED_STATUS)
        assert len(service.engine.added) == 2
        assert 2 in service.engine.aborted
        service.assert_all_released()

    asyncio.run(check())


def test_token_ids_may_include_tokens_added_by_adapter() -> None:
    async def encode(call: RequestContext) -> Response:
        call.record_model(call.service.model_names.base_selection)
        model = await call.resolve(call.service.model_names.base_selection)
        extended = copy.copy(model.tokenizer)
        extended.num_ids += 1
        ids = [[model.tokenizer.num_ids]]
        encoded = await _encode_prompts(call, model._replace(tokenizer=extended), ids, truncate=False)
        with pytest.raises(InputError, match="beyond the vocabulary"):
            await _encode_prompts(call, model, ids, truncate=False)
        return json_response(encoded[0].ids)

    async def check() -> None:
        assert parse_body(await ServiceHarness().submit(encode)) == [tokenizer().num_ids]

    asyncio.run(check())
