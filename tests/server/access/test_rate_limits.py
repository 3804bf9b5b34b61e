import pytest

from lorax_server.errors import InputError, OverloadedError
from lorax_server.server.access.keys import Key
from lorax_server.server.access.model_names import Named
from lorax_server.server.access.rate_limits import RateLimits

NAME = Named("hub", "owner/poet")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def retry_after(rate_limits: RateLimits, key: Key, count: int = 1) -> float:
    with pytest.raises(OverloadedError) as caught:
        rate_limits.enter(key, count)
    assert caught.value.retry_after_s is not None
    assert caught.value.retry_after_s > 0
    return caught.value.retry_after_s


def test_the_server_has_a_limit() -> None:
    rate_limits = RateLimits(3)
    first, second = rate_limits.enter(Key()), rate_limits.enter(Key(), 2)
    assert rate_limits.num_running == 3
    retry_after(rate_limits, Key())
    assert rate_limits.num_running == 3
    second.leave()
    assert rate_limits.num_running == 1
    rate_limits.enter(Key("other"), 2)
    first.leave()
    assert rate_limits.num_running == 2


def test_several_answers_come_in_together_or_not_at_all() -> None:
    rate_limits = RateLimits(3)
    rate_limits.enter(Key(), 2)
    retry_after(rate_limits, Key(), 2)
    rate_limits.enter(Key(), 1)


def test_leaving_twice_counts_once(clock: Clock) -> None:
    key = Key("k", tokens_per_minute=60)
    rate_limits = RateLimits(3, clock)
    permit = rate_limits.enter(key)
    permit.leave(60)
    permit.leave(6000)
    with permit:
        pass
    assert rate_limits.num_running == 0
    assert retry_after(rate_limits, key) == pytest.approx(1.0)


def test_a_permit_is_left_whatever_happens() -> None:
    rate_limits = RateLimits(1)
    with pytest.raises(ZeroDivisionError), rate_limits.enter(Key()):
        _ = 1 // (rate_limits.num_running - 1)
    assert rate_limits.num_running == 0
    with rate_limits.enter(Key()):
        assert rate_limits.num_running == 1


@pytest.mark.parametrize("count", [0, -1, 4, 10**30])
def test_what_can_never_come_in_is_the_requests_fault(count: int) -> None:
    with pytest.raises(InputError, match="1 to 3"):
        RateLimits(3).enter(Key(), count)
    with pytest.raises(InputError, match="1 to 3"):
        RateLimits(100).enter(Key("k", max_concurrent=3), count)


def test_a_key_at_its_limit_hinders_nobody_else() -> None:
    rate_limits = RateLimits(10)
    limited = Key("limited", max_concurrent=2)
    permit = rate_limits.enter(limited, 2)
    retry_after(rate_limits, limited)
    rate_limits.enter(Key("free"), 8).leave()
    permit.leave()
    rate_limits.enter(limited, 2)


def test_requests_per_minute(clock: Clock) -> None:
    rate_limits = RateLimits(10, clock)
    key = Key("k", requests_per_minute=2)
    rate_limits.enter(key, 5).leave()  # several answers are one request
    rate_limits.enter(key).leave()
    assert retry_after(rate_limits, key) == pytest.approx(30.0)
    clock.now += 20
    wait_s = retry_after(rate_limits, key)
    assert wait_s == pytest.approx(10.0)
    rate_limits.enter(Key("other", requests_per_minute=2)).leave()
    clock.now += wait_s
    rate_limits.enter(key).leave()
    assert retry_after(rate_limits, key) == pytest.approx(30.0)


def test_time_earns_no_more_than_a_minute(clock: Clock) -> None:
    rate_limits = RateLimits(10, clock)
    key = Key("k", requests_per_minute=2)
    rate_limits.enter(key).leave()
    clock.now += 10**6
    for _ in range(2):
        rate_limits.enter(key).leave()
    retry_after(rate_limits, key)


def test_tokens_are_paid_when_a_request_ends(clock: Clock) -> None:
    rate_limits = RateLimits(10, clock)
    key = Key("k", tokens_per_minute=600)
    first, second = rate_limits.enter(key), rate_limits.enter(key)
    first.leave(1000)
    assert retry_after(rate_limits, key) == pytest.approx(40.1)
    second.leave(200)  # debt grows
    wait_s = retry_after(rate_limits, key)
    assert wait_s == pytest.approx(60.1)
    clock.now += wait_s - 0.01
    retry_after(rate_limits, key)
    clock.now += 0.01
    rate_limits.enter(key).leave()


def test_nobody_earns_tokens_by_leaving(clock: Clock) -> None:
    rate_limits = RateLimits(10, clock)
    key = Key("k", tokens_per_minute=60)
    first, second = rate_limits.enter(key), rate_limits.enter(key)
    first.leave(600)
    second.leave(-10_000)
    assert retry_after(rate_limits, key) == pytest.approx(541.0)


