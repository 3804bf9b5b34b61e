"""The time of a decode step as a linear function of its tokens, fitted to recent steps."""

DECAY = 0.98  # per step
PRIOR_RATIO = 8.0  # fixed costs of a step in tokens, before steps with different token counts were measured
PRIOR_WEIGHT = 0.5
MAX_OUTLIER = 3.0  # slower steps than this multiple of the estimate are ignored


class StepCosts:
    """Estimates how many tokens take as long as the fixed costs of a step: reading the weights, and overhead."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0

    def record(self, num_tokens: int, seconds: float) -> None:
        if self._weight > 4 and seconds > MAX_OUTLIER * self.estimate_seconds(num_tokens):
            seconds = MAX_OUTLIER * self.estimate_seconds(num_tokens)
        self._weight = self._weight * DECAY + 1
        self._tokens = self._tokens * DECAY + num_tokens
        self._seconds = self._seconds * DECAY + seconds
        self._squares = self._squares * DECAY + num_tokens * num_tokens
        self._products = self._products * DECAY + num_tokens * seconds

    def estimate_seconds(self, num_tokens: float) -> float:
        fixed, per_token = self._fit()
        return fixed + per_token * num_tokens

    @property
    def ratio(self) -> float:
        """The fixed costs of a step in tokens."""
        fixed, per_token = self._fit()
        return fixed / per_token if per_token > 0 else PRIOR_RATIO

    def _fit(self) -> tuple[float, float]:
        """Return the fixed seconds and the seconds per token, by least squares with a prior for their ratio."""
        if not self._weight:
            return 0.0, 0.0
        tokens, seconds = self._tokens / self._weight, self._seconds / self._weight
        variance = self._squares / self._weight - tokens * tokens
        covariance = self._products / self._weight - tokens * seconds
        prior = seconds / (PRIOR_RATIO + tokens)
        per_token = (covariance + PRIOR_WEIGHT * prior) / (variance + PRIOR_WEIGHT)
        per_token = min(max(per_token, 0.02 * prior), seconds / tokens)
        return seconds - per_token * tokens, per_token
