"""Outputs on their way to a reader, which another may handle in its place while it waits."""

import asyncio
from collections.abc import Sequence

import pytest

from lorax_server.engine.remote.mailbox import Mailbox
from lorax_server.errors import EngineError
from lorax_server.types import Output
from tests.server.bench import settle


def test_outputs_come_together_and_in_order() -> None:
    async def check() -> None:
        mailbox = Mailbox()
        mailbox.put([Output(1)])
        mailbox.put([Output(2)])
        await mailbox.wait()
        assert mailbox.empty() == [Output(1), Output(2)]
        waiting = asyncio.create_task(mailbox.wait())
        await settle()
        assert not waiting.done()
        mailbox.put([Output(3)])
        mailbox.end()
        await waiting
        assert (mailbox.empty(), mailbox.is_ended, mailbox.error) == ([Output(3)], True, None)
        await mailbox.wait()  # there will be no more

    asyncio.run(check())


@pytest.mark.parametrize("takes", [True, False])
def test_an_output_is_offered_only_while_its_reader_waits(takes: bool) -> None:
    async def check() -> None:
        offered: list[Output] = []

        def take(outputs: Sequence[Output]) -> bool:
            offered.extend(outputs)
            return takes

        mailbox = Mailbox(take)
        mailbox.put([Output(1)])
        assert not offered  # the reader is busy, and has not seen what came before
        await mailbox.wait()
        mailbox.empty()
        waiting = asyncio.create_task(mailbox.wait())
        await settle()
        mailbox.put([Output(2)])
        mailbox.put([Output(3)])
        await settle()
        assert waiting.done() is not takes
        # A reader that was woken must get the next one too, so that their order stays.
        assert offered == ([Output(2), Output(3)] if takes else [Output(2)])
        assert mailbox.empty() == ([] if takes else [Output(2), Output(3)])
        mailbox.end()
        await waiting

    asyncio.run(check())


def test_a_reader_that_was_cancelled_is_offered_nothing() -> None:
    async def check() -> None:
        mailbox = Mailbox(bool)
        waiting = asyncio.create_task(mailbox.wait())
        await settle()
        waiting.cancel()
        mailbox.put([Output(1)])
        await settle()
        mailbox.put([Output(2)])
        assert mailbox.empty()[-1] == Output(2)

    asyncio.run(check())


def test_a_mistake_in_place_of_the_reader_ends_only_this_reader() -> None:
    async def check() -> None:
        def fail(outputs: Sequence[Output]) -> bool:
            raise KeyError("what")

        mailbox = Mailbox(fail)
        waiting = asyncio.create_task(mailbox.wait())
        await settle()
        mailbox.put([Output(1)])
        await waiting
        assert (mailbox.empty(), mailbox.is_ended, repr(mailbox.error)) == ([], True, "KeyError('what')")
        mailbox.put([Output(2)])
        assert mailbox.empty() == []

    asyncio.run(check())


def test_only_the_first_reason_counts() -> None:
    mailbox, reason = Mailbox(), EngineError("first")
    mailbox.end(reason)
    mailbox.end(EngineError("later"))
    mailbox.end()
    assert mailbox.error is reason


def test_after_an_error_of_the_one_in_its_place_a_reader_gets_no_more() -> None:
    async def check() -> None:
        def take(outputs: Sequence[Output]) -> bool:
            raise ValueError(outputs)

        mailbox = Mailbox(take)
        waiting = asyncio.create_task(mailbox.wait())
        await settle()
        mailbox.put([Output(1)])
        mailbox.put_last([Output(2)])
        mailbox.end()
        await waiting
        assert not mailbox.empty()  # or the answer would lack a token in its middle
        assert isinstance(mailbox.error, ValueError)

    asyncio.run(check())
