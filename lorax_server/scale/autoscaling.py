"""The number of replicas, by the requests that wait and the tokens in flight."""

import math
from typing import Any

from ray.serve.config import AutoscalingContext


class QueueAndTokens:
    """A policy for Ray Serve's autoscaler: as many replicas as keep each below both targets.

    Ray asks it again and again, and applies its own delays and bounds to what it answers.
    """

    def __init__(self, target_waiting: float, target_tokens: float) -> None:
        self._targets = {"waiting": target_waiting, "tokens": target_tokens}

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        reported = context.aggregated_metrics or {}
        needed = (sum(reported.get(kind, {}).values()) / target for kind, target in self._targets.items())
        least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return min(most, max(least, 1, math.ceil(max(needed)))), {}
