"""Estimates decode step times with and without draft tokens from measured steps."""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

PRIOR_OVERHEAD = 0.1  # assumed fixed costs of drafts, as a share of a step
MAX_GROWTH = 4  # ratio between the draft tokens in a step and in the largest measured step
WARMUP_STEPS = 3  # ignored steps of each size, because they may record a graph or load kernels
MIN_STEPS = 2  # after warm-up, before a size counts as measured
RECENT_STEPS = 7  # of each size, whose median is used
REFRESH_STEPS = 8  # steps until estimates are computed again, or fewer if a size was measured for the first time
# Steps until unused measurements with drafts expire, so that drafts are tried again. The first limit applies to sizes
# that were measured once. It doubles with each measurement, because the first measurements may have been slow.
MIN_AGE, MAX_AGE = 200, 1500
MIN_PLAIN_INTERVAL = 4  # steps with drafts between two steps without drafts
# Share of the speed that may be lost by measuring a step without drafts. If two steps are in flight, three steps
# without drafts run instead of one, and the loss is up to three times as large.
MAX_MEASURING_LOSS = 0.005


class DevicePrior(NamedTuple):
    """Assumptions about step times that were not measured."""

    fixed_tokens: float  # fixed costs of a step, such as reading the weights, in tokens
    # Time per token above the largest measured size, relative to the measured time per token. If it is below 1, long
    # drafts are tried even if short drafts do not save time, because large steps may use faster kernels.
    token_share: float


CPU_PRIOR, GPU_PRIOR = DevicePrior(8.0, 1.0), DevicePrior(128.0, 0.6)


