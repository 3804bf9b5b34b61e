"""How much is answered at once, in all and for each key. Nobody waits here: who cannot come in is told when to return.

Rates are buckets that fill as time goes on, up to what a minute allows. A request takes its one when it comes; its
tokens are taken when it ends, since nobody knows earlier how many they are, and a key that is in debt then waits until
it has earned them. New adapters have a rate of their own: who has used it up can still use those that are known.
"""

import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from lorax_server.errors import InputError, OverloadedError
from lorax_server.server.access.keys import Key

MINUTE_S = 60.0
NEW_ADAPTERS_PER_MINUTE = 60  # of a key that says nothing, on a server that says nothing
BUSY_RETRY_S = 1.0  # nobody knows when an answer will end
ROUNDING = 1e-6  # who comes back when we said must not find a hair missing


class _Bucket:
    """What is left of a rate. Below 0 it is debt."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def wait_s(self, now: float) -> float:
        """Until one more may be taken; 0 if it may now."""
        self._fill(now)
        missing = 1 - self._level
        return missing * MINUTE_S / self._per_minute if missing > ROUNDING else 0.0

    def take(self, amount: int, now: float) -> None:
        self._fill(now)
        self._level -= amount

    def is_full(self, now: float) -> bool:
        self._fill(now)
        return self._level >= self._per_minute

    def _fill(self, now: float) -> None:
        earned = (now - self._at) * self._per_minute / MINUTE_S
        self._level = min(float(self._per_minute), self._level + earned)
        self._at = now


class _Usage:
    """What a key has under way, and what is left of its rates."""

    def __init__(self, key: Key, now: float, adapters_per_minute: int | None) -> None:
        self.num_running = 0
        self.adapters_per_minute = adapters_per_minute
        self.adapters = _Bucket(adapters_per_minute, now) if adapters_per_minute else None
        self.requests = _Bucket(key.requests_per_minute, now) if key.requests_per_minute else None
        self.tokens = _Bucket(key.tokens_per_minute, now) if key.tokens_per_minute else None

    def is_idle(self, now: float) -> bool:
        """Whether it is as if the key had never asked."""
        buckets = (bucket for bucket in (self.requests, self.tokens, self.adapters) if bucket is not None)
        return self.num_running == 0 and all(bucket.is_full(now) for bucket in buckets)


class RateLimits:
    """Lets requests in. It belongs to one event loop.

    It remembers what keys that have limits did in the last while; those that did nothing are forgotten now and then.
    """

    def __init__(
        self,
        max_concurrent: int,
        clock: Callable[[], float] = time.monotonic,
        new_adapters_per_minute: int | None = None,
    ) -> None:
        self.num_running = 0
        self._new_adapters_per_minute = new_adapters_per_minute
        self._max_concurrent = max_concurrent
        self._clock = clock
        self._usages: dict[str, _Usage] = {}
        self._fares: dict[tuple[str, tuple[str, str]], Fare] = {}  # that further requests may share
        self._sweep_at = 1024

    def enter(self, key: Key, count: int = 1) -> "Permit":
        """A place for `count` answers to one request, to be left when they have ended."""
        self._check_possible(key, count)
        now = self._clock()
        usage = self._usage(key, now)
        self._check_rates(key, usage, now)
        if key.max_concurrent is not None and usage.num_running + count > key.max_concurrent:
            raise OverloadedError(
                f"this API key has {usage.num_running} of at most {key.max_concurrent} answers under way and asks for "
                f"{count} more",
                BUSY_RETRY_S,
            )
        if self.num_running + count > self._max_concurrent:
            raise OverloadedError("Model is overloaded", BUSY_RETRY_S)
        if (key.max_concurrent, key.requests_per_minute, key.tokens_per_minute) != (None, None, None):
            self._remember(key, usage, now)
        if usage.requests is not None:
            usage.requests.take(1, now)
        usage.num_running += count
        self.num_running += count
        return Permit(self, usage, count)

    def take_adapter(self, key: Key) -> None:
        """Let a key name one adapter more that is new here, or refuse it."""
        now = self._clock()
        usage = self._usage(key, now)
        if usage.adapters is None:
            return
        wait_s = usage.adapters.wait_s(now)
        if wait_s > 0:
            who = "this API key has" if key.name else "the callers of this server have"
            raise OverloadedError(
                f"{who} used up the {usage.adapters_per_minute} new adapters a minute (new_adapters_per_minute); those "
                f"that are known here can be used all the same, others in {math.ceil(wait_s)} s",
                wait_s,
            )
        self._remember(key, usage, now)
        usage.adapters.take(1, now)

    def owe_adapter(self, key: Key, count: int = 1) -> None:
        """Count one that turned out to be new after it was let in; -1 of them gives one back."""
        now = self._clock()
        usage = self._usage(key, now)
        if usage.adapters is not None:
            self._remember(key, usage, now)
            usage.adapters.take(count, now)

    def fare(self, key: Key, place: tuple[str, str]) -> "Fare":
        """Join the requests of a key that wait for the same adapter; it is one adapter, so they pay once."""
        return self._fares.setdefault((key.name, place), Fare(self, key, place))

    def _usage(self, key: Key, now: float) -> _Usage:
        return self._usages.get(key.name) or _Usage(key, now, self._adapters_per_minute(key))

    def _adapters_per_minute(self, key: Key) -> int | None:
        """The rate that the key says, else the server's, else a usual one. Admins are free of those two."""
        if key.new_adapters_per_minute is not None or key.is_admin:
            return key.new_adapters_per_minute
        return self._new_adapters_per_minute or (NEW_ADAPTERS_PER_MINUTE if key.name else None)

    def _check_possible(self, key: Key, count: int) -> None:
        """What time cannot mend is the request's fault."""
        limit = min(self._max_concurrent, key.max_concurrent or self._max_concurrent)
        if not 1 <= count <= limit:
            raise InputError(f"a request may ask for 1 to {limit} answers at once, not {count}")

    def _check_rates(self, key: Key, usage: _Usage, now: float) -> None:
        """The rate that takes longest to recover is the one to wait for."""
        rates = (
            (usage.requests, f"{key.requests_per_minute} requests"),
            (usage.tokens, f"{key.tokens_per_minute} tokens"),
        )
        waits = [(bucket.wait_s(now), limit) for bucket, limit in rates if bucket is not None]
        wait_s, limit = max(waits, default=(0.0, ""))
        if wait_s > 0:
            raise OverloadedError(
                f"this API key has used up its {limit} a minute; try again in {math.ceil(wait_s)} s", wait_s
            )

    def _remember(self, key: Key, usage: _Usage, now: float) -> None:
        if len(self._usages) >= self._sweep_at:
            self._usages = {name: known for name, known in self._usages.items() if not known.is_idle(now)}
            self._sweep_at = max(1024, 2 * len(self._usages))
        self._usages[key.name] = usage

    def _leave(self, usage: _Usage, count: int, tokens: int) -> None:
        self.num_running -= count
        usage.num_running -= count
        if usage.tokens is not None:
            usage.tokens.take(max(0, tokens), self._clock())


