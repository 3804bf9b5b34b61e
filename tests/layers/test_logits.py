"""Embedding and LM head with adapters, compared with the merged matrix of each adapter."""

import math
import random
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn

from lorax_server.adapters.host import prepare
from lorax_server.adapters.target import TargetKind
from lorax_server.adapters.weights import ModuleWeights
from lorax_server.distributed import ProcessGroup
from lorax_server.layers.embedding import TensorParallelEmbedding
from lorax_server.layers.linear import MultiAdapterHead
from lorax_server.layers.targets import collect_adapter_targets
from lorax_server.weights import Weights
from lorax_server.worker.adapter_memory import AdapterMemory
from tests.adapters.test_host import (
    ALONE,
    BASE,
    CHANGED,
    SIZE,
    VOCAB,
    VOCABULARIES,
    factors,
    merged_rows,
    normal,
    with_vocabulary,
)
from tests.builders import CPU, adapter_batch, weight_options
from tests.lora import GivenAdapter
from tests.ranks import RankPool

Case = tuple[dict[TargetKind, ModuleWeights], int]  # an adapter's embedding and head, and the size of its vocabulary
KINDS = (TargetKind.EMBEDDING, TargetKind.HEAD)


def make_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {
        "nothing": ({}, VOCAB),
        "head alone": ({TargetKind.HEAD: factors(TargetKind.HEAD)}, VOCAB),
        "embedding alone": ({TargetKind.EMBEDDING: factors(TargetKind.EMBEDDING, dora=True)}, VOCAB),
        "smaller": ({kind: ModuleWeights(weight=CHANGED[:8]) for kind in KINDS}, 8),
        "smaller, low-rank": ({kind: replace(factors(kind, 5), weight=CHANGED[:5]) for kind in KINDS}, 5),
        "smaller, DoRA": ({TargetKind.HEAD: replace(factors(TargetKind.HEAD, 8, dora=True), weight=CHANGED[:8])}, 8),
    }
    for name, (low_rank, dora) in product(VOCABULARIES, [(False, False), (True, False), (True, True)]):
        made = {kind: with_vocabulary(name, kind, low_rank=low_rank, dora=dora) for kind in KINDS}
        how_adapted = "DoRA" if dora else "low-rank" if low_rank else "rows"
        cases[f"{name}, {how_adapted}"] = (
            {kind: weights for kind, (weights, _) in made.items()},
            made[TargetKind.HEAD][1],
        )
    return cases


CASES = make_cases()


def run_vocabulary(
    group: ProcessGroup, names: list[str], indices: list[int], ids: torch.Tensor, x: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return embeddings and logits. Units between adapters are NaN, so that reading them is detected."""
    settings = weight_options(dtype=dtype) | {"process_group": group}
    weights = Weights({"embedding.weight": BASE, "head.weight": BASE}, **settings)
    embedding = TensorParallelEmbedding(weights, "embedding", VOCAB, SIZE)
    head = MultiAdapterHead.load(weights, "head", SIZE, VOCAB)
    targets = collect_adapter_targets(nn.ModuleList([embedding, head]))
    memory = AdapterMemory(targets, dtype, CPU, 64 * len(names))
    memory.arena.buffer.fill_(math.nan)
    for index, name in enumerate(names):
        modules, vocab_size = CASES[name]
        adapter = GivenAdapter({kind.value: weights for kind, weights in modules.items()}, vocab_size)
        memory.load(index + 1, prepare(adapter, targets, dtype, group), 64 * index + 1)
    data = adapter_batch(indices, memory.arena)
    return embedding(ids, data), head(x.to(dtype), data)[0]


def expected_vocabulary(
    names: list[str], indices: list[int], ids: torch.Tensor, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = [VOCAB, *(CASES[name][1] for name in names)]
    rows, logits = [], torch.full((len(ids), max(VOCAB, *(sizes[index] for index in indices))), -math.inf)
    for token, index in enumerate(indices):
        modules = CASES[names[index - 1]][0] if index else {}
        table, matrix = (merged_rows(BASE, modules.get(kind, ModuleWeights()), kind) for kind in KINDS)
        rows.append(table[ids[token]])
        logits[token, : sizes[index]] = (matrix @ x[token])[: sizes[index]]
    return torch.stack(rows), logits


def make_batch(
    names: list[str], runs: list[tuple[int, int]]
) -> tuple[list[str], list[int], torch.Tensor, torch.Tensor]:
    """Create a batch of random tokens from each adapter's vocabulary."""
    indices = [index for index, length in runs for _ in range(length)]
    sizes = [VOCAB, *(CASES[name][1] for name in names)]
    draw = random.Random(0)
    ids = torch.tensor([draw.randrange(sizes[index]) for index in indices])
    return names, indices, ids, normal(len(ids), SIZE, seed=9)


@pytest.mark.parametrize("name", CASES)
def test_two_adapters_and_base_model_match_reference(name: str) -> None:
    runs = [(1, 3), (0, 2), (2, 2), (1, 20), (0, 3), (2, 1)]
    batch = make_batch([name, "tokens replaced, rows"], runs)
    for got, expected in zip(run_vocabulary(ALONE, *batch, torch.float32), expected_vocabulary(*batch), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1), (torch.float16, 0.02)])
def test_all_adapters_in_one_batch_match_reference(dtype: torch.dtype, tolerance: float) -> None:
    order = random.Random(1).sample(range(len(CASES) + 1), len(CASES) + 1)
    batch = make_batch(list(CASES), [(index, 1 + index % 11) for index in order])
    for got, expected in zip(run_vocabulary(ALONE, *batch, dtype), expected_vocabulary(*batch), strict=True):
        torch.testing.assert_close(got.float(), expected, rtol=tolerance, atol=tolerance)


def test_two_ranks_match_single_rank(ranks: RankPool) -> None:
    batch = make_batch(list(CASES), [(index, 1 + index % 11) for index in range(len(CASES) + 1)])
    for result in ranks.run(2, run_vocabulary, *batch, torch.float32):
        for got, expected in zip(result, expected_vocabulary(*batch), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["matrix grown, DoRA", "smaller, low-rank", "tokens added, rows"])
def test_base_model_tokens_are_bitwise_unchanged(name: str) -> None:
    _, indices, ids, x = make_batch([name], [(0, 2), (1, 3), (0, 8), (1, 8)])
    base = torch.tensor(indices) == 0
    rows, logits = run_vocabulary(ALONE, [name], indices, ids, x, torch.float32)
    plain_rows, plain_logits = run_vocabulary(ALONE, [name], [0] * len(ids), ids.clamp(max=VOCAB - 1), x, torch.float32)
    assert plain_logits.shape == (len(ids), VOCAB)  # the batch's largest vocabulary
    assert torch.equal(rows[base], plain_rows[base])
    assert torch.equal(logits[base, :VOCAB], plain_logits[base])
    assert (logits[base, VOCAB:] == -math.inf).all()
