"""Estimate how long decode steps take without drafts, and how much each draft token adds."""

DECAY = 0.995  # weight of a step after the next step
IDLE_DECAY = 0.999  # weight of a measured draft after a step without drafts, so that costs are measured again
PRIOR_RATIO = 8.0  # assumed fixed costs of a step in tokens: reading the weights, and overhead
PRIOR_STEPS = 4.0  # weight of the assumption
MAX_OUTLIER = 3.0  # a longer time than this multiple of the estimate is counted as this multiple


class StepCosts:
    """Fits the step time as a linear function of the sequences, plus a constant for each draft token."""

    def __init__(self) -> None:
        self._weight = self._count = self._seconds = self._squares = self._products = 0.0  # of steps without drafts
        self._drafted = self._extra_s = 0.0  # draft tokens, and the time that they added

    def record(self, num_sequences: int, num_drafted: int, seconds: float) -> None:
        """Record a step in which every sequence decodes."""
        if self._weight:
            usual_s = self.estimate_plain(num_sequences) + self._estimate_token(num_sequences) * num_drafted
            seconds = min(seconds, MAX_OUTLIER * usual_s)
        if num_drafted:
            extra_s = seconds - self.estimate_plain(num_sequences)
            self._drafted, self._extra_s = self._drafted * DECAY + num_drafted, self._extra_s * DECAY + extra_s
            return
        self._drafted, self._extra_s = self._drafted * IDLE_DECAY, self._extra_s * IDLE_DECAY
        self._weight = self._weight * DECAY + 1
        self._count = self._count * DECAY + num_sequences
        self._seconds = self._seconds * DECAY + seconds
        self._squares = self._squares * DECAY + num_sequences * num_sequences
        self._products = self._products * DECAY + num_sequences * seconds

    def estimate_plain(self, num_sequences: int) -> float:
        """Estimate the seconds of a step without drafts."""
        if not self._weight:
            return 0.0
        count, seconds = self._count / self._weight, self._seconds / self._weight
        variance = self._squares / self._weight - count * count
        covariance = self._products / self._weight - count * seconds
        prior = seconds / (PRIOR_RATIO + count)
        slope = (covariance + PRIOR_STEPS * prior) / (variance + PRIOR_STEPS)
        slope = min(max(slope, 0.0), seconds / count)
        return seconds + slope * (num_sequences - count)

    def count_plain_tokens(self, num_sequences: int) -> float:
        """Estimate how many draft tokens take as long as one sequence's share of a step without drafts."""
        if not self._weight:
            return (PRIOR_RATIO + num_sequences) / num_sequences
        return self.estimate_plain(num_sequences) / num_sequences / self._estimate_token(num_sequences)

    def _estimate_token(self, num_sequences: int) -> float:
        """Estimate the seconds that a draft token adds to a step."""
        prior = self.estimate_plain(num_sequences) / (PRIOR_RATIO + num_sequences)
        weight = PRIOR_STEPS * num_sequences
        return max((self._extra_s + weight * prior) / (self._drafted + weight), 0.05 * prior)
