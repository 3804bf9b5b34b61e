"""Every paged architecture compared with transformers: prefill, chunks, decode, mixed batches, greedy text."""

import random
from collections import deque
from typing import Any

import pytest
import torch

from lorax_server.errors import WeightsError
from lorax_server.models.registry import build_model
from tests.grids import slow_except
from tests.paged import PagedDriver
from tests.parity.oracle import oracle_logits, oracle_text
from tests.parity.variants import LENGTH_DEPENDENT, QUICK, TOLERANCE, VARIANTS, checkpoint, make_oracle, make_weights

PROMPT = 23
DECODE = 12


class Pair:
    """A model variant in transformers and in this server, with the same weights."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.tolerance = TOLERANCE[name]
        self.oracle = make_oracle(name).to(device)
        self.tensors = checkpoint(name, self.oracle)
        self.model = build_model(VARIANTS[name].config(), make_weights(self.tensors, device))
        self._logits: dict[tuple[int, ...], torch.Tensor] = {}

    def expected(self, ids: list[int], prompt_length: int = PROMPT) -> torch.Tensor:
        """Return the logits of every token of one request. Results are cached."""
        key = (prompt_length, *ids)
        if key not in self._logits:
            self._logits[key] = oracle_logits(self.oracle, ids, prompt_length, self.tensors)
        return self._logits[key]

    def driver(self, **settings: Any) -> PagedDriver:
        return PagedDriver(self.model, **settings)


@pytest.fixture(scope="module", params=slow_except(QUICK, VARIANTS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pair(name: str, device: torch.device) -> Pair:
    return Pair(name, device)


def random_ids(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 97), k=count)


def difference(ours: torch.Tensor, expected: torch.Tensor) -> float:
    assert ours.shape == expected.shape
    return float((ours - expected).abs().max())


def test_prefill_and_decode_match_transformers(
    name: str, pair: Pair, agreement: dict[str, tuple[float, float]]
) -> None:
    ids = random_ids(PROMPT + DECODE)
    expected = pair.expected(ids)
    driver = pair.driver()
    seq = driver.add(prompt_length=PROMPT)
    prefill = driver.forward([(seq, ids[:PROMPT])])[0]
    decode = torch.cat([driver.forward([(seq, [token])])[0] for token in ids[PROMPT:]])
    agreement[name] = difference(prefill, expected[:PROMPT]), difference(decode, expected[PROMPT:])
    assert max(agreement[name]) < pair.tolerance


def test_parity_fails_when_feature_is_disabled(name: str, pair: Pair, device: torch.device) -> None:
    all_ids = random_ids(PROMPT + DECODE)
    ids = all_ids[: PROMPT + 3]
    config, tensors = VARIANTS[name].switched_off(pair.tensors)
    try:
        model = build_model(config, make_weights(tensors, device))
    except WeightsError:
        return  # rejected: the checkpoint lacks tensors that the config requires
    driver = PagedDriver(model)
    seq = driver.add(prompt_length=PROMPT)
    feeds = [ids[:PROMPT], *([token] for token in ids[PROMPT:])]
    logits = torch.cat([driver.forward([(seq, feed)])[0] for feed in feeds])
    assert difference(logits, pair.expected(all_ids)[: len(ids)]) > 5 * max(pair.tolerance, 1e-2)


def test_greedy_tokens_match_transformers(pair: Pair) -> None:
    ours = pair.driver().greedy(random_ids(9), DECODE)
    expected = oracle_text(pair.oracle, random_ids(9), ours, pair.tensors)
    assert len(expected) > 1
    assert ours[: len(expected)] == expected


@pytest.mark.parametrize("chunk", slow_except([7, 16], [1, 7, 16, 17]))
def test_chunked_prefill_matches_transformers(pair: Pair, chunk: int) -> None:
    # With blocks of 8, these chunks end inside blocks and at block boundaries.
    ids = random_ids(36)
    driver = pair.driver(block_size=8)
    seq = driver.add(prompt_length=len(ids))
    pieces = [driver.forward([(seq, ids[start : start + chunk])])[0] for start in range(0, len(ids), chunk)]
    assert difference(torch.cat(pieces), pair.expected(ids, len(ids))) < pair.tolerance


def test_batch_matches_single_sequences(pair: Pair) -> None:
    """Run several forward passes that mix prompts, prompt chunks and single tokens from different sequences."""
    prompts = [[1], [5], [7, 5], [9, 1, 21], [18]]  # chunk sizes per prompt
    lengths = [sum(chunks) for chunks in prompts]
    rows = [random_ids(length + 6, seed=length) for length in lengths]
    driver = pair.driver(num_blocks=128)
    seqs = [driver.add(prompt_length=length) for length in lengths]
    waiting = [deque(chunks + [1] * 6) for chunks in prompts]
    got: list[list[torch.Tensor]] = [[] for _ in rows]
    while any(waiting):
        members = [row for row in range(len(rows)) if waiting[row]]
        feeds = []
        for row in members:
            start = driver.lengths[seqs[row]]
            feeds.append((seqs[row], rows[row][start : start + waiting[row].popleft()]))
        for row, logits in zip(members, driver.forward(feeds), strict=True):
            got[row].append(logits)
    for row, ids in enumerate(rows):
        assert difference(torch.cat(got[row]), pair.expected(ids, lengths[row])) < pair.tolerance, f"row {row}"


def test_logits_are_bitwise_independent_of_batch(pair: Pair, device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("matrix products on GPUs depend on the batch size")
    rows = [random_ids(length, seed=length) for length in (1, 7, 13, 2, 5)]
    driver = pair.driver(num_blocks=128)
    single, batched = ([(driver.add(prompt_length=len(ids)), ids) for ids in rows] for _ in range(2))
    together = driver.forward(batched)
    for feed, logits in zip(single, together, strict=True):
        assert torch.equal(driver.forward([feed])[0], logits)


@pytest.mark.parametrize("name", slow_except(QUICK, LENGTH_DEPENDENT), scope="module")
def test_long_sequence_does_not_change_angles_of_other_sequences(pair: Pair) -> None:
    """Dynamic RoPE scaling for a long sequence does not affect a short sequence in the same batch."""
    short, long = random_ids(10, seed=1), random_ids(60, seed=2)
    driver = pair.driver()
    seqs = [driver.add(prompt_length=10), driver.add(prompt_length=60)]
    together = driver.forward([(seqs[0], short), (seqs[1], long)])
    assert difference(together[0], pair.expected(short, 10)) < pair.tolerance
    assert difference(together[1], pair.expected(long, 60)) < pair.tolerance
