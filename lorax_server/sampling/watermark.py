"""A mark that can be found in generated text: after each token, half of the vocabulary is a little more likely.

Which half depends on the token alone, as in transformers' `WatermarkLogitsProcessor` ("lefthash"), so its detector
finds the mark. The half is always computed on the CPU, since a GPU permutes otherwise.
"""

import torch

GREEN_SHARE = 0.5
BIAS = 2.0
HASH_KEY = 15485863


def favour_green(scores: torch.Tensor, previous: list[int]) -> torch.Tensor:
    """Raise each row's green half. `previous` is the token before, by row."""
    for row, token in zip(scores, previous, strict=True):
        row[green_list(token, len(row)).to(scores.device)] += BIAS
    return scores


def green_list(previous: int, vocab_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(HASH_KEY * previous % (2**64 - 1))
    return torch.randperm(vocab_size, generator=generator)[: int(vocab_size * GREEN_SHARE)]
