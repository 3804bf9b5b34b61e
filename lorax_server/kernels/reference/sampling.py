"""The ops of sampling that look at whole vocabularies."""

import math

import numpy as np
import torch


def choose_greedy(
    logits: torch.Tensor, words: torch.Tensor | None = None, numbers: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _apply_masks(logits, words, numbers)
    token_ids = find_likeliest(scores)
    return token_ids, log_softmax(scores).gather(-1, token_ids[:, None]).squeeze(-1)


def find_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    temperatures: torch.Tensor | None = None,
    words: torch.Tensor | None = None,
    numbers: torch.Tensor | None = None,
) -> torch.Tensor:
    scores = _apply_masks(logits, words, numbers)
    if temperatures is not None:
        scores = scores / temperatures[:, None]
    return log_softmax(scores).gather(-1, token_ids)


def find_best(
    logits: torch.Tensor, count: int, words: torch.Tensor | None = None, numbers: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    best, token_ids = _apply_masks(logits, words, numbers).topk(count, dim=-1)
    return best, token_ids


def find_likeliest(scores: torch.Tensor) -> torch.Tensor:
    """Return [rows] the token of the highest score, the first of equals. numpy looks at several scores at once on a
    CPU, which torch does not."""
    return torch.from_numpy(scores.numpy().argmax(-1)) if scores.is_cpu else scores.argmax(-1)


def log_softmax(scores: torch.Tensor) -> torch.Tensor:
    """Return log probabilities. The sum is float64: torch's own loses digits of a large vocabulary on a CPU, and its
    order, which depends on the number of rows and on threads, would show."""
    shifted = scores - scores.amax(-1, keepdim=True)
    return shifted.sub_(shifted.exp().sum(-1, keepdim=True, dtype=torch.float64).log_().float())


def unpack_masks(words: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return [masks, vocabulary] bool, the bits of [masks, words] int32, the first the lowest."""
    if words.is_cpu:
        flags = np.unpackbits(words.numpy().view(np.uint8), axis=1, bitorder="little", count=vocab_size)
        return torch.from_numpy(flags).view(torch.bool)
    bits = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> bits) & 1).bool().flatten(1)[:, :vocab_size]


def _apply_masks(logits: torch.Tensor, words: torch.Tensor | None, numbers: torch.Tensor | None) -> torch.Tensor:
    scores = logits.detach().float()
    if words is None or numbers is None:
        return scores
    rows = torch.nonzero(numbers >= 0).flatten()
    allowed = unpack_masks(words[numbers[rows]], logits.shape[-1])
    return scores.index_copy(0, rows, scores[rows].masked_fill(~allowed, -math.inf))
