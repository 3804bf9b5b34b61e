import pytest

from lorax_server.errors import InputError, OverloadedError
from lorax_server.server.gate import Gate
from lorax_server.server.keys import Key


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def retry_after(gate: Gate, key: Key, count: int = 1) -> float:
    with pytest.raises(OverloadedError) as caught:
        gate.enter(key, count)
    assert caught.value.retry_after_s is not None
    assert caught.value.retry_after_s > 0
    return caught.value.retry_after_s


def test_the_server_has_a_limit() -> None:
    gate = Gate(3)
    first, second = gate.enter(Key()), gate.enter(Key(), 2)
    assert gate.num_running == 3
    retry_after(gate, Key())
    assert gate.num_running == 3
    second.leave()
    assert gate.num_running == 1
    gate.enter(Key("other"), 2)
    first.leave()
    assert gate.num_running == 2


def test_several_answers_come_in_together_or_not_at_all() -> None:
    gate = Gate(3)
    gate.enter(Key(), 2)
    retry_after(gate, Key(), 2)
    gate.enter(Key(), 1)


def test_leaving_twice_counts_once(clock: Clock) -> None:
    key = Key("k", tokens_per_minute=60)
    gate = Gate(3, clock)
    permit = gate.enter(key)
    permit.leave(60)
    permit.leave(6000)
    with permit:
        pass
    assert gate.num_running == 0
    assert retry_after(gate, key) == pytest.approx(1.0)


def test_a_permit_is_left_whatever_happens() -> None:
    gate = Gate(1)
    with pytest.raises(ZeroDivisionError), gate.enter(Key()):
        _ = 1 // (gate.num_running - 1)
    assert gate.num_running == 0
    with gate.enter(Key()):
        assert gate.num_running == 1


@pytest.mark.parametrize("count", [0, -1, 4, 10**30])
def test_what_can_never_come_in_is_the_requests_fault(count: int) -> None:
    with pytest.raises(InputError, match="1 to 3"):
        Gate(3).enter(Key(), count)
    with pytest.raises(InputError, match="1 to 3"):
        Gate(100).enter(Key("k", max_concurrent=3), count)


def test_a_key_at_its_limit_hinders_nobody_else() -> None:
    gate = Gate(10)
    limited = Key("limited", max_concurrent=2)
    permit = gate.enter(limited, 2)
    retry_after(gate, limited)
    gate.enter(Key("free"), 8).leave()
    permit.leave()
    gate.enter(limited, 2)


def test_requests_per_minute(clock: Clock) -> None:
    gate = Gate(10, clock)
    key = Key("k", requests_per_minute=2)
    gate.enter(key, 5).leave()  # several answers are one request
    gate.enter(key).leave()
    assert retry_after(gate, key) == pytest.approx(30.0)
    clock.now += 20
    wait_s = retry_after(gate, key)
    assert wait_s == pytest.approx(10.0)
    gate.enter(Key("other", requests_per_minute=2)).leave()
    clock.now += wait_s
    gate.enter(key).leave()
    assert retry_after(gate, key) == pytest.approx(30.0)


def test_time_earns_no_more_than_a_minute(clock: Clock) -> None:
    gate = Gate(10, clock)
    key = Key("k", requests_per_minute=2)
    gate.enter(key).leave()
    clock.now += 10**6
    for _ in range(2):
        gate.enter(key).leave()
    retry_after(gate, key)


def test_tokens_are_paid_when_a_request_ends(clock: Clock) -> None:
    gate = Gate(10, clock)
    key = Key("k", tokens_per_minute=600)
    first, second = gate.enter(key), gate.enter(key)
    first.leave(1000)
    assert retry_after(gate, key) == pytest.approx(40.1)
    second.leave(200)  # debt grows
    wait_s = retry_after(gate, key)
    assert wait_s == pytest.approx(60.1)
    clock.now += wait_s - 0.01
    retry_after(gate, key)
    clock.now += 0.01
    gate.enter(key).leave()


def test_nobody_earns_tokens_by_leaving(clock: Clock) -> None:
    gate = Gate(10, clock)
    key = Key("k", tokens_per_minute=60)
    first, second = gate.enter(key), gate.enter(key)
    first.leave(600)
    second.leave(-10_000)
    assert retry_after(gate, key) == pytest.approx(541.0)


@pytest.mark.parametrize("rate", [1, 7, 59, 1_000_003])
def test_who_comes_back_when_told_is_let_in(clock: Clock, rate: int) -> None:
    gate = Gate(10, clock)
    key = Key("k", requests_per_minute=rate, tokens_per_minute=rate)
    for _ in range(50):
        gate.enter(key).leave(3 * rate)
        clock.now += retry_after(gate, key)


def test_who_is_refused_pays_nothing(clock: Clock) -> None:
    gate = Gate(1, clock)
    key = Key("k", requests_per_minute=2)
    permit = gate.enter(Key())
    for _ in range(5):
        retry_after(gate, key)
    permit.leave()
    for _ in range(2):
        gate.enter(key).leave()


