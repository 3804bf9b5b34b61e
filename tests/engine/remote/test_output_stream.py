"""Outputs on their way to a reader, which another may handle in its place while it waits."""

import asyncio
from collections.abc import Sequence

import pytest

from lorax_server.engine.remote.output_stream import OutputStream
from lorax_server.errors import EngineError
from lorax_server.types import Output
from tests.server.bench import settle


def test_outputs_come_together_and_in_order() -> None:
    async def check() -> None:
        stream = OutputStream()
        stream.push([Output(1)])
        stream.push([Output(2)])
        await stream.wait()
        assert stream.drain() == [Output(1), Output(2)]
        waiting = asyncio.create_task(stream.wait())
        await settle()
        assert not waiting.done()
        stream.push([Output(3)])
        stream.close()
        await waiting
        assert (stream.drain(), stream.is_closed, stream.error) == ([Output(3)], True, None)
        await stream.wait()  # there will be no more

    asyncio.run(check())


@pytest.mark.parametrize("takes", [True, False])
def test_an_output_is_offered_only_while_its_reader_waits(takes: bool) -> None:
    async def check() -> None:
        offered: list[Output] = []

        def take(outputs: Sequence[Output]) -> bool:
            offered.extend(outputs)
            return takes

        stream = OutputStream(take)
        stream.push([Output(1)])
        assert not offered  # the reader is busy, and has not seen what came before
        await stream.wait()
        stream.drain()
        waiting = asyncio.create_task(stream.wait())
        await settle()
        stream.push([Output(2)])
        stream.push([Output(3)])
        await settle()
        assert waiting.done() is not takes
        # A reader that was woken must get the next one too, so that their order stays.
        assert offered == ([Output(2), Output(3)] if takes else [Output(2)])
        assert stream.drain() == ([] if takes else [Output(2), Output(3)])
        stream.close()
        await waiting

    asyncio.run(check())


def test_a_reader_that_was_cancelled_is_offered_nothing() -> None:
    async def check() -> None:
        stream = OutputStream(bool)
        waiting = asyncio.create_task(stream.wait())
        await settle()
        waiting.cancel()
        stream.push([Output(1)])
        await settle()
        stream.push([Output(2)])
        assert stream.drain()[-1] == Output(2)

    asyncio.run(check())


def test_a_mistake_in_place_of_the_reader_ends_only_this_reader() -> None:
    async def check() -> None:
        def fail(outputs: Sequence[Output]) -> bool:
            raise KeyError("what")

        stream = OutputStream(fail)
        waiting = asyncio.create_task(stream.wait())
        await settle()
        stream.push([Output(1)])
        await waiting
        assert (stream.drain(), stream.is_closed, repr(stream.error)) == ([], True, "KeyError('what')")
        stream.push([Output(2)])
        assert stream.drain() == []

    asyncio.run(check())


def test_only_the_first_reason_counts() -> None:
    stream, reason = OutputStream(), EngineError("first")
    stream.close(reason)
    stream.close(EngineError("later"))
    stream.close()
    assert stream.error is reason


def test_after_an_error_of_the_one_in_its_place_a_reader_gets_no_more() -> None:
    async def check() -> None:
        def take(outputs: Sequence[Output]) -> bool:
            raise ValueError(outputs)

        stream = OutputStream(take)
        waiting = asyncio.create_task(stream.wait())
        await settle()
        stream.push([Output(1)])
        stream.push([Output(2)], is_last=True)
        stream.close()
        await waiting
        assert not stream.drain()  # or the answer would lack a token in its middle
        assert isinstance(stream.error, ValueError)

    asyncio.run(check())
