"""A batch with 32 rows, 22 different adapters and the base model: each row equals its single run."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lorax_server.adapters.batch import AdapterArena, AdapterBatchData, AdapterBatchMetadata
from lorax_server.distributed import ProcessGroup
from lorax_server.models.custom_modeling.neox_modeling import GPTNeoxForCausalLM
from lorax_server.models.custom_modeling.opt_modeling import OPTForCausalLM
from tests.grids import slow_except
from tests.paged import PagedDriver
from tests.parity.adapters.cases import CASES
from tests.parity.adapters.mixed import SPREAD, mixed_cases, write_mixed
from tests.parity.adapters.served import load_adapters, make_model
from tests.parity.oracle import oracle_logits
from tests.parity.variant import VOCAB
from tests.parity.variants import VARIANTS, checkpoint, make_oracle, make_weights
from tests.ranks import RankPool

CPU = torch.device("cpu")
NUM_ROWS, STEPS = 32, 4
PADDED = {"neox-parallel": GPTNeoxForCausalLM, "opt-pre-norm": OPTForCausalLM}


def make_rows(base: str) -> list[tuple[int, int, list[int]]]:
    """Return adapter, prompt length and tokens per row, with every adapter and the base model."""
    generator = torch.Generator().manual_seed(11)
    cases = mixed_cases(base)
    adapters = [*range(1, len(cases) + 1), 0, 0, 0, 0, 0, 1, 6, 15, 17, 18]
    assert len(adapters) == NUM_ROWS
    rows = []
    for place in torch.randperm(NUM_ROWS, generator=generator).tolist():
        adapter = adapters[place]
        vocab = cases[adapter - 1].vocab if adapter else VOCAB
        length = int(torch.randint(1, 14, (), generator=generator))
        rows.append((adapter, length, torch.randint(0, vocab, (length + STEPS,), generator=generator).tolist()))
    return rows


def run_paged(model: Any, arena: AdapterArena, rows: list[tuple[int, int, list[int]]]) -> list[torch.Tensor]:
    """Return all logits of every row: prefill in one batch, then decode."""
    driver = PagedDriver(model, num_blocks=256)
    seqs = [driver.add(adapter, length) for adapter, length, _ in rows]
    steps = [[(seq, ids[:length]) for seq, (_, length, ids) in zip(seqs, rows, strict=True)]]
    for step in range(STEPS):
        steps.append([(seq, [ids[length + step]]) for seq, (_, length, ids) in zip(seqs, rows, strict=True)])
    logits = [driver.forward(feeds, arena) for feeds in steps]
    return [torch.cat([step[row] for step in logits]) for row in range(len(rows))]


def compare(base: str, rows: list[tuple[int, int, list[int]]], batched: list[Any], alone: list[Any]) -> None:
    cases = mixed_cases(base)
    for (adapter, _, _), together, single in zip(rows, batched, alone, strict=True):
        vocab = cases[adapter - 1].vocab if adapter else VOCAB
        what = f"adapter {adapter} ({cases[adapter - 1].kind if adapter else 'base'})"
        assert (together[:, :vocab] - single[:, :vocab]).abs().max() < 1e-5, what
        assert (together[:, vocab:] == -torch.inf).all(), what
        assert torch.equal(together.argmax(1), single.argmax(1)), what


@pytest.mark.parametrize("base", ["llama-attention-bias", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_paged_batch_of_adapters_matches_single_requests(base: str, tmp_path: Path, device: torch.device) -> None:
    written = write_mixed(base, tmp_path)
    model = make_model(base, device, spread=SPREAD)
    arena = load_adapters(model, [folder for _, folder in written], device)
    rows = make_rows(base)
    batched = run_paged(model, arena, rows)
    compare(base, rows, batched, [run_paged(model, arena, [row])[0] for row in rows])
    for adapter, length, ids in rows[:8]:  # the single run equals PEFT
        case, folder = written[adapter - 1]
        oracle = case.oracle(folder).to(device) if adapter else make_oracle(base, SPREAD).to(device)
        expected = oracle_logits(oracle, ids, length, {})
        got = run_paged(model, arena, [(adapter, length, ids)])[0][:, : expected.shape[1]]
        assert (got - expected).abs().max() < 1e-4


@pytest.mark.parametrize("base", ["qwen3moe", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_batch_of_adapters_on_experts_matches_single_requests(base: str, tmp_path: Path, device: torch.device) -> None:
    """All forms of adapters on experts and routers are mixed with the base model."""
    cases = [case for name, case in CASES.items() if name.startswith("experts") and case.base == base]
    folders = [tmp_path / str(number) for number in range(len(cases))]
    for case, folder in zip(cases, folders, strict=True):
        case.write(folder)
    model = make_model(base, device)
    arena = load_adapters(model, folders, device)
    generator = torch.Generator().manual_seed(12)
    rows = []
    for adapter in [0, *range(1, len(cases) + 1), 0, *range(1, len(cases) + 1)]:
        length = int(torch.randint(1, 14, (), generator=generator))
        rows.append((adapter, length, torch.randint(0, VOCAB, (length + STEPS,), generator=generator).tolist()))
    batched = run_paged(model, arena, rows)
    for (adapter, length, ids), together in zip(rows, batched, strict=True):
        alone = run_paged(model, arena, [(adapter, length, ids)])[0]
        assert (together - alone).abs().max() < 1e-5
        oracle = cases[adapter - 1].oracle(folders[adapter - 1]).to(device) if adapter else make_oracle(base).to(device)
        assert (together - oracle_logits(oracle, ids, length, {})).abs().max() < 1e-4


@pytest.mark.parametrize("base", slow_except(["neox-parallel"], PADDED))
def test_padded_batch_of_adapters_matches_single_requests(base: str, tmp_path: Path, device: torch.device) -> None:
    written = write_mixed(base, tmp_path)
    served = make_model(base, device, spread=SPREAD)
    arena = load_adapters(served, [folder for _, folder in written], device)
    tensors = checkpoint(base, make_oracle(base, SPREAD))
    model = PADDED[base](VARIANTS[base].config(), make_weights(tensors, device)).eval()
    rows = make_rows(base)
    compare(base, rows, run_padded(model, arena, rows), [run_padded(model, arena, [row])[0] for row in rows])


@torch.no_grad()
def run_padded(model: Any, arena: AdapterArena, rows: list[tuple[int, int, list[int]]]) -> list[torch.Tensor]:
    width = max(length for _, length, _ in rows)
    device = arena.buffer.device
    adapters = torch.tensor([adapter for adapter, _, _ in rows], device=device)
    pads = [width - length for _, length, _ in rows]
    ids = torch.tensor([[2] * pad + row[:length] for pad, (_, length, row) in zip(pads, rows, strict=True)])
    mask = torch.tensor([[0] * pad + [1] * length for pad, (_, length, _) in zip(pads, rows, strict=True)])
    ids, mask = ids.to(device), mask.to(device)
    logits, past = [], None
    for step in range(STEPS + 1):
        if step:
            column = torch.tensor([[row[length + step - 1]] for _, length, row in rows], device=device)
            ids, mask = column, torch.cat([mask, torch.ones_like(column)], dim=1)
        meta = AdapterBatchMetadata.from_indices(adapters.repeat_interleave(ids.shape[1]))
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        extra = {} if isinstance(model, OPTForCausalLM) else {"position_ids": positions}
        out = model(
            input_ids=ids,
            attention_mask=mask,
            past_key_values=past,
            use_cache=True,
            adapter_data=AdapterBatchData(meta, arena),
            **extra,
        )
        past = out.past_key_values
        logits.append(out.logits)
    together = torch.cat(logits, dim=1)
    return [together[row, pad:] for row, pad in enumerate(pads)]


def run_sharded(group: ProcessGroup, base: str, folders: list[Path]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    model = make_model(base, CPU, group, SPREAD)
    arena = load_adapters(model, folders, CPU, group)
    rows = make_rows(base)
    return run_paged(model, arena, rows), [run_paged(model, arena, [row])[0] for row in rows]


def run_sharded_padded(group: ProcessGroup, base: str, folders: list[Path]) -> list[torch.Tensor]:
    arena = load_adapters(make_model(base, CPU, group, SPREAD), folders, CPU, group)
    tensors = checkpoint(base, make_oracle(base, SPREAD))
    model = PADDED[base](VARIANTS[base].config(), make_weights(tensors, CPU, group)).eval()
    return run_padded(model, arena, make_rows(base))


@pytest.mark.parametrize("base", slow_except(["opt-pre-norm"], PADDED))
def test_padded_batch_on_two_ranks_matches_one_rank(base: str, tmp_path: Path, ranks: RankPool) -> None:
    folders = [folder for _, folder in write_mixed(base, tmp_path)]
    rows = make_rows(base)
    model = make_model(base, CPU, spread=SPREAD)
    paged = run_paged(model, load_adapters(model, folders, CPU), rows)
    for reply in ranks.run(2, run_sharded_padded, base, folders):
        for padded, expected in zip(reply, paged, strict=True):
            assert torch.allclose(padded, expected, rtol=0, atol=1e-4)


@pytest.mark.slow  # tests/parity/test_tensor_parallel.py covers base models
@pytest.mark.parametrize("base", ["llama-attention-bias", "gpt2", "neox-parallel", "opt-pre-norm"])
def test_paged_batch_on_two_ranks_matches_one_rank(base: str, tmp_path: Path, ranks: RankPool) -> None:
    folders = [folder for _, folder in write_mixed(base, tmp_path)]
    rows = make_rows(base)
    replies = ranks.run(2, run_sharded, base, folders)
    for batched, alone in replies:
        compare(base, rows, batched, alone)
    model = make_model(base, CPU, spread=SPREAD)
    whole = run_paged(model, load_adapters(model, folders, CPU), rows)
    for cut, uncut in zip(replies[0][0], whole, strict=True):
        assert torch.equal(cut == -torch.inf, uncut == -torch.inf)
        assert torch.allclose(cut, uncut, rtol=0, atol=1e-4)
