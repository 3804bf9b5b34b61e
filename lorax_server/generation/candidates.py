"""Several answers to one request, and which of them is the best."""

import math
from collections.abc import Sequence
from hashlib import sha256


def candidate_seed(seed: int, index: int) -> int:
    """The seed of one of several candidates. The first is what the request gets when it asks for one only."""
    if index == 0:
        return seed
    digest = sha256(seed.to_bytes(8, "big") + index.to_bytes(8, "big")).digest()
    return int.from_bytes(digest[:8], "big")


def sort_candidates(logprobs: Sequence[Sequence[float]]) -> list[int]:
    """The candidates' indices, by how likely their tokens are on average; of equals the first comes first.

    One without tokens, or with a log probability that is not a number, comes last.
    """
    means = [sum(values) / len(values) if values else -math.inf for values in logprobs]
    means = [-math.inf if math.isnan(mean) else mean for mean in means]
    return sorted(range(len(means)), key=lambda index: -means[index])
