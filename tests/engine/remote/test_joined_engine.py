"""Several clients of one engine process: each has its own answers, and one that leaves takes only its own along."""

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from lorax_server.engine.remote import messages
from lorax_server.engine.remote.joined_engine import JoinedEngine
from lorax_server.engine.remote.remote_engine import RemoteEngine
from lorax_server.errors import EngineError
from lorax_server.types import AdapterRef, Output, SampledToken
from tests.engine.fake_engine import FakeConfig, ask_for
from tests.engine.remote.test_remote_engine import aborted, folder, pid_of, read, run_with, until_healthy

__all__ = ["folder"]  # a fixture
Test = Callable[[RemoteEngine, JoinedEngine, JoinedEngine], Awaitable[None]]

logging.getLogger("lorax_server.engine.remote.remote_engine").setLevel(logging.CRITICAL)


def run_joined(folder: Path, test: Test) -> None:
    """Run a test with an engine, the client that started it, and two that have joined."""

    async def run(client: RemoteEngine) -> None:
        joined = JoinedEngine(1), JoinedEngine(2)

        def tell() -> None:
            for each in joined:
                if client.address is not None:
                    each.find(client.address, client.info)
                else:
                    each.lose(str(client.loss), client.loss.retry_after_s)

        client.on_change = tell
        tell()
        try:
            await test(client, *joined)
        finally:
            client.on_change = lambda: None
            for each in joined:
                await each.close()
                assert each._streams == {}
                assert each._queries == {}

    run_with(FakeConfig(str(folder)), run)


def test_ids_never_meet() -> None:
    async def look() -> None:
        clients = [JoinedEngine(number) for number in (1, 2, 3, 2**20)]
        ids = [client.new_id() for client in clients for _ in range(1000)]
        assert len(set(ids)) == len(ids)
        assert [messages.worker_of(client.new_id()) for client in clients] == [1, 2, 3, 2**20]
        assert max(ids) < 2**63

    asyncio.run(look())


def test_a_message_is_split_by_its_readers_and_keeps_its_order() -> None:
    ids = [(worker << messages.WORKER_BITS) + number for number in range(3) for worker in (2, 0, 1)]
    outputs = [Output(each, (SampledToken(index, 0.0),)) for index, each in enumerate(ids)]
    parts = messages.split(messages.Outputs(outputs))
    assert parts.keys() == {0, 1, 2}
    for worker, part in parts.items():
        assert isinstance(part, messages.Outputs)
        assert part.outputs == [each for each in outputs if messages.worker_of(each.request_id) == worker]
    done = messages.Done((7 << messages.WORKER_BITS) + 1)
    assert messages.split(done) == {7: done}
    assert messages.split(messages.Failed("why")) == {0: messages.Failed("why")}


def test_each_client_has_its_own_answers(folder: Path) -> None:
    async def test(client: RemoteEngine, one: JoinedEngine, other: JoinedEngine) -> None:
        clients = [client, one, other]
        prompts = [list(range(100 * index, 100 * index + 50)) for index in range(30)]
        asked = [
            read(clients[index % 3], ask_for(clients[index % 3].new_id(), tokens))  # type: ignore[arg-type]
            for index, tokens in enumerate(prompts)
        ]
        assert await asyncio.gather(*asked) == prompts
        pids = {(await each.resolve([AdapterRef("pid", "")])).identity for each in clients}
        assert len(pids) == 1
        assert one.info == other.info == client.info

    run_joined(folder, test)


def test_one_that_is_gone_takes_its_requests_along_and_no_others(folder: Path) -> None:
    async def test(client: RemoteEngine, one: JoinedEngine, other: JoinedEngine) -> None:
        lost, kept = ask_for(one.new_id(), range(5), how="hang"), ask_for(other.new_id(), range(5), how="hang")
        async with aclosing(one.generate(lost)) as first, aclosing(other.generate(kept)) as second:
            assert (await anext(first)).tokens[0].token_id == (await anext(second)).tokens[0].token_id == 0
            client.let_go(1)
            await aborted(client, lost.request_id)
            late = ask_for(one.new_id(), [1])
            one._send(messages.Add(late))  # it was on its way when its process died
            assert await read(other, ask_for(other.new_id())) == [1, 2, 3]  # type: ignore[arg-type]
            assert other._streams.keys() == {kept.request_id}

    run_joined(folder, test)


def test_an_engine_that_comes_back_is_found_again(folder: Path) -> None:
    async def test(client: RemoteEngine, one: JoinedEngine, other: JoinedEngine) -> None:
        requests = [ask_for(each.new_id(), range(5), how="hang") for each in (one, other)]
        streams = [each.generate(request) for each, request in zip((one, other), requests, strict=True)]
        for stream in streams:
            await anext(stream)
        os.kill(await pid_of(client), signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineError, match=r"SIGKILL\); it is being started again$") as lost:
                await anext(stream)
            assert lost.value.retry_after_s
        with pytest.raises(EngineError, match="started again"):
            await one.status()
        await until_healthy(client)
        for each in (one, other):
            assert await read(each, ask_for(each.new_id())) == [1, 2, 3]  # type: ignore[arg-type]

    run_joined(folder, test)


def test_an_engine_that_is_gone_before_it_is_joined_is_not_there(folder: Path) -> None:
    async def test(client: RemoteEngine, one: JoinedEngine, _: JoinedEngine) -> None:
        late = JoinedEngine(3)
        found = []
        for address in (str(folder / "gone"), client.address):
            assert address is not None
            late.find(address, client.info)
            found.append(late.is_healthy)
            late.lose("it has ended", 1.0)
        assert found == [False, True]
        await late.close()

    run_joined(folder, test)


def test_what_the_engine_has_sent_before_it_was_lost_is_delivered(folder: Path) -> None:
    async def test(client: RemoteEngine, one: JoinedEngine, _: JoinedEngine) -> None:
        request = ask_for(one.new_id(), range(3), how="hang")
        stream = one.generate(request)
        assert (await anext(stream)).tokens[0].token_id == 0
        assert one._channel is not None
        for token_id in (1, 2):
            sent = messages.Outputs([Output(request.request_id, (SampledToken(token_id, 0.0),))])
            one._channel._inbox.put_nowait(messages.encode(sent))
        one.lose("it is gone", None)
        assert [(await anext(stream)).tokens[0].token_id for _ in range(2)] == [1, 2]
        with pytest.raises(EngineError, match=r"^it is gone$"):
            await anext(stream)

    run_joined(folder, test)


def test_an_engine_that_is_not_understood_is_told_to_whoever_can_help(folder: Path) -> None:
    async def test(client: RemoteEngine, one: JoinedEngine, _: JoinedEngine) -> None:
        assert one._channel is not None
        one._channel._inbox.put_nowait(b"\xc1")
        assert "not understood" in await one.broken

    run_joined(folder, test)
