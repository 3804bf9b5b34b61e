"""Limits of what is answered at once, in all and for each key, and of what a key may ask for in a minute.

No request waits here: one that is over a limit is refused, with the time when to come back. Rates are buckets that fill
as time goes on, up to what a minute allows. A request is taken from its bucket when it comes. Its tokens are taken when
it ends, since their number is not known earlier; a key that is in debt then is refused until it has earned them. New
adapters have a rate of their own: a key that has used it up can still use known adapters.
"""

import math
import time
from collections.abc import Callable
from typing import Self

from lorax_server.errors import InputError, OverloadedError
from lorax_server.server.access.keys import Key
from lorax_server.server.access.model_names import Named

MINUTE_S = 60.0
NEW_ADAPTERS_PER_MINUTE = 60  # of a key, where neither it nor the server sets a number
BUSY_RETRY_S = 1.0  # a guess: it is not known when an answer will end
ROUNDING = 1e-6  # a client that comes back when it was told to must not be refused for a rounding error

Clock = Callable[[], float]


class _Bucket:
    """A rate, and what is left of it; below 0 it is debt. Without a number there is no limit."""

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
    """The running answers of a key, and what is left of its rates."""

    def __init__(self, key: Key, adapters_per_minute: int | None, clock: Clock) -> None:
        self.num_running = 0
        self.adapters = _Bucket(adapters_per_minute, clock)
        self.requests = _Bucket(key.requests_per_minute, clock)
        self.tokens = _Bucket(key.tokens_per_minute, clock)

    def check_rates(self) -> None:
        """Refuse a request while a rate is used up; of two, the one that takes longer to recover."""
        rates = ((self.requests, "requests"), (self.tokens, "tokens"))
        wait_s, limit = max((bucket.wait_s(), f"{bucket.per_minute} {unit}") for bucket, unit in rates)
        if wait_s > 0:
            raise OverloadedError(
                f"this API key has used up its {limit} a minute; try again in {math.ceil(wait_s)} s", wait_s
            )


class RateLimits:
    """Lets requests in. It belongs to one event loop. Its memory is bounded, since the server's keys never change."""

    def __init__(
        self, max_concurrent: int, clock: Clock = time.monotonic, new_adapters_per_minute: int | None = None
    ) -> None:
        self.num_running = 0
        self._new_adapters_per_minute = new_adapters_per_minute
        self._max_concurrent = max_concurrent
        self._clock = clock
        self._usages: dict[str, _Usage] = {}  # by the key's name
        self._fares: dict[tuple[str, Named], Fare] = {}  # that further requests may share

    def enter(self, key: Key, count: int = 1) -> "Permit":
        """Let in `count` answers to one request, until their permit is left, or refuse them all."""
        limit = min(self._max_concurrent, key.max_concurrent or self._max_concurrent)
        if not 1 <= count <= limit:  # so waiting would not help
            raise InputError(f"a request may ask for 1 to {limit} answers at once, not {count}")
        usage = self._usage(key)
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

    def take_adapter(self, key: Key) -> None:
        """Let a key name one more adapter that is new here, or refuse it."""
        bucket = self._usage(key).adapters
        wait_s = bucket.wait_s()
        if wait_s > 0:
            owner = "this API key has" if key.name else "the callers of this server have"
            raise OverloadedError(
                f"{owner} used up the {bucket.per_minute} new adapters a minute (new_adapters_per_minute); those "
                f"that are known here can be used all the same, others in {math.ceil(wait_s)} s",
                wait_s,
            )
        bucket.take(1)

    def fare(self, key: Key, name: Named) -> "Fare":
        """Return what the requests of a key that wait for one adapter share: they pay for it once."""
        return self._fares.setdefault((key.name, name), Fare(self, key, name))

    def _usage(self, key: Key) -> _Usage:
        usage = self._usages.get(key.name)
        if usage is None:
            usage = self._usages[key.name] = _Usage(key, self._adapters_per_minute(key), self._clock)
        return usage

    def _adapters_per_minute(self, key: Key) -> int | None:
        """Return the key's own rate, else the server's, else the usual one. The last two do not bind admins."""
        if key.new_adapters_per_minute is not None or key.is_admin:
            return key.new_adapters_per_minute
        return self._new_adapters_per_minute or (NEW_ADAPTERS_PER_MINUTE if key.name else None)


class Permit:
    """The right of a request to be answered, until it is left."""

    def __init__(self, rate_limits: RateLimits, usage: _Usage, count: int) -> None:
        self._rate_limits = rate_limits
        self._usage = usage
        self._count = count

    def leave(self, tokens: int = 0) -> None:
        """Pay for the tokens of the request, of prompts and answers. Only the first call counts."""
        if self._count > 0:
            self._rate_limits.num_running -= self._count
            self._usage.num_running -= self._count
            self._usage.tokens.take(max(0, tokens))
            self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


class Fare:
    """The price of a new adapter, which the requests of a key that wait for it pay together.

    The first answer closes it, so that a later request shares nothing with a fetch that has ended.
    """

    def __init__(self, rate_limits: RateLimits, key: Key, name: Named) -> None:
        self._rate_limits = rate_limits
        self._key = key
        self._pair = key.name, name
        self._num_waiting = 0
        self._is_paid = False

    async def ask(self) -> None:
        """Take the fare here and now. Where the limits are another process's, it has to be asked."""
        self.take()

    def take(self) -> None:
        """Pay for an adapter that is new here, or refuse the request."""
        if not self._is_paid:
            self._rate_limits.take_adapter(self._key)
            self._is_paid = True

    def owe(self) -> None:
        """Pay for an adapter that had to be fetched again."""
        if not self._is_paid:
            self._rate_limits._usage(self._key).adapters.take(1)
            self._is_paid = True

    def give_back(self) -> None:
        """Return the price of an adapter that its source could not give."""
        if self._is_paid:
            self._rate_limits._usage(self._key).adapters.take(-1)
            self._is_paid = False

    def __enter__(self) -> Self:
        self._num_waiting += 1
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._num_waiting -= 1
        is_answered = error is None or isinstance(error, Exception)  # else the client has left, and others wait on
        if (is_answered or self._num_waiting == 0) and self._rate_limits._fares.get(self._pair) is self:
            del self._rate_limits._fares[self._pair]
