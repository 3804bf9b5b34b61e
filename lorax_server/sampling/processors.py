"""Functions that change scores before a token is chosen. Each row has its own parameter; no row depends on another.

Scores are float32 [rows, vocabulary], parameters [rows]. Each function changes its scores in place.
"""

import torch

from lorax_server.kernels.device import is_host

NEVER = float("-inf")
FEW = 1024  # tokens to search for the nucleus first


def penalize_repetition(scores: torch.Tensor, seen: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """Make `seen` tokens less likely, whatever the sign of their score."""
    penalized = torch.where(scores < 0, scores * penalty[:, None], scores / penalty[:, None])
    return scores.copy_(torch.where(seen, penalized, scores))


def penalize_counts(
    scores: torch.Tensor, counts: torch.Tensor, frequency: torch.Tensor, presence: torch.Tensor
) -> torch.Tensor:
    """Subtract `frequency` for each time and `presence` for the first time that a token was generated."""
    return scores.sub_(counts * frequency[:, None] + (counts > 0) * presence[:, None])


def scale(scores: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    return scores.div_(temperature[:, None])


def keep_top_k(scores: torch.Tensor, k: torch.Tensor, most: int) -> torch.Tensor:
    """Keep the k best, and all that equal the last of them. No k is above `most`, nor `most` above the vocabulary."""
    worst_kept = scores.topk(most, dim=-1).values.gather(-1, k[:, None] - 1)
    return scores.masked_fill_(scores < worst_kept, NEVER)


def keep_top_p(scores: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Keep the fewest best that leave out at most the probability `rest` = 1 - p; of equals those of higher id."""
    weights = (scores - scores.amax(-1, keepdim=True)).exp()  # those of equals are exact if they are the best
    mass = weights.sum(-1, keepdim=True, dtype=torch.float64) * (1 - rest[:, None].double())
    best, ids = _sort_until(scores, weights, mass)
    share = weights.gather(-1, ids)
    count = (share.cumsum(-1, dtype=torch.float64) - share < mass).sum(-1, keepdim=True).clamp(min=1)
    last_kept = best.gather(-1, count - 1)
    is_better, is_equal = scores > last_kept, scores == last_kept
    num_equal = count - is_better.sum(-1, keepdim=True)
    from_the_end = is_equal.flip(-1).cumsum(-1, dtype=torch.int32).flip(-1)
    return scores.masked_fill_(~(is_better | (is_equal & (from_the_end <= num_equal))), NEVER)


def _sort_until(scores: torch.Tensor, weights: torch.Tensor, mass: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores from the best on, at least until their weights sum up to `mass`, and their token ids.

    A CPU sorts slowly, and a few are nearly always enough. A GPU sorts fast, and the host would wait for the check.
    """
    if is_host(scores.device):
        best, ids = scores.topk(min(FEW, scores.shape[-1]), dim=-1)
        if bool((weights.gather(-1, ids).sum(-1, keepdim=True, dtype=torch.float64) >= mass).all()):
            return best, ids
    return scores.sort(dim=-1, descending=True)


def keep_min_p(scores: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Keep tokens that are at least `share` times as likely as the best."""
    probabilities = scores.softmax(-1)
    return scores.masked_fill_(probabilities < probabilities.amax(-1, keepdim=True) * share[:, None], NEVER)


def keep_typical(scores: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Keep tokens whose surprise is closest to the expected one, until they have the probability `mass`.

    In float64, so that devices agree on which of many unlikely tokens is the last. Rounding distances afterwards hides
    the order of their sums, which depends on the number of rows on a GPU, and on threads on a CPU.
    """
    log_probabilities = scores.double().log_softmax(-1)
    probabilities = log_probabilities.exp()
    expected = -(log_probabilities * probabilities).nan_to_num(nan=0.0).cumsum(-1)[:, -1:]
    distance = (-log_probabilities - expected).abs().float()
    ordered, order = distance.sort(dim=-1, stable=True)
    below = (probabilities.gather(-1, order).cumsum(-1) < mass[:, None]).sum(-1, keepdim=True)
    last_kept = ordered.gather(-1, below.clamp(max=scores.shape[-1] - 1))
    return scores.masked_fill_(distance > last_kept, NEVER)


def draw(scores: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return [rows] the token at which probabilities, summed in order of the vocabulary, pass `uniform` (float64)."""
    summed = scores.softmax(-1).cumsum(-1, dtype=torch.float64)
    drawn = (uniform * summed[:, -1])[:, None]
    return torch.searchsorted(summed, drawn, right=True).squeeze(-1).clamp(max=scores.shape[-1] - 1)


def order_scores(scores: torch.Tensor) -> torch.Tensor:
    """Return [rows, vocabulary] int64 in the order of the scores, the first of equals above the others.

    So the k best are the same tokens for every k: torch leaves open which of equals `topk` finds.
    """
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0, which it equals
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # the larger a negative number, the smaller its bits
    return (ordered.long() << 32) - torch.arange(scores.shape[-1], device=scores.device)


def count_tokens(token_ids: torch.Tensor, counted: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return [rows, vocabulary] the number of times that each token occurs among the `counted` ones of its row."""
    counted = counted & (token_ids < vocab_size)
    ids = torch.where(counted, token_ids, vocab_size)  # uncounted tokens go to a column of their own
    counts = torch.zeros(len(ids), vocab_size + 1, device=ids.device)
    return counts.scatter_add_(-1, ids, torch.ones_like(ids, dtype=counts.dtype))[:, :vocab_size]
