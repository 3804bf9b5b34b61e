"""Tests for `best_of` candidate seeds and ranking."""

import math

import pytest

from lorax_server.generation.candidates import candidate_seed, sort_candidates
from lorax_server.types import MAX_SEED, SamplingParams

SEEDS = (0, 1, 2, 2**32, 2**63 - 1, 2**63, MAX_SEED)


def test_first_candidate_uses_request_seed() -> None:
    assert [candidate_seed(seed, 0) for seed in SEEDS] == list(SEEDS)


def test_candidate_seeds_are_valid_and_distinct() -> None:
    drawn = [candidate_seed(seed, index) for seed in SEEDS for index in range(100)]
    assert len(set(drawn)) == len(drawn)
    assert all(SamplingParams(seed=seed).seed == seed for seed in drawn)


def test_adjacent_request_seeds_share_no_candidate_seeds() -> None:
    """A request with seed 1 must not repeat the second candidate of seed 0."""
    assert not {candidate_seed(0, index) for index in range(50)} & {candidate_seed(1, index) for index in range(50)}


def test_candidate_seeds_are_stable() -> None:
    assert candidate_seed(0, 1) == 0x7C3CCD10BB7EC37B
    assert candidate_seed(MAX_SEED, 3) == 0xFD1696C4F6BB2DDB


@pytest.mark.parametrize(
    ("logprobs", "best"),
    [
        ([[-1.0]], 0),
        ([[-2.0], [-1.0], [-3.0]], 1),
        ([[-1.0, -1.0, -1.0, -1.0], [-2.0]], 0),  # the mean, not the sum
        ([[-2.0], [-1.0, -1.0, -1.0, -1.0]], 1),
        ([[-1.0, -3.0], [-2.0], [-2.0, -2.0]], 0),  # ties keep their order
        ([[], [-50.0]], 1),
        ([[-50.0], []], 0),
        ([[], []], 0),
        ([[-math.inf, 0.0], [-1000.0]], 1),
        ([[-math.inf], []], 0),
        ([[math.nan], [-1.0]], 1),
        ([[-1.0], [math.nan, -0.1]], 0),
        ([[-5.0], [math.nan], [-4.0]], 2),
        ([[math.nan], [math.nan]], 0),
    ],
)
def test_best_candidate_has_highest_mean_logprob(logprobs: list[list[float]], best: int) -> None:
    ranked = sort_candidates(logprobs)
    assert ranked[0] == best
    assert sorted(ranked) == list(range(len(logprobs)))


def test_tied_candidates_keep_their_order() -> None:
    assert sort_candidates([[-3.0], [-1.0], [], [-1.0, -1.0], [-2.0]]) == [1, 3, 4, 0, 2]
