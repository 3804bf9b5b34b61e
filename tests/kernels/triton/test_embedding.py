"""Embedding adapters: replaced rows, LoRA, vectors and added tokens."""

from typing import NamedTuple

import pytest
import torch

from lorax_server.kernels import EmbeddingTarget, Field, LoraBatch
from lorax_server.kernels.triton.ops import TritonOps
from tests.kernels.triton.cases import (
    BF16,
    DTYPES,
    FP16,
    FP32,
    NanBuffer,
    Runs,
    check_close,
    choose_cases,
    empty_table,
    make_batch,
    normal,
    pairwise_cases,
)
from tests.kernels.triton.interpreter import IS_INTERPRETED

TARGET, FIRST, HELD, VOCAB = 1, 20, 30, 70  # this rank has tokens 20 to 49 of 70
RUNS: dict[str, Runs] = {
    "decode": [(adapter, 5 if IS_INTERPRETED else 1 + 7 * adapter) for adapter in (2, 0, 1, 3, 6, 4, 5)],
    "prompt": [(3, 20), (0, 5), (4, 20), (2, 5)] if IS_INTERPRETED else [(3, 150), (0, 10), (4, 120), (2, 20)],
}
CASES = choose_cases(
    [(BF16, 40, True, "decode"), (FP16, 40, False, "prompt"), (FP32, 40, True, "prompt")],
    pairwise_cases(DTYPES, [40, 1032, 4096], [True, False], RUNS),
    fast=2,
)


class Adapter(NamedTuple):
    rank: int = 0
    row_ids: tuple[int, ...] = ()  # token IDs relative to the rank's first token
    new: int = 0
    has_output_scale: bool = False
    has_output_bias: bool = False


ADAPTERS = [
    Adapter(rank=8),
    Adapter(rank=24, row_ids=(0, 3, 4, 17, 29), has_output_scale=True),
    Adapter(row_ids=tuple(range(1, 30, 2)), new=3, has_output_bias=True),
    Adapter(rank=3, row_ids=(5,), new=1, has_output_scale=True, has_output_bias=True),
    Adapter(row_ids=tuple(range(30))),
    Adapter(),
]


def embedding_batch(width: int, runs: Runs, dtype: torch.dtype, device: torch.device) -> LoraBatch:
    buffer, table = NanBuffer(dtype), empty_table(len(ADAPTERS), 3)
    for index, adapter in enumerate(ADAPTERS, start=1):
        fields, seed = table[index, TARGET], 10 * index
        fields[Field.RANK], fields[Field.NUM_ROWS] = adapter.rank, len(adapter.row_ids)
        fields[Field.NUM_NEW_ROWS] = adapter.new
        if adapter.rank:
            fields[Field.A] = buffer.add(normal(HELD, adapter.rank, seed=seed))
            fields[Field.B] = buffer.add(normal(adapter.rank, width, seed=seed + 1) / adapter.rank)
        if adapter.row_ids:
            fields[Field.ROW_IDS] = buffer.add_bits(torch.tensor(adapter.row_ids, dtype=torch.int32).view(dtype))
            fields[Field.ROWS] = buffer.add(normal(len(adapter.row_ids), width, seed=seed + 2))
        if adapter.new:
            fields[Field.NEW_ROWS] = buffer.add(normal(adapter.new, width, seed=seed + 3))
        for has, field in (
            (adapter.has_output_scale, Field.OUTPUT_SCALE),
            (adapter.has_output_bias, Field.OUTPUT_BIAS),
        ):
            if has:
                fields[field] = buffer.add(normal(width, seed=seed + 4 + field))
    return make_batch(buffer.join(device), table, [(HELD, width)] * 3, runs)


def expected_rows(rows: torch.Tensor, ids: list[int], batch: LoraBatch, adds_new_rows: bool) -> torch.Tensor:
    """Apply adapters token by token, in float32."""
    out, buffer, width = rows.float().cpu(), batch.buffer.float().cpu(), rows.shape[1]
    for place, (token, index) in enumerate(zip(ids, batch.adapter_indices.tolist(), strict=True)):
        if index == 0:
            continue
        adapter, fields, local = ADAPTERS[index - 1], batch.host_table[index, TARGET].tolist(), token - FIRST

        def take(field: Field, row: int, size: int = width, fields: list[int] = fields) -> torch.Tensor:
            return buffer[fields[field] + row * size :][:size]

        if local in adapter.row_ids:
            out[place] = take(Field.ROWS, adapter.row_ids.index(local))
        if 0 <= local < HELD and adapter.rank:
            low_rank = take(Field.A, local, adapter.rank) * float(batch.scales[index, TARGET])
            out[place] += low_rank @ buffer[fields[Field.B] :][: adapter.rank * width].view(-1, width)
        if adapter.has_output_scale:
            out[place] *= take(Field.OUTPUT_SCALE, 0)
        if adapter.has_output_bias:
            out[place] += take(Field.OUTPUT_BIAS, 0)
        if adds_new_rows and adapter.new and token >= VOCAB:
            out[place] = take(Field.NEW_ROWS, token - VOCAB)
    return out


def tokens_of(runs: Runs) -> list[int]:
    """Return token IDs that cover the vocabulary and the tokens that each adapter adds."""
    ids = []
    for adapter, length in runs:
        size = VOCAB + (ADAPTERS[adapter - 1].new if adapter else 0)
        ids += [(size - 1 - 7 * place) % size for place in range(length)]
    return ids


@pytest.mark.parametrize(("dtype", "width", "adds_new_rows", "name"), CASES, ids=str)
def test_embedding_applies_adapter_of_each_token(
    device: torch.device, dtype: torch.dtype, width: int, adds_new_rows: bool, name: str
) -> None:
    runs = RUNS[name]
    batch, ids = embedding_batch(width, runs, dtype, device), tokens_of(runs)
    table = normal(VOCAB, width, seed=3, dtype=dtype)
    is_held = torch.tensor([FIRST <= token < FIRST + HELD for token in ids])
    rows = (table[torch.tensor(ids).clamp(max=VOCAB - 1)] * is_held[:, None]).to(device)
    expected = expected_rows(rows, ids, batch, adds_new_rows)
    before = rows.clone()
    target = EmbeddingTarget(TARGET, range(FIRST, FIRST + HELD), VOCAB, adds_new_rows)
    TritonOps().adapt_embedding(rows, torch.tensor(ids, device=device), batch, target)
    check_close(rows, expected, dtype)
    is_base = batch.adapter_indices == 0
    assert torch.equal(rows[is_base], before[is_base])


def test_rank_without_vocabulary_has_only_new_rows(device: torch.device) -> None:
    batch = embedding_batch(40, [(4, 3)], torch.float32, device)
    batch.table[4, TARGET, Field.NUM_ROWS] = 0
    rows = torch.zeros(3, 40, device=device)
    target = EmbeddingTarget(TARGET, range(VOCAB, VOCAB), VOCAB, True)
    TritonOps().adapt_embedding(rows, torch.tensor([5, 70, 69], device=device), batch, target)
    fields, buffer = batch.host_table[4, TARGET], batch.buffer
    bias, new = (buffer[fields[field] :][:40] for field in (Field.OUTPUT_BIAS, Field.NEW_ROWS))
    assert torch.equal(rows, torch.stack([bias, new, bias]))
