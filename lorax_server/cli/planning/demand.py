"""The demand on a server: its traffic, its adapters, and how often each of these is asked for."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from lorax_server.cli.planning.model_sizes import ModelSizes

EXACT = 1000  # adapters that are counted one by one; less popular ones are counted in groups
GROWTH = 1.02  # of a group, against the one before


@dataclass(frozen=True)
class Traffic:
    """Requests a second over all replicas, and the mean request."""

    requests_per_s: float
    prompt_tokens: int
    answer_tokens: int
    zipf: float = 1.0  # the k-th most popular adapter gets traffic as 1 / k ** zipf
    base_share: float = 0.0  # of requests that name no adapter

    @property
    def mean_length(self) -> float:
        """The tokens of a running sequence, on average over its answer."""
        return self.prompt_tokens + self.answer_tokens / 2


@dataclass(frozen=True)
class AdapterMix:
    """The number of adapters of each rank; popularity does not depend on it."""

    ranks: tuple[tuple[int, int], ...]  # rank and number
    modules: tuple[str, ...]
    has_magnitudes: bool = False

    @property
    def count(self) -> int:
        return sum(count for _, count in self.ranks)

    def mean_bytes(self, sizes: ModelSizes) -> float:
        return self.all_bytes(sizes) / self.count if self.count else 0.0

    def all_bytes(self, sizes: ModelSizes) -> int:
        return sum(count * self._bytes(sizes, rank) for rank, count in self.ranks)

    def largest_bytes(self, sizes: ModelSizes) -> int:
        return max((self._bytes(sizes, rank) for rank, count in self.ranks if count), default=0)

    def _bytes(self, sizes: ModelSizes, rank: int) -> int:
        return sizes.adapter_bytes(rank, self.modules, self.has_magnitudes)


class Group(NamedTuple):
    """Adapters that are asked for about equally often: how many, and the share of requests that each gets."""

    size: int
    share: float


class Popularity:
    """The shares of adapters by Zipf's law, most popular first."""

    def __init__(self, count: int, exponent: float) -> None:
        groups, first = [], 1
        while first <= count:
            size = 1 if first <= EXACT else min(math.ceil(first * (GROWTH - 1)), count - first + 1)
            middle = math.sqrt(first * (first + size - 1))
            groups.append(Group(size, middle**-exponent))
            first += size
        total = sum(group.size * group.share for group in groups)
        self._groups = [Group(group.size, group.share / total) for group in groups]

    def share_of_first(self, count: int) -> float:
        """Return the share of requests that the most popular adapters get."""
        share, left = 0.0, count
        for group in self._groups:
            share += min(group.size, max(left, 0)) * group.share
            left -= group.size
        return min(share, 1.0)

    def expect_distinct(self, requests: float) -> float:
        """Return the number of adapters that so many requests name, on average."""
        return sum(group.size * _chance(group.share, requests) for group in self._groups)


def _chance(share: float, requests: float) -> float:
    """Return the probability that one of some requests is among those that have this share."""
    return 1.0 if share >= 1 else -math.expm1(requests * math.log1p(-share))
