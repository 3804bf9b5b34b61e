"""Several candidates for one answer: their seeds and their order."""

import math
from collections.abc import Sequence
from hashlib import sha256


def candidate_seed(seed: int, index: int) -> int:
    """Return the seed of one of several candidates. The first one has the seed of the request."""
    if index == 0:
        return seed
    digest = sha256(seed.to_bytes(8, "big") + index.to_bytes(8, "big")).digest()
    return int.from_bytes(digest[:8], "big")


def sort_candidates(logprobs: Sequence[Sequence[float]]) -> list[int]:
    """Return the candidates' indices, the likeliest first by the mean over tokens; of equals the first comes first.

    A candidate without tokens, or with a log probability that is not a number, comes last.
    """
    means = [sum(values) / len(values) if values else -math.inf for values in logprobs]
    means = [-math.inf if math.isnan(mean) else mean for mean in means]
    return sorted(range(len(means)), key=lambda index: -means[index])
