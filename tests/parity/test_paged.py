"""Every architecture, paged, against transformers: prefill, chunks, decode, mixed batches, greedy text."""

import random
from typing import Any

import pytest
import torch

from lorax_server.models.registry import build_model
from tests.paged import PagedDriver
from tests.parity.oracle import oracle_greedy, oracle_logits
from tests.parity.variants import LENGTH_DEPENDENT, TOLERANCE, VARIANTS, checkpoint, make_oracle, make_weights

PROMPT = 23
DECODE = 20


class Pair:
    """A variant in transformers and here, on the same weights."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.tolerance = TOLERANCE[name]
        self.oracle = make_oracle(name).to(device)
        self.tensors = checkpoint(name, self.oracle)
        self.model = build_model(VARIANTS[name].config(), make_weights(self.tensors, device))

    def expected(self, ids: list[int], prompt_length: int = PROMPT) -> torch.Tensor:
        return oracle_logits(self.oracle, ids, prompt_length, self.tensors)

    def driver(self, **settings: Any) -> PagedDriver:
        return PagedDriver(self.model, **settings)


@pytest.fixture(scope="module", params=list(VARIANTS))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def pair(name: str, device: torch.device) -> Pair:
    return Pair(name, device)


def random_ids(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 97), k=count)


def difference(ours: torch.Tensor, expected: torch.Tensor) -> float:
    assert ours.shape == expected.shape
    return float((ours - expected).abs().max())


def test_prefill_and_decode(pair: Pair, record_property: Any) -> None:
    ids = random_ids(PROMPT + DECODE)
    expected = pair.expected(ids)
    driver = pair.driver()
    seq = driver.add(prompt_length=PROMPT)
    prefill = driver.forward([(seq, ids[:PROMPT])])[0]
    decode = torch.cat([driver.forward([(seq, [token])])[0] for token in ids[PROMPT:]])
    record_property("prefill", difference(prefill, expected[:PROMPT]))
    record_property("decode", difference(decode, expected[PROMPT:]))
    assert difference(prefill, expected[:PROMPT]) < pair.tolerance
    assert difference(decode, expected[PROMPT:]) < pair.tolerance


def test_fails_when_switched_off(name: str, pair: Pair, device: torch.device) -> None:
    ids = random_ids(PROMPT + 3)
    model = build_model(VARIANTS[name].config_switched_off(), make_weights(pair.tensors, device))
    driver = PagedDriver(model)
    seq = driver.add(prompt_length=PROMPT)
    logits = torch.cat([driver.forward([(seq, ids[:PROMPT])])[0], *(driver.forward([(seq, [i])])[0] for i in ids[PROMPT:])])
    assert difference(logits, pair.expected(ids)) > 5 * max(pair.tolerance, 1e-2)


def test_greedy_text(pair: Pair) -> None:
    expected = oracle_greedy(pair.oracle, random_ids(9), DECODE, pair.tensors)
    assert len(expected) > 1
    assert pair.driver().greedy(random_ids(9), DECODE)[: len(expected)] == expected


@pytest.mark.parametrize("chunk", [1, 7, 16, 17])
def test_chunked_prefill(pair: Pair, chunk: int) -> None:
    # Blocks of 8 against chunks of 1, 7, 16 and 17: prefixes that end inside a block and at its edge.
    ids = random_ids(43)
    driver = pair.driver(block_size=8)
    seq = driver.add(prompt_length=len(ids))
    pieces = [driver.forward([(seq, ids[start : start + chunk])])[0] for start in range(0, len(ids), chunk)]
    assert difference(torch.cat(pieces), pair.expected(ids, len(ids))) < pair.tolerance


def test_batch_equals_each_alone(pair: Pair) -> None:
    """Prompts, chunks and single tokens of sequences of different lengths in one forward, for several forwards."""
    lengths = [1, 5, 12, 31, 18]
    rows = [random_ids(length + 6, seed=length) for length in lengths]
    driver = pair.driver(num_blocks=128)
    seqs = [driver.add(prompt_length=length) for length in lengths]
    got: list[list[torch.Tensor]] = [[] for _ in rows]
    chunks = [[(0, 1), *((n, n + 1) for n in range(1, 7))], [(0, 5)], [(0, 7), (7, 12)], [(0, 9), (9, 10), (10, 31)], [(0, 18)]]
    plan = [list(reversed(cuts + [(n, n + 1) for n in range(max(c[1] for c in cuts), length + 6)])) for cuts, length in zip(chunks, lengths, strict=True)]
    while any(plan):
        members = [row for row in range(len(rows)) if plan[row]]
        feeds = []
        for row in members:
            start, stop = plan[row].pop()
            feeds.append((seqs[row], rows[row][start:stop]))
        for row, logits in zip(members, driver.forward(feeds), strict=True):
            got[row].append(logits)
    for row, ids in enumerate(rows):
        assert difference(torch.cat(got[row]), pair.expected(ids, lengths[row])) < pair.tolerance, f"row {row}"


@pytest.mark.parametrize("name", LENGTH_DEPENDENT, scope="module")
def test_neighbour_does_not_change_angles(pair: Pair) -> None:
    """A long neighbour in the batch leaves a short sequence with the angles of its own length."""
    short, long = random_ids(10, seed=1), random_ids(60, seed=2)
    driver = pair.driver()
    seqs = [driver.add(prompt_length=10), driver.add(prompt_length=60)]
    together = driver.forward([(seqs[0], short), (seqs[1], long)])
    assert difference(together[0], pair.expected(short, 10)) < pair.tolerance
    assert difference(together[1], pair.expected(long, 60)) < pair.tolerance
