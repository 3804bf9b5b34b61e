"""Adapters on every linear and on the head of every architecture, many in one batch."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lorax_server.adapters.target import TargetKind
from lorax_server.layers.targets import collect_adapter_targets
from lorax_server.models.registry import build_model
from tests.grids import slow_except
from tests.lora import make_arena, merged, random_factors
from tests.paged import PagedDriver
from tests.parity.oracle import oracle_logits
from tests.parity.other_variants import OTHER_VARIANTS
from tests.parity.variants import VARIANTS, checkpoint, make_oracle, make_weights

NAMES = [
    "llama-gqa",
    "llama-tied-head",
    "llama-attention-bias",
    "mistral-window",
    "qwen2-bias",
    "qwen3-head-norm",
    "gpt2",
    "neox-parallel",
    "opt-pre-norm",
    "opt-projection",
    *(name for name in OTHER_VARIANTS if "-" not in name),
]
QUICK = ("llama-gqa", "llama-attention-bias", "gpt2", "neox-parallel", "opt-projection", "falcon", "phi3", "gemma2")
RANKS = (1, 3, 16)


@pytest.mark.parametrize("name", slow_except(QUICK, NAMES))
def test_batch_of_adapters_equals_merged_models(name: str, device: torch.device) -> None:
    oracle = make_oracle(name).to(device)
    tensors = checkpoint(name, oracle)
    model = build_model(VARIANTS[name].config(), make_weights(tensors, device))
    targets = collect_adapter_targets(model)
    adapters = [(random_factors(targets, rank, seed=rank), 2.0 / rank) for rank in RANKS]
    one = next(iter(adapters[0][0]))
    adapters.append(({one: adapters[0][0][one]}, 0.5))  # a single target
    arena = make_arena(targets, adapters, device)
    oracles = [oracle, *(merged(oracle, factors, scale) for factors, scale in adapters)]

    # Long and short prompts with adapters and the base model, then decode.
    indices, lengths = [1, 0, 3, 2, 2, 4, 1], [11, 4, 2, 1, 9, 5, 3]
    rows = [torch.randint(3, 97, (length + 4,)).tolist() for length in lengths]
    driver = PagedDriver(model)
    seqs = [driver.add(adapter, length) for adapter, length in zip(indices, lengths, strict=True)]
    got = [[x] for x in driver.forward([(s, r[:n]) for s, r, n in zip(seqs, rows, lengths, strict=True)], arena)]
    for step in range(4):
        feeds = [(seq, [row[length + step]]) for seq, row, length in zip(seqs, rows, lengths, strict=True)]
        for pieces, logits in zip(got, driver.forward(feeds, arena), strict=True):
            pieces.append(logits)
    for index, row, length, pieces in zip(indices, rows, lengths, got, strict=True):
        expected = oracle_logits(oracles[index], row, length, tensors)
        assert (torch.cat(pieces) - expected).abs().max() < 1e-4, f"adapter {index}"
    # The adapters must have an effect, otherwise the comparison is meaningless.
    differ = [oracle_logits(o, rows[0], lengths[0], tensors)[-1] for o in oracles]
    assert all((a - differ[0]).abs().max() > 0.1 for a in differ[1:])


@pytest.mark.parametrize("name", slow_except(QUICK, NAMES))
def test_every_weight_matrix_is_a_lora_target(name: str) -> None:
    """Every linear layer that PEFT can train is an adapter target."""
    oracle = make_oracle(name)
    model = build_model(VARIANTS[name].config(), make_weights(checkpoint(name, oracle), torch.device("cpu")))
    linears = {
        n for n, m in oracle.named_modules() if isinstance(m, nn.Linear | Conv1D) or "Router" in type(m).__name__
    }
    targets = collect_adapter_targets(model)
    assert {name for name, target in targets.items() if target.kind in (TargetKind.LINEAR, TargetKind.HEAD)} == linears
    embeddings = [target.name for target in targets.values() if target.kind is TargetKind.EMBEDDING]
    assert [oracle.get_submodule(name) for name in embeddings] == [oracle.get_input_embeddings()]
    norms = {n for n, m in oracle.named_modules() if "norm" in type(m).__name__.lower()}
    assert {target.name for target in targets.values() if target.kind is TargetKind.NORM} == norms


def test_selected_lm_head_rows_use_their_adapter(device: torch.device) -> None:
    """`lm_head_indices` selects rows from the batch. The head uses each row's adapter."""
    oracle = make_oracle("llama-gqa").to(device)
    model = build_model(VARIANTS["llama-gqa"].config(), make_weights(checkpoint("llama-gqa", oracle), device))
    targets = collect_adapter_targets(model)
    head = {"lm_head": targets["lm_head"]}
    arena = make_arena(targets, [(random_factors(head, 4, 0), 1.0), (random_factors(head, 2, 1), 2.0)], device)
    driver = PagedDriver(model)
    feeds = [(driver.add(1), [5, 6, 7]), (driver.add(0), [8, 9]), (driver.add(2), [10, 11, 12, 13])]
    inputs = driver.inputs(feeds, arena)
    rows = torch.tensor([8, 2, 3, 4], device=device)
    with torch.no_grad():
        everything = model(**inputs)[0]
        assert torch.allclose(model(**inputs, lm_head_indices=rows)[0], everything[rows], atol=1e-5)
