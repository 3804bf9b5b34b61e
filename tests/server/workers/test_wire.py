"""Messages between a parent and a worker arrive whole, in order, or the wire ends."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from lorax_server.errors import InputError
from lorax_server.server.access.model_names import Named
from lorax_server.server.seen_adapters import SeenAdapters
from lorax_server.server.telemetry.request_record import RequestRecord
from lorax_server.server.workers import messages
from lorax_server.server.workers.changes import AdapterFound, FolderRead
from lorax_server.server.workers.wire import Wire

Heard = list[messages.ToParent]


def run(test: Callable[[Wire[messages.ToParent], Heard, socket.socket], Awaitable[None]]) -> None:
    async def talk() -> None:
        heard: Heard = []
        wire: Wire[messages.ToParent] = Wire(messages.ToParent, heard.append)
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        await wire.open(ours)
        try:
            async with asyncio.timeout(30):
                await test(wire, heard, theirs)
        finally:
            wire.close()
            theirs.close()
            await wire.lost

    asyncio.run(talk())


def test_messages_of_any_size_arrive_in_order() -> None:
    names = [f"adapter-{number}" for number in range(100_000)]
    sent: Heard = [messages.Synced(number) for number in range(1000)]
    sent.insert(500, messages.ChangeAsked(7, FolderRead(names)))
    sent.append(messages.RequestEnded(RequestRecord("", "", adapter_id="ä", first_token_s=0.5)))

    async def talk() -> None:
        heard: Heard = []
        ends = socket.socketpair()
        wires: list[Wire[messages.ToParent]] = [Wire(messages.ToParent, heard.append) for _ in ends]
        for wire, end in zip(wires, ends, strict=True):
            await wire.open(end)
        for message in sent:
            wires[0].send(message)
        wires[0].close()
        await wires[1].lost
        assert heard == sent

    asyncio.run(talk())


def test_a_message_that_comes_byte_by_byte_is_one_message() -> None:
    async def test(wire: Wire[messages.ToParent], heard: Heard, theirs: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        wire.send(messages.Synced(1))
        wire.send(messages.ChangeAsked(2, AdapterFound("hash", Named("hub", "owner/name"))))
        data = await loop.sock_recv(theirs, 10_000)
        for byte in data:
            await loop.sock_sendall(theirs, bytes([byte]))
            await asyncio.sleep(0)
        while len(heard) < 2:
            await asyncio.sleep(0.001)
        assert heard == [
            messages.Synced(1),
            messages.ChangeAsked(2, AdapterFound("hash", Named("hub", "owner/name"))),
        ]

    run(test)


@pytest.mark.parametrize("data", [b"\x01\0\0\0\xc1", b"\x03\0\0\0abc", b"\x02\0\0\0\x81\xa4"])
def test_what_is_no_message_ends_the_wire(data: bytes) -> None:
    async def test(wire: Wire[messages.ToParent], heard: Heard, theirs: socket.socket) -> None:
        await asyncio.get_running_loop().sock_sendall(theirs, data)
        await wire.lost
        wire.send(messages.Synced(1))  # to nobody
        assert heard == []

    run(test)


def test_text_that_cannot_be_sent_is_refused_and_the_wire_goes_on() -> None:
    async def test(wire: Wire[messages.ToParent], heard: Heard, theirs: socket.socket) -> None:
        with pytest.raises(InputError, match="FareOpened cannot be sent"):
            wire.send(messages.FareOpened(1, "key", Named("hub", "\ud800")))
        wire.send(messages.Synced(3))
        assert await asyncio.get_running_loop().sock_recv(theirs, 100)

    run(test)


def test_a_snapshot_is_the_same_again() -> None:
    seen, copy = SeenAdapters(), SeenAdapters()
    for number in range(30):
        seen.note(f"hash-{number % 7}", Named("hub", f"name-{number % 11}"))
    seen.note("merged", Named("", "a,b"))
    seen.pin("hash-3", Named("hub", "name-3"))
    seen.set_error(Named("hub", "name-5"), "broken")
    copy.restore(seen.snapshot())
    assert copy.snapshot() == seen.snapshot()
    for each in (seen, copy):
        each.note("new", Named("local", "new"))
        each.forget("hash-2")
        each.forget("never seen")
    assert copy.snapshot() == seen.snapshot()
    assert list(copy.identities_after("")) == list(seen.identities_after(""))
    assert seen.knows("new", Named("local", "new"))
    assert not seen.knows("other", Named("local", "new"))
    assert not seen.knows(seen.latest(Named("hub", "name-5")), Named("hub", "name-5"))  # its error is news