class Permit:
    """A place that is taken until it is left, once."""

    def __init__(self, rate_limits: RateLimits, usage: _Usage, count: int) -> None:
        self._rate_limits = rate_limits
        self._usage = usage
        self._count = count
        self._has_left = False

    def leave(self, tokens: int = 0) -> None:
        """`tokens` is what the request had in all, prompts and answers; only the first call counts."""
        if not self._has_left:
            self._has_left = True
            self._rate_limits._leave(self._usage, self._count, tokens)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()


class Fare:
    """Price of an adapter, which the requests of a key that wait for it pay together.

    The first answer closes it, so that a later request shares nothing with a fetch that has ended.
    """

    def __init__(self, rate_limits: RateLimits, key: Key, place: tuple[str, str]) -> None:
        self._rate_limits = rate_limits
        self._key = key
        self._pair = key.name, place
        self._num_waiting = 0
        self._is_paid = False

    def take(self) -> None:
        """Pay for an adapter that is new here, or refuse the request."""
        if not self._is_paid:
            self._rate_limits.take_adapter(self._key)
            self._is_paid = True

    def owe(self) -> None:
        """Pay for an adapter that had to be fetched again."""
        if not self._is_paid:
            self._rate_limits.owe_adapter(self._key)
            self._is_paid = True

    def give_back(self) -> None:
        """Take nothing for an adapter that its source could not give."""
        if self._is_paid:
            self._rate_limits.owe_adapter(self._key, -1)
            self._is_paid = False

    def __enter__(self) -> Self:
        self._num_waiting += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._num_waiting -= 1
        is_answered = error is None or isinstance(error, Exception)  # else the client has left, and others wait on
        if (is_answered or self._num_waiting == 0) and self._rate_limits._fares.get(self._pair) is self:
            del self._rate_limits._fares[self._pair]
