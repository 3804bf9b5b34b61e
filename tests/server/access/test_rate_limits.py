from contextlib import suppress

import pytest

from lorax_server.errors import InputError, OverloadedError
from lorax_server.server.access.keys import Key
from lorax_server.server.access.model_names import AdapterKey
from lorax_server.server.access.rate_limits import AdapterQuota, RateLimits

NAME = AdapterKey("hub", "owner/poet")


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
        rate_limits.acquire(key, count)
    assert caught.value.retry_after_s is not None
    assert caught.value.retry_after_s > 0
    return caught.value.retry_after_s


def test_server_limits_concurrent_completions() -> None:
    rate_limits = RateLimits(3)
    first, second = rate_limits.acquire(Key()), rate_limits.acquire(Key(), 2)
    assert rate_limits.num_running == 3
    retry_after(rate_limits, Key())
    assert rate_limits.num_running == 3
    second.release()
    assert rate_limits.num_running == 1
    rate_limits.acquire(Key("other"), 2)
    first.release()
    assert rate_limits.num_running == 2


def test_completions_of_one_request_are_admitted_together() -> None:
    rate_limits = RateLimits(3)
    rate_limits.acquire(Key(), 2)
    retry_after(rate_limits, Key(), 2)
    rate_limits.acquire(Key(), 1)


def test_second_release_has_no_effect(clock: Clock) -> None:
    key = Key("k", tokens_per_minute=60)
    rate_limits = RateLimits(3, clock)
    permit = rate_limits.acquire(key)
    permit.release(60)
    permit.release(6000)
    with permit:
        pass
    assert rate_limits.num_running == 0
    assert retry_after(rate_limits, key) == pytest.approx(1.0)


def test_permit_is_released_after_exception() -> None:
    rate_limits = RateLimits(1)
    with pytest.raises(ZeroDivisionError), rate_limits.acquire(Key()):
        _ = 1 // (rate_limits.num_running - 1)
    assert rate_limits.num_running == 0
    with rate_limits.acquire(Key()):
        assert rate_limits.num_running == 1


@pytest.mark.parametrize("count", [0, -1, 4, 10**30])
def test_request_above_total_limit_is_input_error(count: int) -> None:
    with pytest.raises(InputError, match="1 to 3"):
        RateLimits(3).acquire(Key(), count)
    with pytest.raises(InputError, match="1 to 3"):
        RateLimits(100).acquire(Key("k", max_concurrent=3), count)


def test_key_at_limit_does_not_block_other_keys() -> None:
    rate_limits = RateLimits(10)
    limited = Key("limited", max_concurrent=2)
    permit = rate_limits.acquire(limited, 2)
    retry_after(rate_limits, limited)
    rate_limits.acquire(Key("free"), 8).release()
    permit.release()
    rate_limits.acquire(limited, 2)


def test_requests_per_minute_are_limited(clock: Clock) -> None:
    rate_limits = RateLimits(10, clock)
    key = Key("k", requests_per_minute=2)
    rate_limits.acquire(key, 5).release()  # several completions count as one request
    rate_limits.acquire(key).release()
    assert retry_after(rate_limits, key) == pytest.approx(30.0)
    clock.now += 20
    wait_s = retry_after(rate_limits, key)
    assert wait_s == pytest.approx(10.0)
    rate_limits.acquire(Key("other", requests_per_minute=2)).release()
    clock.now += wait_s
    rate_limits.acquire(key).release()
    assert retry_after(rate_limits, key) == pytest.approx(30.0)


def test_bucket_holds_at_most_one_minute(clock: Clock) -> None:
    rate_limits = RateLimits(10, clock)
    key = Key("k", requests_per_minute=2)
    rate_limits.acquire(key).release()
    clock.now += 10**6
    for _ in range(2):
        rate_limits.acquire(key).release()
    retry_after(rate_limits, key)


def test_tokens_are_charged_on_release(clock: Clock) -> None:
    rate_limits = RateLimits(10, clock)
    key = Key("k", tokens_per_minute=600)
    first, second = rate_limits.acquire(key), rate_limits.acquire(key)
    first.release(1000)
    assert retry_after(rate_limits, key) == pytest.approx(40.1)
    second.release(200)  # debt grows
    wait_s = retry_after(rate_limits, key)
    assert wait_s == pytest.approx(60.1)
    clock.now += wait_s - 0.01
    retry_after(rate_limits, key)
    clock.now += 0.01
    rate_limits.acquire(key).release()


def test_negative_token_count_earns_no_credit(clock: Clock) -> None:
    rate_limits = RateLimits(10, clock)
    key = Key("k", tokens_per_minute=60)
    first, second = rate_limits.acquire(key), rate_limits.acquire(key)
    first.release(600)
    second.release(-10_000)
    assert retry_after(rate_limits, key) == pytest.approx(541.0)


