"""Output streams: buffering, and handlers that consume outputs while the reader waits."""

import asyncio
from collections.abc import Sequence

import pytest

from lorax_server.engine.remote.output_stream import OutputStream
from lorax_server.errors import EngineError
from lorax_server.types import Output
from tests.server.service_harness import settle


def test_outputs_are_drained_in_order() -> None:
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
        await stream.wait()  # no more outputs

    asyncio.run(check())


@pytest.mark.parametrize("takes", [True, False])
def test_handler_runs_only_while_reader_waits(takes: bool) -> None:
    async def check() -> None:
        offered: list[Output] = []

        def take(outputs: Sequence[Output]) -> bool:
            offered.extend(outputs)
            return takes

        stream = OutputStream(take)
        stream.push([Output(1)])
        assert not offered  # the reader is busy and has older outputs
        await stream.wait()
        stream.drain()
        waiting = asyncio.create_task(stream.wait())
        await settle()
        stream.push([Output(2)])
        stream.push([Output(3)])
        await settle()
        assert waiting.done() is not takes
        # A woken reader must also get the next output, to keep the order.
        assert offered == ([Output(2), Output(3)] if takes else [Output(2)])
        assert stream.drain() == ([] if takes else [Output(2), Output(3)])
        stream.close()
        await waiting

    asyncio.run(check())


def test_handler_is_not_called_after_cancel() -> None:
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


def test_handler_error_closes_only_its_stream() -> None:
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


def test_first_close_error_is_kept() -> None:
    stream, reason = OutputStream(), EngineError("first")
    stream.close(reason)
    stream.close(EngineError("later"))
    stream.close()
    assert stream.error is reason


def test_no_outputs_after_handler_error() -> None:
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
        assert not stream.drain()  # otherwise a token would be missing
        assert isinstance(stream.error, ValueError)

    asyncio.run(check())
