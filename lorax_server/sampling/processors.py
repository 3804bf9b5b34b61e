"""Logits processors: penalties, temperature, top-k, top-p, min-p and typical-p.

Scores are float32 `[rows, vocabulary]`, and parameters are `[rows]`. The processors modify the scores in place.
"""

import torch

from lorax_server.kernels.device import is_host

NEG_INF = float("-inf")
TOP_P_SEARCH_TOKENS = 1024  # candidates per row to try before a full sort


def penalize_repetition(scores: torch.Tensor, is_seen: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """Make `is_seen` tokens less likely: divide positive scores and multiply negative scores by `penalty`."""
    penalized = torch.where(scores < 0, scores * penalty[:, None], scores / penalty[:, None])
    return scores.copy_(torch.where(is_seen, penalized, scores))


def penalize_counts(
    scores: torch.Tensor, counts: torch.Tensor, frequency: torch.Tensor, presence: torch.Tensor
) -> torch.Tensor:
    """Subtract `frequency` for each occurrence, and `presence` once, from the scores of generated tokens."""
    return scores.sub_(counts * frequency[:, None] + (counts > 0) * presence[:, None])


def apply_temperature(scores: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    return scores.div_(temperature[:, None])


def keep_top_k(scores: torch.Tensor, k: torch.Tensor, max_k: int) -> torch.Tensor:
    """Keep the k best tokens, and other tokens with the same score as the k-th token. `max_k` is the largest k in the
    batch.
    """
    worst_kept = scores.topk(max_k, dim=-1).values.gather(-1, k[:, None] - 1)
    return scores.masked_fill_(scores < worst_kept, NEG_INF)


def keep_top_p(scores: torch.Tensor, one_minus_p: torch.Tensor) -> torch.Tensor:
    """Keep the smallest set of best tokens with a total probability of at least top-p. `one_minus_p` is 1 - top-p.

    Ties favor higher token IDs.
    """
    weights = (scores - scores.amax(-1, keepdim=True)).exp()  # exactly 1 for all tokens that share the best score
    mass = weights.sum(-1, keepdim=True, dtype=torch.float64) * (1 - one_minus_p[:, None].double())
    best, ids = _sort_until(scores, weights, mass)
    best_weights = weights.gather(-1, ids)
    count = (best_weights.cumsum(-1, dtype=torch.float64) - best_weights < mass).sum(-1, keepdim=True).clamp(min=1)
    last_kept = best.gather(-1, count - 1)
    is_better, is_equal = scores > last_kept, scores == last_kept
    num_equal = count - is_better.sum(-1, keepdim=True)
    rank_from_end = is_equal.flip(-1).cumsum(-1, dtype=torch.int32).flip(-1)
    return scores.masked_fill_(~(is_better | (is_equal & (rank_from_end <= num_equal))), NEG_INF)


def _sort_until(scores: torch.Tensor, weights: torch.Tensor, mass: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best scores in descending order, and their token IDs. Their total weight is at least `mass`.

    Sorting is slow on CPUs, so the top candidates are tried first, which are nearly always sufficient. On GPUs, all
    scores are sorted, because this check would synchronize the host.
    """
    if is_host(scores.device):
        best, ids = scores.topk(min(TOP_P_SEARCH_TOKENS, scores.shape[-1]), dim=-1)
        if bool((weights.gather(-1, ids).sum(-1, keepdim=True, dtype=torch.float64) >= mass).all()):
            return best, ids
    return scores.sort(dim=-1, descending=True)


def keep_min_p(scores: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Keep tokens that are at least `min_p` times as likely as the best token."""
    probabilities = scores.softmax(-1)
    return scores.masked_fill_(probabilities < probabilities.amax(-1, keepdim=True) * min_p[:, None], NEG_INF)


def keep_typical_p(scores: torch.Tensor, typical_p: torch.Tensor) -> torch.Tensor:
    """Keep tokens whose information content is closest to the entropy, up to a total probability of `typical_p`.

    Distances are computed in float64 and then rounded, so that results do not depend on the device, batch size or
    thread count.
    """
    log_probabilities = scores.double().log_softmax(-1)
    probabilities = log_probabilities.exp()
    expected = -(log_probabilities * probabilities).nan_to_num(nan=0.0).cumsum(-1)[:, -1:]
    distance = (-log_probabilities - expected).abs().float()
    ordered, order = distance.sort(dim=-1, stable=True)
    below = (probabilities.gather(-1, order).cumsum(-1) < typical_p[:, None]).sum(-1, keepdim=True)
    last_kept = ordered.gather(-1, below.clamp(max=scores.shape[-1] - 1))
    return scores.masked_fill_(distance > last_kept, NEG_INF)


def draw_tokens(scores: torch.Tensor, uniform_samples: torch.Tensor) -> torch.Tensor:
    """Sample one token per row. Return the first token whose cumulative probability exceeds `uniform_samples`
    (float64).
    """
    summed = scores.softmax(-1).cumsum(-1, dtype=torch.float64)
    thresholds = (uniform_samples * summed[:, -1])[:, None]
    return torch.searchsorted(summed, thresholds, right=True).squeeze(-1).clamp(max=scores.shape[-1] - 1)


def make_sortable(scores: torch.Tensor) -> torch.Tensor:
    """Return unique int64 keys in the same order as the scores. Ties favor lower token IDs.

    `topk` of these keys is deterministic, unlike `topk` of scores with ties.
    """
    bits = (scores + 0.0).view(torch.int32)  # adding 0.0 turns -0.0 into 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # flip negative floats, whose bits are in reverse order
    return (ordered.long() << 32) - torch.arange(scores.shape[-1], device=scores.device)


def count_tokens(token_ids: torch.Tensor, is_counted: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return how often each token occurs in each row where `is_counted` is True, `[rows, vocabulary]`."""
    is_counted = is_counted & (token_ids < vocab_size)
    ids = torch.where(is_counted, token_ids, vocab_size)  # excluded tokens are counted in an extra column
    counts = torch.zeros(len(ids), vocab_size + 1, device=ids.device)
    return counts.scatter_add_(-1, ids, torch.ones_like(ids, dtype=counts.dtype))[:, :vocab_size]