def test_what_is_remembered_is_bounded(clock: Clock) -> None:
    gate = Gate(10, clock)
    for number in range(5000):
        gate.enter(Key(f"free-{number}")).leave(10)
    assert len(gate._usages) == 0
    busy = gate.enter(Key("busy", max_concurrent=1))
    debtor = Key("debtor", tokens_per_minute=1)
    gate.enter(debtor).leave(10**9)
    for number in range(5000):
        gate.enter(Key(f"k-{number}", requests_per_minute=60)).leave()
        clock.now += 1
    assert len(gate._usages) <= 1024
    retry_after(gate, debtor)
    retry_after(gate, Key("busy", max_concurrent=1))
    busy.leave()
    assert gate.num_running == 0


# --- New adapters -----------------------------------------------------------------------------------------------------


def retry_new_after(gate: Gate, key: Key, match: str = "new adapters a minute") -> float:
    with pytest.raises(OverloadedError, match=match) as caught:
        gate.take_adapter(key)
    assert caught.value.retry_after_s is not None
    return caught.value.retry_after_s


def test_new_adapters_have_a_rate_of_their_own(clock: Clock) -> None:
    gate, key = Gate(10, clock), Key("k", new_adapters_per_minute=2)
    gate.take_adapter(key)
    gate.take_adapter(key)
    said = r"this API key has used up the 2 new adapters a minute \(new_adapters_per_minute\)"
    assert retry_new_after(gate, key, said) == pytest.approx(30.0)
    gate.enter(key).leave(10**6)  # known ones can be used
    gate.take_adapter(Key("other", new_adapters_per_minute=1))
    clock.now += 30
    gate.take_adapter(key)
    assert retry_new_after(gate, key) == pytest.approx(30.0)


def test_an_adapter_that_turns_out_to_be_new_is_owed(clock: Clock) -> None:
    gate, key = Gate(10, clock), Key("k", new_adapters_per_minute=1)
    gate.owe_adapter(key)
    gate.owe_adapter(key)
    assert retry_new_after(gate, key) == pytest.approx(120.0)


@pytest.mark.parametrize(
    ("key", "of_server", "limit"),
    [
        (Key("k"), None, 60),
        (Key("k"), 7, 7),
        (Key("k", new_adapters_per_minute=3), 7, 3),
        (Key(), 7, 7),
        (Key(), None, None),
        (Key("admin", is_admin=True), None, None),
        (Key("admin", is_admin=True), 7, None),
        (Key("admin", is_admin=True, new_adapters_per_minute=2), 7, 2),
    ],
)
def test_who_has_how_many_new_adapters(clock: Clock, key: Key, of_server: int | None, limit: int | None) -> None:
    gate = Gate(10, clock, of_server)
    for _ in range(limit or 1000):
        gate.take_adapter(key)
    if limit is not None:
        retry_new_after(gate, key, f"used up the {limit} new adapters a minute")


def test_what_is_remembered_of_new_adapters_is_bounded(clock: Clock) -> None:
    gate = Gate(10, clock)
    for number in range(5000):
        gate.take_adapter(Key(f"k-{number}"))
        clock.now += 1
    assert len(gate._usages) <= 1024


PLACE = ("hub", "owner/poet")


def test_requests_of_a_key_for_an_adapter_share_a_fare(clock: Clock) -> None:
    gate, key = Gate(10, clock), Key("k", new_adapters_per_minute=1)
    with gate.fare(key, PLACE) as first, gate.fare(key, PLACE) as second:
        first.take()
        second.take()
        second.owe()
        for other, place in ((key, ("s3", "owner/poet")), (Key("other", new_adapters_per_minute=1), PLACE)):
            with gate.fare(other, place) as third:
                assert third is not first
    assert retry_new_after(gate, key) == pytest.approx(60.0)
    assert not gate._fares


def test_a_fare_is_shared_until_an_answer_comes(clock: Clock) -> None:
    gate, key = Gate(10, clock), Key("k", new_adapters_per_minute=5)
    with gate.fare(key, PLACE) as first:
        with pytest.raises(KeyboardInterrupt), gate.fare(key, PLACE):
            raise KeyboardInterrupt  # as a request whose client leaves
        assert gate.fare(key, PLACE) is first
        with pytest.raises(ZeroDivisionError), gate.fare(key, PLACE):
            raise ZeroDivisionError
        assert gate.fare(key, PLACE) is not first


def test_a_fare_that_is_given_back_is_given_back_once(clock: Clock) -> None:
    gate, key = Gate(10, clock), Key("k", new_adapters_per_minute=2)
    gate.take_adapter(key)
    with gate.fare(key, PLACE) as fare:
        fare.take()
        fare.give_back()
        fare.give_back()
    gate.take_adapter(key)
    assert retry_new_after(gate, key) == pytest.approx(30.0)


def test_a_request_that_is_refused_leaves_no_fare(clock: Clock) -> None:
    gate, key = Gate(10, clock), Key("k", new_adapters_per_minute=1)
    gate.take_adapter(key)
    with pytest.raises(OverloadedError), gate.fare(key, PLACE) as fare:
        fare.take()
    assert not gate._fares
