"""Watermark generated text by making a pseudo-random half of the vocabulary (the green tokens) more likely.

The previous token selects the green half: a token is green if the highest bit of hash(token) * hash(previous) is set.
Both hashes are odd 32-bit integers. `docs/generation.md` describes detection.
"""

import functools

import torch

GREEN_FRACTION = 0.5
GREEN_BIAS = 2.0
HASH_KEY = 15485863
_MIX_1, _MIX_2 = 0x7FEB352D, 0x846CA68B - 2**32  # lowbias32 constants as signed integers


def boost_green_tokens(scores: torch.Tensor, previous: torch.Tensor, hashes: torch.Tensor) -> torch.Tensor:
    """Raise the scores `[rows, vocabulary]` of green tokens in place.

    `previous` `[rows]` contains the preceding token of each row, and `hashes` is the result of `hash_tokens`.
    """
    # `product >> 31` is -1 for green tokens, otherwise 0. This is twice as fast as comparing and casting.
    return scores.add_(_multiply_hashes(previous, hashes) >> 31, alpha=-GREEN_BIAS)


def green_mask(previous: torch.Tensor, hashes: torch.Tensor) -> torch.Tensor:
    """Return a bool tensor `[rows, vocabulary]` that is True for green tokens."""
    return _multiply_hashes(previous, hashes) < 0


@functools.lru_cache(maxsize=4)  # cached, because each new batch creates a sampler
def hash_tokens(vocab_size: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return the hash of every token, `[vocabulary]` int32."""
    return _hash_values(torch.arange(vocab_size, device=device))


def _multiply_hashes(previous: torch.Tensor, hashes: torch.Tensor) -> torch.Tensor:
    return hashes * _hash_values(previous * HASH_KEY)[:, None]


def _hash_values(values: torch.Tensor) -> torch.Tensor:
    """Return odd int32 hashes of the lowest 32 bits of int64 values."""
    x = values.to(torch.int32)
    x = (x ^ _shift_right(x, 16)) * _MIX_1
    x = (x ^ _shift_right(x, 15)) * _MIX_2
    return (x ^ _shift_right(x, 16)) | 1


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the logical right shift of `x`, because `>>` is an arithmetic shift."""
    return (x >> bits).bitwise_and_(2 ** (32 - bits) - 1)
