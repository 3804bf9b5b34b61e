"""Counter-based random numbers compared with splitmix64 in Python integers."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from lorax_server.sampling.random_uniform import HostUniforms, as_signed, draw_uniforms
from lorax_server.types import MAX_SEED

WORD = 2**64
STEP = 0x9E3779B97F4A7C15
EDGES = [0, 1, 2, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**63 + 1, WORD - STEP, MAX_SEED - 1, MAX_SEED]


def mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB % WORD
    return x ^ x >> 31


def reference(seed: int, position: int) -> float:
    """Return the upper 32 bits of the generator's output at `position`."""
    start = mix((seed + STEP) % WORD)
    return (mix((start + (position + 1) * STEP) % WORD) >> 32) / 2**32


def draw(seeds: Sequence[int], positions: Sequence[int], device: torch.device) -> np.ndarray:
    signed = torch.tensor([as_signed(seed) for seed in seeds], device=device)
    return draw_uniforms(signed, torch.tensor(positions, device=device)).cpu().numpy()


def test_uniforms_match_splitmix64(device: torch.device) -> None:
    some = random.Random(0)
    pairs = [(seed, position) for seed in EDGES for position in (0, 1, 2, 31, 4095, 2**20, 2**31, 2**40)]
    pairs += [(some.randrange(WORD), some.randrange(2**20)) for _ in range(2000)]
    seeds, positions = zip(*pairs, strict=True)
    actual = draw(seeds, positions, device)
    assert np.array_equal(HostUniforms(seeds).draw_at(np.array(positions)), actual)
    assert actual.dtype == np.float64
    assert actual.tolist() == [reference(*pair) for pair in pairs]


def test_splitmix64_matches_published_values() -> None:
    assert [mix(STEP * n % WORD) for n in (1, 2, 3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize("seed", EDGES)
def test_as_signed_keeps_bits(seed: int) -> None:
    assert -(2**63) <= as_signed(seed) < 2**63
    assert as_signed(seed) % WORD == seed


def test_uniform_times_sum_stays_below_sum(device: torch.device) -> None:
    result = draw(range(100_000), [0] * 100_000, device)
    assert result.min() >= 0
    assert result.max() < 1
    most = torch.tensor(1 - 2**-32, dtype=torch.float64)
    for total in (0.9999, 1.0, 1.0000001, 3.7):
        assert most * total < total


def many(device: torch.device) -> dict[str, np.ndarray]:
    count = 100_000
    return {
        "seeds": draw(range(count), [0] * count, device),
        "seeds from the top": draw(range(WORD - count, WORD), [5] * count, device),
        "seeds apart by the step": draw([n * STEP % WORD for n in range(count)], [0] * count, device),
        "positions": draw([0] * count, range(count), device),
        "positions of the last seed": draw([MAX_SEED] * count, range(count), device),
        "both": draw(range(count), range(count), device),
        "against each other": draw(range(count), range(count, 0, -1), device),
    }


def test_uniforms_are_evenly_distributed(device: torch.device) -> None:
    for name, values in many(device).items():
        counts = np.bincount((values * 100).astype(int), minlength=100)
        statistic = ((counts - 1000) ** 2 / 1000).sum()
        assert 60 < statistic < 150, name  # 99 degrees of freedom: P(x > 150) is about 0.001


def test_consecutive_uniforms_are_uncorrelated(device: torch.device) -> None:
    for name, values in many(device).items():
        for distance in (1, 2, 3, 64):
            correlation = np.corrcoef(values[:-distance], values[distance:])[0, 1]
            assert abs(correlation) < 4 / len(values) ** 0.5, (name, distance)
        pairs = np.bincount((values[:-1] * 8).astype(int) * 8 + (values[1:] * 8).astype(int), minlength=64)
        assert ((pairs - pairs.mean()) ** 2 / pairs.mean()).sum() < 110, name


def test_uniforms_rarely_repeat(device: torch.device) -> None:
    count = 200
    seeds = [seed for seed in range(count) for _ in range(count)]
    result = draw(seeds, list(range(count)) * count, device)
    assert count**2 - len(set(result.tolist())) < 3  # 0.2 repeats are expected with 32 bits


def test_seed_zero_position_zero_is_not_special(device: torch.device) -> None:
    first, *others = draw([0, 0, 1, 1, MAX_SEED], [0, 1, 0, 1, 0], device).tolist()
    assert 0.01 < first < 0.99
    assert first not in others


def test_uniforms_do_not_depend_on_batch(device: torch.device) -> None:
    together = draw(EDGES, range(len(EDGES)), device)
    assert [draw([seed], [i], device)[0] for i, seed in enumerate(EDGES)] == together.tolist()
