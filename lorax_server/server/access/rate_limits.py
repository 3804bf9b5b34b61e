"""Limits on concurrent responses, in total and per key, and on a key's requests, tokens and new adapters per minute.

No request waits here: a request over a limit is rejected with a retry time. Rates are token buckets that refill over
time, up to the amount of one minute. A request is charged when it arrives. Its tokens are charged when it finishes,
since their number is not known earlier; a key in debt is rejected until its bucket has refilled. New adapters have a
rate of their own: a key that has used it up can still use known adapters.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from lorax_server.errors import InputError, OverloadedError
from lorax_server.server.access.keys import Key
from lorax_server.server.access.model_names import Named

MINUTE_S = 60.0
NEW_ADAPTERS_PER_MINUTE = 60  # of a key, where neither it nor the server sets a number
BUSY_RETRY_S = 1.0  # a guess: it is not known when an answer will end
ROUNDING = 1e-6  # a client that comes back when it was told to must not be refused for a rounding error

Clock = Callable[[], float]


class TokenBucket:
    """A rate and its remaining amount; below 0 it is debt. None: no limit."""

    def __init__(self, per_minute: int | None, clock: Clock) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute or 0)
        self._filled_at = clock()

    def wait_s(self) -> float:
        """Return the seconds until one more may be taken; 0 if it may be taken now."""
        if not self.per_minute:
            return 0.0
        self.take(0)
        missing = 1 - self._level
        return missing * MINUTE_S / self.per_minute if missing > ROUNDING else 0.0

    def take(self, amount: int) -> None:
        if self.per_minute:
            now = self._clock()
            earned = (now - self._filled_at) * self.per_minute / MINUTE_S
            self._level = min(float(self.per_minute), self._level + earned) - amount
            self._filled_at = now


class _Usage:
    """The running responses of a key, and the rest of its rates."""

    def __init__(self, key: Key, clock: Clock) -> None:
        self.num_running = 0
        self.requests = TokenBucket(key.requests_per_minute, clock)
        self.tokens = TokenBucket(key.tokens_per_minute, clock)

    def check_rates(self) -> None:
        """Reject a request while a rate is used up; of two, name the one that takes longer to recover."""
        rates = ((self.requests, "requests"), (self.tokens, "tokens"))
        wait_s, limit = max((bucket.wait_s(), f"{bucket.per_minute} {unit}") for bucket, unit in rates)
        if wait_s > 0:
            raise OverloadedError(
                f"this API key has used up its {limit} a minute; try again in {math.ceil(wait_s)} s", wait_s
            )


class RateLimits:
    """Issues permits for requests. Its memory is bounded, since the server's keys never change."""

    def __init__(self, max_concurrent: int, clock: Clock = time.monotonic) -> None:
        self.num_running = 0
        self._max_concurrent = max_concurrent
        self._clock = clock
        self._usages: dict[str, _Usage] = {}  # by key name

    def acquire(self, key: Key, count: int = 1) -> "Permit":
        """Return a permit for `count` responses to one request, or reject all of them."""
        limit = min(self._max_concurrent, key.max_concurrent or self._max_concurrent)
        if not 1 <= count <= limit:  # waiting would not help
            raise InputError(f"a request may ask for 1 to {limit} answers at once, not {count}")
        usage = self._usages.get(key.name)
        if usage is None:
            usage = self._usages[key.name] = _Usage(key, self._clock)
        usage.check_rates()
        if key.max_concurrent is not None and usage.num_running + count > key.max_concurrent:
            raise OverloadedError(
                f"this API key has {usage.num_running} of at most {key.max_concurrent} answers under way and asks for "
                f"{count} more",
                BUSY_RETRY_S,
            )
        if self.num_running + count > self._max_concurrent:
            raise OverloadedError("Model is overloaded", BUSY_RETRY_S)
        usage.requests.take(1)
        usage.num_running += count
        self.num_running += count
        return Permit(self, usage, count)


class Permit:
    """Counts a request as running until it is released."""

    def __init__(self, rate_limits: RateLimits, usage: _Usage, count: int) -> None:
        self._rate_limits = rate_limits
        self._usage = usage
        self._count = count

    def release(self, tokens: int = 0) -> None:
        """Charge the tokens of prompts and responses. Only the first call counts."""
        if self._count > 0:
            self._rate_limits.num_running -= self._count
            self._usage.num_running -= self._count
            self._usage.tokens.take(max(0, tokens))
            self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class AdapterQuota:
    """A token bucket of new adapters per key. Concurrent requests of a key for the same adapter are charged once."""

    def __init__(self, per_minute: int | None = None, clock: Clock = time.monotonic) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._buckets: dict[str, TokenBucket] = {}  # by key name
        self._charges: dict[tuple[str, Named], AdapterCharge] = {}  # of adapters that are being resolved

    @contextmanager
    def share(self, key: Key, name: Named) -> Iterator["AdapterCharge"]:
        """Return the charge that all requests of a key share while they wait for the same adapter."""
        charge = self._charges.get((key.name, name))
        if charge is None:
            charge = self._charges[key.name, name] = AdapterCharge(self._bucket(key), bool(key.name))
        charge.num_waiting += 1
        try:
            yield charge
        finally:
            charge.num_waiting -= 1
            if not charge.num_waiting:
                del self._charges[key.name, name]

    def _bucket(self, key: Key) -> TokenBucket:
        """Return the bucket of a key. The key's own rate counts, else the server's, which does not bind admins."""
        if key.name not in self._buckets:
            per_minute = key.new_adapters_per_minute
            if per_minute is None and not key.is_admin:
                per_minute = self._per_minute or (NEW_ADAPTERS_PER_MINUTE if key.name else None)
            self._buckets[key.name] = TokenBucket(per_minute, self._clock)
        return self._buckets[key.name]


class AdapterCharge:
    """The charge for one new adapter."""

    def __init__(self, bucket: TokenBucket, is_of_key: bool) -> None:
        self.num_waiting = 0
        self._bucket = bucket
        self._is_of_key = is_of_key
        self._is_charged = False

    def charge(self) -> None:
        """Charge the quota for an adapter that is new here, or reject the request."""
        wait_s = self._bucket.wait_s()
        if wait_s > 0 and not self._is_charged:
            owner = "this API key has" if self._is_of_key else "the callers of this server have"
            raise OverloadedError(
                f"{owner} used up the {self._bucket.per_minute} new adapters a minute (new_adapters_per_minute); those "
                f"that are known here can be used all the same, others in {math.ceil(wait_s)} s",
                wait_s,
            )
        self.charge_late()

    def charge_late(self) -> None:
        """Charge the quota for a known adapter that had to be fetched again; the bucket may go into debt."""
        if not self._is_charged:
            self._bucket.take(1)
            self._is_charged = True

    def refund(self) -> None:
        """Refund the charge for an adapter that its source could not provide now."""
        if self._is_charged:
            self._bucket.take(-1)
            self._is_charged = False
