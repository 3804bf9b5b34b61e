"""Estimates how long decode steps take without drafts, and how much time drafts add."""

DECAY = 0.995  # weight of a step after the next step of the same kind
IDLE_DECAY = 0.999  # weight of steps with drafts after a step without drafts, so that they are measured again
MIN_PLAIN_STEPS, PLAIN_INTERVAL = 3.0, 64  # one of this many steps has no drafts, and more steps at first
# Assumed fixed costs of a step, such as reading the weights, in tokens: on CPUs, and on GPUs.
PRIOR_RATIO, GPU_PRIOR_RATIO = 8.0, 128.0
PRIOR_OVERHEAD = 0.1  # assumed fixed costs of drafts, as a share of a step
PRIOR_STEPS = 4.0  # weight of the assumed values, in steps
PRIOR_VARIANCE = 16.0  # of the number of tokens
MAX_OUTLIER = 3.0  # a longer time than this multiple of the assumed time is counted as this multiple


class _Line:
    """Fits a line to points with decaying weights, and an assumed slope that counts as additional points."""

    def __init__(self) -> None:
        self.weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        self.decay(DECAY)
        self.weight += 1
        self._x, self._y, self._xx, self._xy = self._x + x, self._y + y, self._xx + x * x, self._xy + x * y

    def decay(self, factor: float) -> None:
        self.weight *= factor
        self._x, self._y, self._xx, self._xy = (each * factor for each in (self._x, self._y, self._xx, self._xy))

    def means(self) -> tuple[float, float]:
        return self._x / self.weight, self._y / self.weight

    def slope(self, prior: float) -> float:
        """Return the slope. The assumed slope `prior` has the weight of `PRIOR_STEPS` points."""
        x, _ = self.means()
        prior_weight = PRIOR_STEPS * PRIOR_VARIANCE
        return (self._xy - x * self._y + prior_weight * prior) / (self._xx - x * self._x + prior_weight)


class StepCosts:
    """Estimates the time of decode steps from the number of sequences, and the additional time of drafts from the
    number of draft tokens.
    """

    def __init__(self, prior_ratio: float = PRIOR_RATIO, *, records_graphs: bool = True) -> None:
        """`prior_ratio` is the assumed fixed cost of a step in tokens, which is used until steps were measured. With
        `records_graphs`, the first step of each size is slow, because it records a graph.
        """
        self._prior_ratio = prior_ratio
        self._records_graphs = records_graphs
        self._plain = _Line()  # seconds of steps without drafts, by number of sequences
        self._extra = _Line()  # additional seconds of steps with drafts, by number of draft tokens
        self._known_sizes: set[int] = set()  # in tokens
        self._num_drafted_steps = 0  # since the last step without drafts
        self._in_draft_tokens: dict[int, tuple[float, float]] = {}  # by number of sequences, since the last step

    @property
    def must_measure_plain(self) -> bool:
        """Return True if the next step should have no drafts, because too few steps without drafts were measured."""
        interval = PLAIN_INTERVAL if self._plain.weight >= MIN_PLAIN_STEPS else 1
        return self._num_drafted_steps >= interval

    def record(self, num_sequences: int, num_drafted: int, seconds: float) -> None:
        """Record a step in which every sequence decodes. The first step of each size is ignored if it records a
        graph.
        """
        self._num_drafted_steps = self._num_drafted_steps + 1 if num_drafted else 0
        self._in_draft_tokens.clear()
        if self._records_graphs and (size := num_sequences + num_drafted) not in self._known_sizes:
            self._known_sizes.add(size)
            return
        if self._plain.weight:
            plain_s = self.estimate_plain(num_sequences)
            assumed_s = plain_s * (1 + num_drafted / (self._prior_ratio + num_sequences))
            seconds = min(seconds, MAX_OUTLIER * assumed_s)
        if not num_drafted:
            self._plain.add(num_sequences, seconds)
            self._extra.decay(IDLE_DECAY)
        elif self._plain.weight:
            self._extra.add(num_drafted, seconds - self.estimate_plain(num_sequences))

    def estimate_plain(self, num_sequences: int) -> float:
        """Estimate the step time without drafts, in seconds. Before the first step, the unit is the time of
        one token.
        """
        if not self._plain.weight:
            return self._prior_ratio + num_sequences
        count, seconds = self._plain.means()
        slope = min(max(self._plain.slope(seconds / (self._prior_ratio + count)), 0.0), seconds / count)
        return seconds + slope * (num_sequences - count)

    def estimate_drafts(self, num_sequences: int) -> tuple[float, float]:
        """Estimate how many additional seconds a step with drafts takes. Return the fixed time and the time per draft
        token.
        """
        plain_s = self.estimate_plain(num_sequences)
        prior = plain_s / (self._prior_ratio + num_sequences)
        if not self._extra.weight:
            return PRIOR_OVERHEAD * plain_s, prior
        count, seconds = self._extra.means()
        token_s = max(self._extra.slope(prior), 0.05 * prior)
        weight = self._extra.weight
        fixed_s = (weight * (seconds - token_s * count) + PRIOR_STEPS * PRIOR_OVERHEAD * plain_s) / (
            weight + PRIOR_STEPS
        )
        return max(fixed_s, 0.0), token_s

    def in_draft_tokens(self, num_sequences: int) -> tuple[float, float]:
        """Return one sequence's share of a step without drafts, and its share of the fixed costs of drafts, in units of
        a draft token's cost.
        """
        if num_sequences not in self._in_draft_tokens:
            fixed_s, token_s = self.estimate_drafts(num_sequences)
            unit = num_sequences * token_s
            self._in_draft_tokens[num_sequences] = self.estimate_plain(num_sequences) / unit, fixed_s / unit
        return self._in_draft_tokens[num_sequences]
