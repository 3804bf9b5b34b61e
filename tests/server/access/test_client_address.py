"""The address of a client behind an ingress: what is believed, and what is not, once and once more."""

import asyncio
import itertools
import logging
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from lorax_server.errors import AuthenticationError
from lorax_server.server.access.client_address import CLIENT_HEADER, WARN_S, ClientAddress, sign_client
from lorax_server.server.access.used_signatures import GOOD_S, UsedSignatures

KEY, NOW, INGRESS, SERVER = "a key", 1_800_000_000.0, "10.0.0.1", "10.0.0.2:3000"


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


class World:
    """A server behind the check, and the request that it got last."""

    def __init__(self, key: str = KEY) -> None:
        self.clock, self.got = Clock(), dict[str, Any]()
        self._used = UsedSignatures(self.clock)
        self._check = ClientAddress(self._answer, key, SERVER, self._use, self.clock)

    async def _use(self, signature: bytes) -> None:
        self._used.use(signature)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.got = dict(scope)

    def ask(self, *headers: str, target: str = "/generate", method: str = "POST") -> str:
        """Send a request with these headers, and return the address by which the server knows the client."""
        path, _, query = target.partition("?")
        scope: dict[str, Any] = {"type": "http", "method": method, "client": (INGRESS, 5)}
        scope |= {"raw_path": path.encode(), "query_string": query.encode()}
        scope |= {"headers": [(CLIENT_HEADER.encode(), value.encode()) for value in headers]}
        asyncio.run(self._check(scope, None, None))  # type: ignore[arg-type]
        assert self.got["headers"] == []
        return str(self.got["client"][0])


def sign(
    key: str = KEY, target: str = "/generate", address: str = "1.2.3.4", now: float = NOW, server: str = SERVER
) -> str:
    return sign_client(key, server, "POST", target, address, now)


@pytest.mark.parametrize("target", ["/generate", "/v1/models?a=b&c=%20", "/a%2Fb"])
@pytest.mark.parametrize("address", ["1.2.3.4", "fe80::1", "a name"])
def test_an_address_that_is_signed_is_believed(target: str, address: str) -> None:
    assert World().ask(sign(target=target, address=address), target=target) == address


def test_the_key_does_not_travel() -> None:
    assert KEY not in sign()


def test_a_signature_is_good_for_nothing_else() -> None:
    world, seconds = World(), str(int(NOW))
    _, number, signature, _ = sign().split(" ")
    _, another, *_ = sign().split(" ")
    assert world.ask(sign("another")) == INGRESS
    assert world.ask(sign(), target="/v1/models") == INGRESS
    assert world.ask(sign(), target="/generate?x=1") == INGRESS
    assert world.ask(sign(), method="GET") == INGRESS
    assert world.ask(sign(server="10.0.0.3:3000")) == INGRESS
    assert world.ask(f"{seconds} {number} {signature} 6.6.6.6") == INGRESS
    assert world.ask(f"{int(NOW) + 1} {number} {signature} 1.2.3.4") == INGRESS
    assert world.ask(f"{seconds} {another} {signature} 1.2.3.4") == INGRESS
    assert world.ask(sign(), sign()) == INGRESS
    start = f"{seconds} {number}"
    for header in ("", " ", "   ", "1.2.3.4", f"{start} {signature}", f"{start} {signature} ", f"{start}  1.2.3.4"):
        assert world.ask(header) == INGRESS
    for time in ("x", "", "9" * 5000):
        assert world.ask(f"{time} {number} {signature} 1.2.3.4") == INGRESS
    assert world.ask() == INGRESS
    assert world.ask(sign()) == "1.2.3.4"


def test_a_server_without_a_key_believes_nobody() -> None:
    assert World("").ask(sign("")) == INGRESS


def test_a_signature_grows_old_and_clocks_that_differ_are_told(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    for later in (-GOOD_S, GOOD_S):
        world.clock.now = NOW + later
        assert world.ask(sign()) == "1.2.3.4"
    with caplog.at_level(logging.WARNING):
        for much_later in (GOOD_S + 1, GOOD_S + 2, GOOD_S + 1 + WARN_S):
            world.clock.now = NOW + much_later
            assert world.ask(sign()) == INGRESS
            assert world.ask(sign("another")) == INGRESS
    assert len(caplog.records) == 2
    assert "set the clocks of both machines" in caplog.text


def test_a_request_that_is_sent_again_is_its_senders_own(caplog: pytest.LogCaptureFixture) -> None:
    """As long as the signature is not too old anyway, also by a clock that differs. The log is not filled."""
    world, header, of_the_same_second = World(), sign(), sign()
    world.clock.now = NOW - GOOD_S
    assert world.ask(header) == "1.2.3.4"
    with caplog.at_level(logging.WARNING):
        for later in range(-GOOD_S, GOOD_S + 1, 10):
            world.clock.now = NOW + later
            assert world.ask(header) == INGRESS
    assert world.ask(of_the_same_second) == "1.2.3.4"
    assert 1 <= len(caplog.records) <= 1 + 2 * GOOD_S // WARN_S
    assert "was used before" in caplog.text


@pytest.mark.parametrize("began", [0.0, 0.1, 0.5, 0.9])
def test_a_signature_of_a_clock_that_is_ahead_is_not_good_twice(began: float) -> None:
    """However the seconds of the clocks lie to each other, and to the times at which signatures are forgotten."""
    for first, last in itertools.product(range(-10, 12, 3), repeat=2):
        world = World()
        for now in (NOW - 1000, NOW + began):
            world.clock.now = now
            world.ask(sign(now=now))
        signed = NOW + 3 * GOOD_S
        again = [signed - GOOD_S + first / 10, signed + GOOD_S + last / 10]
        header, believed = sign(now=signed), 0
        for now in sorted([*again, NOW + began + 2 * GOOD_S, NOW + began + 4 * GOOD_S]):
            world.clock.now = now
            if now in again:
                believed += world.ask(header) == "1.2.3.4"
            else:
                world.ask(sign(now=now))
        assert believed <= 1


def test_signatures_are_remembered_while_they_are_good_and_no_longer_than_twice_that() -> None:
    clock = Clock()
    used = UsedSignatures(clock)
    for begin in range(0, 2 * GOOD_S, 7):
        clock.now = NOW + 1000 * begin
        signature = str(begin).encode()
        used.use(signature)
        for later in range(0, 2 * GOOD_S + 1, 10):
            clock.now = NOW + 1000 * begin + later
            used.use(f"{begin} {later}".encode())
            with pytest.raises(AuthenticationError, match="was used before"):
                used.use(signature)
    for _ in range(2):
        clock.now += 2 * GOOD_S
        used.use(str(clock.now).encode())
    assert len(used._signatures) + len(used._earlier) == 2