@pytest.mark.parametrize("rate", [1, 7, 59, 1_000_003])
def test_retry_after_returned_delay_is_admitted(clock: Clock, rate: int) -> None:
    rate_limits = RateLimits(10, clock)
    key = Key("k", requests_per_minute=rate, tokens_per_minute=rate)
    for _ in range(50):
        rate_limits.acquire(key).release(3 * rate)
        clock.now += retry_after(rate_limits, key)


def test_rejected_request_is_not_charged(clock: Clock) -> None:
    rate_limits = RateLimits(1, clock)
    key = Key("k", requests_per_minute=2)
    permit = rate_limits.acquire(Key())
    for _ in range(5):
        retry_after(rate_limits, key)
    permit.release()
    for _ in range(2):
        rate_limits.acquire(key).release()


def test_key_usage_survives_traffic_from_other_keys(clock: Clock) -> None:
    rate_limits = RateLimits(10, clock)
    busy = rate_limits.acquire(Key("busy", max_concurrent=1))
    debtor = Key("debtor", tokens_per_minute=1)
    rate_limits.acquire(debtor).release(10**9)
    for number in range(5000):
        rate_limits.acquire(Key(f"k-{number}", requests_per_minute=60)).release()
        clock.now += 1
    retry_after(rate_limits, debtor)
    retry_after(rate_limits, Key("busy", max_concurrent=1))
    busy.release()
    assert rate_limits.num_running == 0


# --- New adapters -----------------------------------------------------------------------------------------------------


def charge(quota: AdapterQuota, key: Key, name: AdapterKey = NAME) -> None:
    with quota.open_charge(key, name) as charge:
        charge.charge()


def retry_new_after(quota: AdapterQuota, key: Key, match: str = "new adapters per minute") -> float:
    with pytest.raises(OverloadedError, match=match) as caught:
        charge(quota, key)
    assert caught.value.retry_after_s is not None
    return caught.value.retry_after_s


def test_new_adapters_have_separate_limit(clock: Clock) -> None:
    quota, key = AdapterQuota(None, clock), Key("k", new_adapters_per_minute=2)
    charge(quota, key)
    charge(quota, key)
    message = r"this API key has reached the limit of 2 new adapters per minute \(new_adapters_per_minute\)"
    assert retry_new_after(quota, key, message) == pytest.approx(30.0)
    charge(quota, Key("other", new_adapters_per_minute=1))
    clock.now += 30
    charge(quota, key)
    assert retry_new_after(quota, key) == pytest.approx(30.0)


def test_refetched_adapter_is_charged_after_fetch(clock: Clock) -> None:
    quota, key = AdapterQuota(None, clock), Key("k", new_adapters_per_minute=1)
    for _ in range(2):
        with quota.open_charge(key, NAME) as charged:
            charged.charge_after_fetch()
    assert retry_new_after(quota, key) == pytest.approx(120.0)


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
def test_adapter_quota_is_per_key(clock: Clock, key: Key, of_server: int | None, limit: int | None) -> None:
    quota = AdapterQuota(of_server, clock)
    for _ in range(limit or 1000):
        charge(quota, key)
    if limit is not None:
        retry_new_after(quota, key, f"reached the limit of {limit} new adapters per minute")


def test_concurrent_requests_for_adapter_are_charged_once(clock: Clock) -> None:
    quota, key, other = AdapterQuota(None, clock), Key("k", new_adapters_per_minute=2), AdapterKey("s3", "owner/poet")
    with quota.open_charge(key, NAME) as first, quota.open_charge(key, NAME) as second:
        first.charge()
        second.charge()
        second.charge_after_fetch()
        charge(quota, key, other)  # another adapter is charged
        charge(quota, Key("other", new_adapters_per_minute=1))  # so is another key
    assert retry_new_after(quota, key) == pytest.approx(30.0)


def test_later_request_for_adapter_is_charged_again(clock: Clock) -> None:
    quota, key = AdapterQuota(None, clock), Key("k", new_adapters_per_minute=1)
    with suppress(ZeroDivisionError), quota.open_charge(key, NAME) as charged:
        charged.charge()
        raise ZeroDivisionError
    assert retry_new_after(quota, key) == pytest.approx(60.0)


def test_charge_is_refunded_once(clock: Clock) -> None:
    quota, key = AdapterQuota(None, clock), Key("k", new_adapters_per_minute=2)
    charge(quota, key)
    with quota.open_charge(key, NAME) as charged:
        charged.charge()
        charged.refund()
        charged.refund()
    charge(quota, key)
    assert retry_new_after(quota, key) == pytest.approx(30.0)
