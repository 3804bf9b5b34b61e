"""Completions assembled from engine outputs, with a scripted engine."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import pytest

from lorax_server.engine.remote.remote_engine import RemoteEngine
from lorax_server.errors import AdapterError, DeadlineError, EngineError
from lorax_server.server.generations import (
    MAX_INPUTS_PER_REQUEST,
    InputWindow,
    RemoteGeneration,
    count_cached_tokens,
    finish_all,
    interleave,
)
from lorax_server.types import (
    FinishReason,
    Output,
    Request,
    SampledToken,
    SamplingParams,
    StartInfo,
    StopParams,
)
from tests.server.service_harness import ScriptedEngine, ids, settle, tokenizer


def make_generations(
    engine: RemoteEngine, count: int = 1, sampling: SamplingParams | None = None, **stop: Any
) -> list[RemoteGeneration]:
    params = StopParams(**{"max_new_tokens": 100} | stop)
    requests = [Request(engine.new_id(), ids("ask"), sampling or SamplingParams(), params) for _ in range(count)]
    return [RemoteGeneration(engine, request, tokenizer()) for request in requests]


def join_text(events: Sequence[Any]) -> str:
    return "".join(token_event.text for token_event in events)


# --- Single generations -----------------------------------------------------------------------------------------------


def test_queued_outputs_are_yielded_together() -> None:
    async def check() -> None:
        engine = ScriptedEngine()
        (generation,) = make_generations(engine)
        stream = generation.stream()
        first = asyncio.ensure_future(anext(stream))
        await settle()
        assert [request.request_id for request in engine.added] == [1]
        engine.emit_tokens(1, *ids("quick brown"))
        assert join_text(await first) == "quick brown"
        engine.emit_tokens(1, *ids(" fox"))
        engine.emit_tokens(1, *ids(" dog"), end=FinishReason.EOS_TOKEN)
        assert join_text(await anext(stream)) == " fox dog"
        assert [each async for each in stream] == []
        assert generation.text == generation.completion.text == "quick brown fox dog"
        assert generation.completion.finish_reason is FinishReason.EOS_TOKEN
        assert generation.start_info == StartInfo(0.25, 0.125, 3)
        assert generation.submitted_at is not None
        assert generation.first_output_at is not None
        assert generation.submitted_at <= generation.first_output_at
        assert engine.aborted == []

    asyncio.run(check())


def test_stop_string_aborts_engine_request() -> None:
    async def check() -> None:
        engine = ScriptedEngine()
        (generation,) = make_generations(engine, stop_strings=("brown",), include_stop=False)
        running = asyncio.create_task(finish_all([generation]))
        await settle()
        engine.emit_tokens(1, *ids("quick brown fox"))  # the last tokens came before the request was aborted
        (completion,) = await running
        assert completion.finish_reason is FinishReason.STOP_SEQUENCE
        assert completion.text == join_text(generation.events) == "quick "
        assert len(completion.token_ids) < len(ids("quick brown fox"))
        assert engine.aborted == [1]

    asyncio.run(check())


def test_stop_string_truncates_multi_token_output() -> None:
    async def check(end: FinishReason | None, **stop: Any) -> Any:
        engine = ScriptedEngine()
        (generation,) = make_generations(engine, **stop)
        running = asyncio.create_task(finish_all([generation]))
        await settle()
        tokens = tuple(SampledToken(token_id, -0.5) for token_id in ids("quick brown fox"))
        engine._deliver(Output(1, tokens, end))
        (completion,) = await running
        assert completion.text == join_text(generation.events)
        return completion

    whole = asyncio.run(check(FinishReason.LENGTH))
    assert (whole.text, whole.token_ids) == ("quick brown fox", ids("quick brown fox"))
    assert (whole.finish_reason, len(whole.logprobs)) == (FinishReason.LENGTH, len(whole.token_ids))
    cut = asyncio.run(check(None, stop_strings=("brown",), include_stop=False))
    assert (cut.text, cut.finish_reason) == ("quick ", FinishReason.STOP_SEQUENCE)
    assert len(cut.token_ids) < len(whole.token_ids)


def test_closing_stream_aborts_request() -> None:
    async def check() -> None:
        engine = ScriptedEngine()
        (generation,) = make_generations(engine)
        async with aclosing(generation.stream()) as stream:
            first = asyncio.ensure_future(anext(stream))
            await settle()
            engine.emit_tokens(1, *ids("a"))
            await first
        assert engine.aborted == [1]
        engine.emit_tokens(1, *ids("b"))  # later tokens are dropped
        assert generation.text == "a"

    asyncio.run(check())


def test_stop_raises_error_after_pending_tokens() -> None:
    async def check() -> None:
        engine = ScriptedEngine()
        (generation,) = make_generations(engine)
        running = asyncio.create_task(finish_all([generation]))
        await settle()
        engine.emit_tokens(1, *ids("quick"))
        generation.stop(DeadlineError("too late"))
        generation.stop(DeadlineError("later still"))
        with pytest.raises(DeadlineError, match="too late"):
            await running
        assert generation.text == "quick"
        assert engine.aborted == [1]

    asyncio.run(check())


def test_unread_generation_is_not_submitted() -> None:
    async def check() -> None:
        engine = ScriptedEngine()
        (generation,) = make_generations(engine)
        await generation.stream().aclose()
        generation.stop(EngineError("nothing to stop"))
        assert engine.sent == []
        assert (generation.start_info, generation.submitted_at, generation.first_output_at) == (None, None, None)

    asyncio.run(check())


@pytest.mark.parametrize(
    ("sampling", "seed"),
    [
        (SamplingParams(seed=7), None),
        (SamplingParams(do_sample=True, temperature=0, seed=7), None),
        (SamplingParams(do_sample=True, seed=7), 7),
    ],
)
def test_greedy_generation_has_no_seed(sampling: SamplingParams, seed: int | None) -> None:
    assert make_generations(ScriptedEngine(), sampling=sampling)[0].seed == seed


# --- finish_all -------------------------------------------------------------------------------------------------------


def test_finish_all_returns_completions_in_order() -> None:
    async def check() -> None:
        engine = ScriptedEngine()
        generations = make_generations(engine, 3)
        running = asyncio.create_task(finish_all(generations))
        await settle()
        for request_id in (3, 1, 2):
            engine.emit_tokens(request_id, *ids(f"number {request_id}"), end=FinishReason.LENGTH)
        assert [each.text for each in await running] == ["number 1", "number 2", "number 3"]
        assert engine.aborted == []

    asyncio.run(check())


def test_finish_all_aborts_remaining_generations_after_failure() -> None:
    async def check() -> None:
        engine = ScriptedEngine()
        running = asyncio.create_task(finish_all(make_generations(engine, 4)))
        await settle()
        engine.emit_tokens(1, *ids("done"), end=FinishReason.LENGTH)
        engine.emit_tokens(2, *ids("begun"))
        engine.fail(3, AdapterError("broken"))
        with pytest.raises(AdapterError, match="broken"):
            await running
        assert sorted(engine.aborted) == [2, 4]

    asyncio.run(check())


def test_cancelling_finish_all_aborts_all() -> None:
    async def check() -> None:
        engine = ScriptedEngine()
        running = asyncio.create_task(finish_all(make_generations(engine, 3)))
        await settle()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert sorted(engine.aborted) == [1, 2, 3]

    asyncio.run(check())


# --- interleave -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_interleave_yields_events_in_arrival_order(count: int, fails: bool) -> None:
    async def check() -> None:
        engine = ScriptedEngine()
        generations, seen = make_generations(engine, count), []

        async def read() -> None:
            async for index, events in interleave(generations):
                seen.append((index, join_text(events)))

        running = asyncio.create_task(read())
        await settle()
        for request_id in reversed(range(1, count + 1)):
            engine.emit_tokens(request_id, *ids("one"))
            await settle()
        expected = [(index, "one") for index in reversed(range(count))]
        if fails:
            engine.fail(count, AdapterError("broken"))
            with pytest.raises(AdapterError, match="broken"):
                await running
        else:
            for request_id in range(1, count + 1):
                engine.emit_tokens(request_id, *ids(" two"), end=FinishReason.LENGTH)
                await settle()
            await running
            expected += [(index, " two") for index in range(count)]
        assert seen == expected
        assert sorted(engine.aborted) == (list(range(1, count)) if fails else [])

    asyncio.run(check())


@pytest.mark.parametrize("count", [1, 3])
def test_closing_interleave_aborts_all(count: int) -> None:
    async def check() -> None:
        engine = ScriptedEngine()
        async with aclosing(interleave(make_generations(engine, count))) as stream:
            first = asyncio.ensure_future(anext(stream))
            await settle()
            engine.emit_tokens(1, *ids("one"))
            assert (await first)[0] == 0
        assert sorted(engine.aborted) == list(range(1, count + 1))

    asyncio.run(check())


def test_engine_crash_fails_all_generations() -> None:
    async def check() -> None:
        engine = ScriptedEngine()
        running = asyncio.create_task(finish_all(make_generations(engine, 2)))
        await settle()
        engine._fail_all("the engine process ended", 2.0)
        with pytest.raises(EngineError, match="the engine is restarting") as raised:
            await running
        assert raised.value.retry_after_s == 2.0
        with pytest.raises(EngineError, match="the engine is restarting"):
            await finish_all(make_generations(engine, 2))
        assert not engine._streams

    asyncio.run(check())


def test_cached_tokens_count_once_per_prompt() -> None:
    engine = ScriptedEngine()
    prompts = [ids("ask"), ids("ask")]
    generations = []
    for prompt, cached in ((prompts[0], None), (prompts[0], 2), (prompts[0], 3), (prompts[1], 1)):
        request = Request(engine.new_id(), prompt, SamplingParams(), StopParams(max_new_tokens=1))
        generations.append(RemoteGeneration(engine, request, tokenizer()))
        generations[-1].start_info = None if cached is None else StartInfo(0.0, 0.0, cached)
    assert count_cached_tokens(generations) == 3 + 1
    assert count_cached_tokens([]) == 0


# --- Inputs of embedding and classification requests ------------------------------------------------------------------


def unfinished(engine: ScriptedEngine) -> list[int]:
    return list(engine._streams)


async def finish_some(engine: ScriptedEngine, count: int) -> None:
    for request_id in unfinished(engine)[:count]:
        engine.emit_tokens(request_id, *ids("quick"), end=FinishReason.LENGTH)
    await settle()


def test_one_request_has_a_limited_number_of_inputs_in_the_engine() -> None:
    async def check() -> None:
        engine, window = ScriptedEngine(), InputWindow(None)
        generations = make_generations(engine, 2 * MAX_INPUTS_PER_REQUEST)
        running = asyncio.create_task(window.finish_all(generations))
        await settle()
        while not running.done():
            assert 0 < window.num_in_flight == len(unfinished(engine)) <= MAX_INPUTS_PER_REQUEST
            await finish_some(engine, 100)
        await running
        assert [request.request_id for request in engine.added] == list(range(1, 2 * MAX_INPUTS_PER_REQUEST + 1))
        assert all(generation.completion.finish_reason is not None for generation in generations)
        assert window.num_in_flight == 0

    asyncio.run(check())


def test_many_requests_share_the_input_window() -> None:
    """The inputs of 20 requests fill half of the engine's queue at most. A new request gets its share."""

    async def check() -> None:
        engine, window = ScriptedEngine(), InputWindow(max_waiting=200)
        requests = [make_generations(engine, 100) for _ in range(20)]
        running = [asyncio.create_task(window.finish_all(generations)) for generations in requests]
        await settle()
        assert len(unfinished(engine)) <= 100 + len(requests)  # each request may have one input
        await finish_some(engine, 500)
        shares = [len({g.request.request_id for g in generations} & {*unfinished(engine)}) for generations in requests]
        assert max(shares) == 5
        while not all(task.done() for task in running):
            assert 0 < len(unfinished(engine)) <= 100 + len(requests)
            await finish_some(engine, 50)
        await asyncio.gather(*running)

    asyncio.run(check())


def test_failed_input_aborts_the_other_inputs() -> None:
    async def check() -> None:
        engine, window = ScriptedEngine(), InputWindow(max_waiting=10)
        running = asyncio.create_task(window.finish_all(make_generations(engine, 8)))
        await settle()
        assert unfinished(engine) == [1, 2, 3, 4, 5]
        engine._deliver(Output.failed(3, AdapterError("broken")))
        with pytest.raises(AdapterError, match="broken"):
            await running
        assert not unfinished(engine)
        assert sorted(engine.aborted) == [1, 2, 4, 5]
        assert window.num_in_flight == 0

    asyncio.run(check())