def round_size(num_tokens: int) -> int:
    """Round up to the next step size that is measured separately: 1 to 8, 12, 16, 24, 32, 48, 64, 96, 128 and so on.

    Kernels process tokens in tiles whose sizes are powers of two, so sizes in between take almost as long.
    """
    unit = 1 << max(0, (num_tokens - 1).bit_length() - 2) if num_tokens > 8 else 1
    return -(-num_tokens // unit) * unit


def step_sizes(after: int, last: int) -> Iterator[int]:
    """Yield the step sizes above `after` up to `last`, and `last`."""
    while after < last:
        after = min(round_size(after + 1), last)
        yield after


class _StepTimes:
    """The median time of the recent steps of one size."""

    def __init__(self) -> None:
        self.expires_at = 0  # step number
        self.median: float | None = None  # None until the size is measured
        self._num_measured = 0
        self._num_warmups = 0
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)

    def add(self, step: int, seconds: float) -> None:
        if self._num_warmups < WARMUP_STEPS:
            self._num_warmups += 1
            return
        self._num_measured += 1
        self.expires_at = step + min(MAX_AGE, MIN_AGE << min(self._num_measured - 1, 10))
        self._recent.append(seconds)
        self.median = sorted(self._recent)[(len(self._recent) - 1) // 2] if len(self._recent) >= MIN_STEPS else None


class StepCosts:
    """Estimates the time of decode steps from the number of sequences and draft tokens.

    Sizes that were not measured are interpolated. Measurements that contradict the rule that larger steps take at least
    as long are lowered. Thus a wrong estimate makes the drafter try drafts, and the next measurements correct it.
    """

    def __init__(self, prior: DevicePrior = CPU_PRIOR) -> None:
        self._prior = prior
        self._plain: dict[int, _StepTimes] = {}  # steps without drafts, by size
        self._drafted: dict[int, _StepTimes] = {}  # steps with drafts, by size
        self._num_steps = 0
        self._num_drafted_steps = 0  # since the last step without drafts
        self._estimates: dict[tuple[int, int], tuple[float, list[tuple[int, float]]]] = {}  # by arguments of `estimate`

    def must_measure_plain(self, num_sequences: int, speedup: float) -> bool:
        """Return True if the next step should have no drafts, to measure its time. This includes the first steps.

        `speedup` is the speedup that such a step loses.
        """
        if not any(times.median is not None for times in self._plain.values()):
            return True  # the time that drafts save is not known
        times = self._plain.get(round_size(num_sequences))
        is_measured = times is not None and times.median is not None
        interval = (1 - 1 / speedup) / MAX_MEASURING_LOSS if is_measured else 0.0
        return self._num_drafted_steps >= max(MIN_PLAIN_INTERVAL, interval)

    def record(self, num_sequences: int, num_drafted: int, seconds: float) -> None:
        """Record a step in which every sequence decodes."""
        self._num_steps += 1
        self._num_drafted_steps = self._num_drafted_steps + 1 if num_drafted else 0
        sizes, size = self._drafted if num_drafted else self._plain, round_size(num_sequences + num_drafted)
        times = sizes.get(size) or sizes.setdefault(size, _StepTimes())
        was_measured = times.median is not None
        times.add(self._num_steps, seconds)
        if self._num_steps % REFRESH_STEPS == 0 or (times.median is not None) != was_measured:
            self._estimates.clear()

    def estimate_plain(self, num_sequences: int) -> float:
        """Estimate the step time without drafts, in seconds."""
        size, ratio = round_size(num_sequences), self._prior.fixed_tokens
        points = [(each, times.median) for each, times in self._plain.items() if times.median is not None]
        below = max((point for point in points if point[0] <= size), default=None)
        above = min((point for point in points if point[0] >= size), default=None)
        if below is not None and above is not None:
            return _interpolate(below, above, size)
        known = below or above
        assert known is not None, "no step without drafts was measured"
        nearest, seconds = known
        return seconds * (ratio + size) / (ratio + nearest)

    def estimate(self, num_sequences: int, max_tokens: int) -> tuple[float, list[tuple[int, float]]]:
        """Estimate the step time without drafts, and the times of steps with drafts for all step sizes in ascending
        order. The largest size has `max_tokens` tokens, including draft tokens.
        """
        key = num_sequences, max_tokens
        if key not in self._estimates:
            plain_s = self.estimate_plain(num_sequences)
            self._estimates[key] = plain_s, list(self._estimate_drafts(num_sequences, max_tokens, plain_s))
        return self._estimates[key]

    def _estimate_drafts(self, num_sequences: int, max_tokens: int, plain_s: float) -> Iterator[tuple[int, float]]:
        points = self._find_points(num_sequences, plain_s)
        (first, first_s), (last, last_s) = points[0], points[-1]
        token_s = plain_s / (self._prior.fixed_tokens + num_sequences)
        if last > first:
            token_s = max(token_s, self._prior.token_share * (last_s - first_s) / (last - first))
        max_drafted = max(num_sequences, MAX_GROWTH * (last - first))
        index = 0
        for size in step_sizes(num_sequences, min(max_tokens, num_sequences + max_drafted)):
            measured_size = round_size(size)
            while index + 1 < len(points) and points[index + 1][0] <= measured_size:
                index += 1
            if measured_size == points[index][0]:
                seconds = points[index][1]
            elif index + 1 < len(points):
                seconds = _interpolate(points[index], points[index + 1], measured_size)
            else:
                seconds = last_s + token_s * (measured_size - last)
            yield size, seconds

    def _find_points(self, num_sequences: int, plain_s: float) -> list[tuple[int, float]]:
        """Return the assumed time of a step with few draft tokens, and all measured times of larger steps with drafts.
        Times do not decrease with the size.
        """
        points = [(num_sequences, plain_s * (1 + PRIOR_OVERHEAD))]
        points += sorted(
            (size, times.median)
            for size, times in self._drafted.items()
            if times.median is not None and size > num_sequences and times.expires_at >= self._num_steps
        )
        for index in range(len(points) - 2, -1, -1):
            points[index] = points[index][0], min(points[index][1], points[index + 1][1])
        return points


def _interpolate(below: tuple[int, float], above: tuple[int, float], size: int) -> float:
    if above[0] == below[0]:
        return above[1]
    return below[1] + (above[1] - below[1]) * (size - below[0]) / (above[0] - below[0])
