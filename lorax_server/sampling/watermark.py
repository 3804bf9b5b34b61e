"""A mark that can be found in generated text: after each token, half of the vocabulary is a little more likely.

Which half depends on the token before and on nothing else. A token is green if the highest bit of a product is set:
that of its own hash and that of the token before, both odd numbers of 32 bits. So each row takes one product for each
token, on the device, and the host need not know the token before. `docs/generation.md` says how the mark is found.
"""

import functools

import torch

GREEN_SHARE = 0.5
BIAS = 2.0
HASH_KEY = 15485863
_MIX_1, _MIX_2 = 0x7FEB352D, 0x846CA68B - 2**32  # of Wellons' lowbias32, as signed numbers


def favour_green(scores: torch.Tensor, previous: torch.Tensor, hashes: torch.Tensor) -> torch.Tensor:
    """Raise the green half of [rows, vocabulary] scores, in place. `previous` [rows] are the tokens before, `hashes`
    those of the vocabulary."""
    # Shifted by 31 bits, a green token's product is -1 and any other 0: half the time of a comparison and its cast.
    return scores.add_(_products(previous, hashes) >> 31, alpha=-BIAS)


def green_mask(previous: torch.Tensor, hashes: torch.Tensor) -> torch.Tensor:
    """Return [rows, vocabulary] bool, from [rows] token ids and the hashes of the vocabulary."""
    return _products(previous, hashes) < 0


@functools.lru_cache(maxsize=4)  # samplers are made for each batch
def hash_tokens(vocab_size: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return [vocabulary] int32: the part that is the same for every row and step."""
    return _hash(torch.arange(vocab_size, device=device))


def _products(previous: torch.Tensor, hashes: torch.Tensor) -> torch.Tensor:
    return hashes * _hash(previous * HASH_KEY)[:, None]


def _hash(numbers: torch.Tensor) -> torch.Tensor:
    """Return odd int32, which look random, from the lowest 32 bits of int64."""
    x = numbers.to(torch.int32)
    x = (x ^ _shift(x, 16)) * _MIX_1
    x = (x ^ _shift(x, 15)) * _MIX_2
    return (x ^ _shift(x, 16)) | 1


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right; `>>` alone would repeat the sign."""
    return (x >> bits).bitwise_and_(2 ** (32 - bits) - 1)
