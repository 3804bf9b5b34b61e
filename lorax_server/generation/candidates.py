"""Seeds and ranking for `best_of` candidates."""

import math
from collections.abc import Sequence
from hashlib import sha256


def candidate_seed(seed: int, index: int) -> int:
    """Return a candidate's seed. The first candidate uses the request seed."""
    if index == 0:
        return seed
    digest = sha256(seed.to_bytes(8, "big") + index.to_bytes(8, "big")).digest()
    return int.from_bytes(digest[:8], "big")


def sort_candidates(logprobs: Sequence[Sequence[float]]) -> list[int]:
    """Return the candidate indices in descending order of mean log probability. Candidates with equal values keep their
    order.

    Candidates without tokens or with NaN log probabilities come last.
    """
    means = [sum(values) / len(values) if values else -math.inf for values in logprobs]
    means = [-math.inf if math.isnan(mean) else mean for mean in means]
    return sorted(range(len(means)), key=lambda index: -means[index])
