"""Limits the concurrent completions, in total and per key, and the requests, tokens and new adapters per minute and
key.

Requests that exceed a limit are rejected with a retry time. Each rate limit is a token bucket whose capacity is the
limit per minute. Tokens are charged when a request finishes, so a bucket's level can be negative (debt). The limit for
new adapters does not apply to known adapters.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from lorax_server.errors import InputError, OverloadedError
from lorax_server.server.access.keys import Key
from lorax_server.server.access.model_names import AdapterKey

MINUTE_S = 60.0
DEFAULT_NEW_ADAPTERS_PER_MINUTE = 60  # limit per key, if neither the key nor the server sets one
BUSY_RETRY_S = 1.0  # an estimate, because it is unknown when running requests finish
ROUNDING_TOLERANCE = 1e-6  # a retry after exactly the returned delay must not fail because of rounding

Clock = Callable[[], float]


class TokenBucket:
    """A token bucket. Its level may be negative (debt). If `per_minute` is None, the bucket has no limit."""

    def __init__(self, per_minute: int | None, clock: Clock) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute or 0)
        self._updated_at = clock()

    def seconds_until_available(self) -> float:
        """Return the seconds until one unit is available, or 0 if one is available now."""
        if not self.per_minute:
            return 0.0
        self.consume(0)
        missing = 1 - self._level
        return missing * MINUTE_S / self.per_minute if missing > ROUNDING_TOLERANCE else 0.0

    def consume(self, amount: int) -> None:
        if self.per_minute:
            now = self._clock()
            refill = (now - self._updated_at) * self.per_minute / MINUTE_S
            self._level = min(float(self.per_minute), self._level + refill) - amount
            self._updated_at = now


class _KeyUsage:
    """A key's running completions and token buckets."""

    def __init__(self, key: Key, clock: Clock) -> None:
        self.num_running = 0
        self.requests = TokenBucket(key.requests_per_minute, clock)
        self.tokens = TokenBucket(key.tokens_per_minute, clock)

    def check_rates(self) -> None:
        """Raise if a rate limit is exhausted. Report the limit that takes longest to recover."""
        rates = ((self.requests, "requests"), (self.tokens, "tokens"))
        wait_s, limit = max((bucket.seconds_until_available(), f"{bucket.per_minute} {unit}") for bucket, unit in rates)
        if wait_s > 0:
            raise OverloadedError(
                f"this API key has reached its limit of {limit} per minute; retry in {math.ceil(wait_s)} s", wait_s
            )


class RateLimits:
    """Grants permits for requests. Memory is bounded because the set of keys is fixed."""

    def __init__(self, max_concurrent: int, clock: Clock = time.monotonic) -> None:
        self.num_running = 0
        self._max_concurrent = max_concurrent
        self._clock = clock
        self._usages: dict[str, _KeyUsage] = {}  # by key name

    def acquire(self, key: Key, count: int = 1, num_requests: int = 1) -> "Permit":
        """Return a permit for `count` completions, or raise if they exceed a limit.

        The completions count as `num_requests` requests.
        """
        limit = min(self._max_concurrent, key.max_concurrent or self._max_concurrent)
        if not 1 <= count <= limit:  # not an OverloadedError, because a retry would fail again
            raise InputError(f"a request must have 1 to {limit} completions (got {count})")
        usage = self._usages.get(key.name)
        if usage is None:
            usage = self._usages[key.name] = _KeyUsage(key, self._clock)
        usage.check_rates()
        if key.max_concurrent is not None and usage.num_running + count > key.max_concurrent:
            raise OverloadedError(
                f"this API key has {usage.num_running} of at most {key.max_concurrent} concurrent completions running "
                f"and requested {count} more",
                BUSY_RETRY_S,
            )
        if self.num_running + count > self._max_concurrent:
            raise OverloadedError("Model is overloaded", BUSY_RETRY_S)
        usage.requests.consume(num_requests)
        usage.num_running += count
        self.num_running += count
        return Permit(self, usage, count)


class Permit:
    """Permission for a request to run. The completions of the request count as running until the permit is released."""

    def __init__(self, rate_limits: RateLimits, usage: _KeyUsage, count: int) -> None:
        self._rate_limits = rate_limits
        self._usage = usage
        self._count = count

    def release(self, tokens: int = 0) -> None:
        """Release the permit and charge prompt and completion tokens. Later calls have no effect."""
        if self._count > 0:
            self._rate_limits.num_running -= self._count
            self._usage.num_running -= self._count
            self._usage.tokens.consume(max(0, tokens))
            self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class AdapterQuota:
    """The quota for new adapters, per key. Concurrent requests with the same key and adapter are charged once."""

    def __init__(self, per_minute: int | None = None, clock: Clock = time.monotonic) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._buckets: dict[str, TokenBucket] = {}  # by key name
        self._charges: dict[tuple[str, AdapterKey], AdapterCharge] = {}  # for adapters that are being resolved

    @contextmanager
    def open_charge(self, key: Key, name: AdapterKey) -> Iterator["AdapterCharge"]:
        """Yield the charge that all requests share if they resolve the same adapter with the same key."""
        charge = self._charges.get((key.name, name))
        if charge is None:
            charge = self._charges[key.name, name] = AdapterCharge(self._bucket(key), bool(key.name))
        charge.num_requests += 1
        try:
            yield charge
        finally:
            charge.num_requests -= 1
            if not charge.num_requests:
                del self._charges[key.name, name]

    def _bucket(self, key: Key) -> TokenBucket:
        """Return the bucket for a key. The key's own limit takes precedence over the server's limit, which does not
        apply to admins.
        """
        if key.name not in self._buckets:
            per_minute = key.new_adapters_per_minute
            if per_minute is None and not key.is_admin:
                per_minute = self._per_minute or (DEFAULT_NEW_ADAPTERS_PER_MINUTE if key.name else None)
            self._buckets[key.name] = TokenBucket(per_minute, self._clock)
        return self._buckets[key.name]


class AdapterCharge:
    """A charge against the new-adapter quota for one adapter."""

    def __init__(self, bucket: TokenBucket, has_key: bool) -> None:
        self.num_requests = 0
        self._bucket = bucket
        self._has_key = has_key
        self._is_charged = False

    def charge(self) -> None:
        """Charge the quota for a new adapter, or raise if the quota is exhausted."""
        wait_s = self._bucket.seconds_until_available()
        if wait_s > 0 and not self._is_charged:
            owner = "this API key has" if self._has_key else "the clients of this server have"
            raise OverloadedError(
                f"{owner} reached the limit of {self._bucket.per_minute} new adapters per minute "
                f"(new_adapters_per_minute); known adapters still work, retry new ones in {math.ceil(wait_s)} s",
                wait_s,
            )
        self.charge_after_fetch()

    def charge_after_fetch(self) -> None:
        """Charge the quota for a known adapter that was fetched again. The bucket may go into debt."""
        if not self._is_charged:
            self._bucket.consume(1)
            self._is_charged = True

    def refund(self) -> None:
        """Refund the charge after a transient failure."""
        if self._is_charged:
            self._bucket.consume(-1)
            self._is_charged = False