@pytest.mark.parametrize("rate", [1, 7, 59, 1_000_003])
def test_who_comes_back_when_told_is_let_in(clock: Clock, rate: int) -> None:
    rate_limits = RateLimits(10, clock)
    key = Key("k", requests_per_minute=rate, tokens_per_minute=rate)
    for _ in range(50):
        rate_limits.enter(key).leave(3 * rate)
        clock.now += retry_after(rate_limits, key)


def test_who_is_refused_pays_nothing(clock: Clock) -> None:
    rate_limits = RateLimits(1, clock)
    key = Key("k", requests_per_minute=2)
    permit = rate_limits.enter(Key())
    for _ in range(5):
        retry_after(rate_limits, key)
    permit.leave()
    for _ in range(2):
        rate_limits.enter(key).leave()


def test_what_a_key_did_is_remembered_whatever_others_do(clock: Clock) -> None:
    rate_limits = RateLimits(10, clock)
    busy = rate_limits.enter(Key("busy", max_concurrent=1))
    debtor = Key("debtor", tokens_per_minute=1)
    rate_limits.enter(debtor).leave(10**9)
    for number in range(5000):
        rate_limits.enter(Key(f"k-{number}", requests_per_minute=60)).leave()
        clock.now += 1
    retry_after(rate_limits, debtor)
    retry_after(rate_limits, Key("busy", max_concurrent=1))
    busy.leave()
    assert rate_limits.num_running == 0


# --- New adapters -----------------------------------------------------------------------------------------------------


def retry_new_after(rate_limits: RateLimits, key: Key, match: str = "new adapters a minute") -> float:
    with pytest.raises(OverloadedError, match=match) as caught:
        rate_limits.take_adapter(key)
    assert caught.value.retry_after_s is not None
    return caught.value.retry_after_s


def test_new_adapters_have_a_rate_of_their_own(clock: Clock) -> None:
    rate_limits, key = RateLimits(10, clock), Key("k", new_adapters_per_minute=2)
    rate_limits.take_adapter(key)
    rate_limits.take_adapter(key)
    said = r"this API key has used up the 2 new adapters a minute \(new_adapters_per_minute\)"
    assert retry_new_after(rate_limits, key, said) == pytest.approx(30.0)
    rate_limits.enter(key).leave(10**6)  # known ones can be used
    rate_limits.take_adapter(Key("other", new_adapters_per_minute=1))
    clock.now += 30
    rate_limits.take_adapter(key)
    assert retry_new_after(rate_limits, key) == pytest.approx(30.0)


def test_an_adapter_that_turns_out_to_be_new_is_owed(clock: Clock) -> None:
    rate_limits, key = RateLimits(10, clock), Key("k", new_adapters_per_minute=1)
    for _ in range(2):
        with rate_limits.fare(key, NAME) as fare:
            fare.owe()
    assert retry_new_after(rate_limits, key) == pytest.approx(120.0)


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
    rate_limits = RateLimits(10, clock, of_server)
    for _ in range(limit or 1000):
        rate_limits.take_adapter(key)
    if limit is not None:
        retry_new_after(rate_limits, key, f"used up the {limit} new adapters a minute")


def test_requests_of_a_key_for_an_adapter_share_a_fare(clock: Clock) -> None:
    rate_limits, key = RateLimits(10, clock), Key("k", new_adapters_per_minute=1)
    with rate_limits.fare(key, NAME) as first, rate_limits.fare(key, NAME) as second:
        first.take()
        second.take()
        second.owe()
        for other, name in ((key, Named("s3", "owner/poet")), (Key("other", new_adapters_per_minute=1), NAME)):
            with rate_limits.fare(other, name) as third:
                assert third is not first
    assert retry_new_after(rate_limits, key) == pytest.approx(60.0)
    assert not rate_limits._fares


def test_a_fare_is_shared_until_an_answer_comes(clock: Clock) -> None:
    rate_limits, key = RateLimits(10, clock), Key("k", new_adapters_per_minute=5)
    with rate_limits.fare(key, NAME) as first:
        with pytest.raises(KeyboardInterrupt), rate_limits.fare(key, NAME):
            raise KeyboardInterrupt  # as a request whose client leaves
        assert rate_limits.fare(key, NAME) is first
        with pytest.raises(ZeroDivisionError), rate_limits.fare(key, NAME):
            raise ZeroDivisionError
        assert rate_limits.fare(key, NAME) is not first


def test_a_fare_that_is_given_back_is_given_back_once(clock: Clock) -> None:
    rate_limits, key = RateLimits(10, clock), Key("k", new_adapters_per_minute=2)
    rate_limits.take_adapter(key)
    with rate_limits.fare(key, NAME) as fare:
        fare.take()
        fare.give_back()
        fare.give_back()
    rate_limits.take_adapter(key)
    assert retry_new_after(rate_limits, key) == pytest.approx(30.0)


def test_a_request_that_is_refused_leaves_no_fare(clock: Clock) -> None:
    rate_limits, key = RateLimits(10, clock), Key("k", new_adapters_per_minute=1)
    rate_limits.take_adapter(key)
    with pytest.raises(OverloadedError), rate_limits.fare(key, NAME) as fare:
        fare.take()
    assert not rate_limits._fares
