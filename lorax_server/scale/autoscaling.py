"""Autoscaling by waiting requests and running tokens."""

import math
from typing import Any

from ray.serve.config import AutoscalingContext


class QueueAndTokens:
    """A Ray Serve autoscaling policy: as many replicas as keep each one below both targets.

    Ray calls it periodically, and applies its own delays and bounds to the result.
    """

    def __init__(self, target_waiting: float, target_tokens: float) -> None:
        self._targets = {"waiting": target_waiting, "tokens": target_tokens}

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        reported = context.aggregated_metrics or {}
        needed = (sum(reported.get(kind, {}).values()) / target for kind, target in self._targets.items())
        least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return min(most, max(least, 1, math.ceil(max(needed)))), {}
