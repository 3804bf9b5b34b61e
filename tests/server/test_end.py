"""How the server ends: requests that are on their way are answered."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from lorax_server.server import run
from tests.server.bench import Bench
from tests.server.edge import HEALTH, TIMEOUT_S, Edge


@asynccontextmanager
async def told_to_stop(connect: Callable[[Edge], Awaitable[None]]) -> AsyncIterator[run.UvicornServer]:
    """A server that is told to stop when clients have connected, and ends while they send."""
    bench = Bench(body_timeout_s=TIMEOUT_S)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = run.UvicornServer(bench.service, "127.0.0.1")
        serving = asyncio.create_task(server.serve([listener]))
        edge = Edge(listener.getsockname()[1], bench.metrics, server.server_state)
        await connect(edge)
        server.should_exit = True
        while any(each.is_serving() for each in server.servers):
            await asyncio.sleep(0.001)
        try:
            yield server
        finally:
            await edge.close()
            await asyncio.wait_for(serving, TIMEOUT_S)
            await bench.engine.close()


def test_a_connection_that_came_before_the_end_gets_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "FIRST_S", TIMEOUT_S)

    async def check() -> None:
        silent, begun, kept = [], [], []

        async def connect(edge: Edge) -> None:
            silent.append(await edge.connect())
            begun.append(await edge.connect())
            kept.append(await edge.connect())
            await begun[0].send(HEALTH[:20])
            await kept[0].send(HEALTH)
            assert [answer.status for answer in await kept[0].hear(1)] == [200]

        async with told_to_stop(connect) as server:
            assert not server._service.is_draining
            await begun[0].send(HEALTH[20:])
            await silent[0].send(HEALTH)
            for wire in (*begun, *silent):
                assert [answer.status for answer in await wire.hear(1)] == [200]
            assert len(await kept[0].hear()) == 1  # and is closed, since it has asked for no more
        assert server._service.is_draining

    asyncio.run(check())


def test_a_client_that_says_nothing_does_not_keep_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "FIRST_S", 0.0)

    async def check() -> None:
        wires = []

        async def connect(edge: Edge) -> None:
            wires.append(await edge.connect())
            while not edge.state.connections:
                await asyncio.sleep(0.001)

        async with told_to_stop(connect):
            assert await wires[0].hear() == []

    asyncio.run(check())
