"""Adapters with all PEFT methods in one batch, on one and two ranks, with native and reference kernels."""

from pathlib import Path

import pytest
import torch

from lorax_server.distributed import ProcessGroup
from lorax_server.errors import AdapterError
from lorax_server.kernels import reference
from tests.paged import PagedDriver
from tests.parity import variants
from tests.parity.adapters.cases import CASES
from tests.parity.adapters.served import load_adapters, make_model
from tests.parity.oracle import oracle_logits
from tests.ranks import RankPool

CPU = torch.device("cpu")
BATCHES = {
    "llama-attention-bias": ["ia3-biased", "ia3-beside-a-saved-linear", "vera-drawn", "saved-linears", "bias-all"],
    "llama-gqa": ["kasa", "saved-block", "llama-gqa-ln-tuning", "vera-head", "plain"],
    "phi3": ["phi3-ia3", "phi3-saved-linears", "phi3-kasa"],
    "gpt2": ["gpt2-ia3", "gpt2-saved-linears", "gpt2-vera"],
    "olmo2": ["olmo2-saved-head-norms", "olmo2-all-linear"],
    "qwen3moe": ["experts", "experts-alone", "experts-qwen3moe-per-expert", "experts-router", "qwen3moe-dora"],
    "cohere-head-norm": ["cohere-head-norm-saved-head-norms"],
}
LENGTHS, STEPS = (9, 1, 4), 3


def run(base: str, folders: list[Path], device: torch.device, group: ProcessGroup | None = None) -> list[torch.Tensor]:
    """Return the logits of a batch with all adapters and the base model: prefill, then decode."""
    model = make_model(base, device, group)
    arena = load_adapters(model, folders, device, group)
    driver = PagedDriver(model)
    rows = [(index, length) for length in LENGTHS for index in range(len(folders) + 1)]
    seqs = [driver.add(index, length) for index, length in rows]
    prompts = [(seq, tokens(length)) for seq, (_, length) in zip(seqs, rows, strict=True)]
    steps = [prompts, *([(seq, [40 + step]) for seq in seqs] for step in range(STEPS))]
    logits = [driver.forward(feeds, arena) for feeds in steps]
    return [torch.cat([step[row] for step in logits]).cpu() for row in range(len(rows))]


def tokens(length: int) -> list[int]:
    return list(range(7, 7 + length))


def run_sharded(group: ProcessGroup, base: str, folders: list[Path]) -> list[torch.Tensor]:
    return run(base, folders, CPU, group)


@pytest.mark.parametrize("base", BATCHES)
def test_all_methods_match_peft_in_one_batch_and_on_two_ranks(
    base: str, tmp_path: Path, device: torch.device, ranks: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / name for name in BATCHES[base]]
    for folder in folders:
        CASES[folder.name].write(folder)
    alone = run(base, folders, device)
    for index, folder in enumerate(folders, start=1):
        oracle = CASES[folder.name].oracle(folder)
        expected = oracle_logits(oracle, [*tokens(LENGTHS[0]), *range(40, 40 + STEPS)], LENGTHS[0], {})
        assert (alone[index] - expected).abs().max() < 1e-4, folder.name
    for sharded in ranks.run(2, run_sharded, base, folders):
        for ours, expected in zip(sharded, alone, strict=True):
            assert (ours - expected).abs().max() < 1e-4
    monkeypatch.setattr(variants, "ops_of", lambda _: reference)
    for ours, expected in zip(run(base, folders, device), alone, strict=True):
        assert (ours - expected).abs().max() < 1e-4


def load_kasa(group: ProcessGroup, folder: Path) -> str:
    try:
        load_adapters(make_model("llama-gqa", CPU, group), [folder], CPU, group)
    except AdapterError as error:
        return str(error)
    return ""


def test_kasa_on_replicated_heads_is_rejected(tmp_path: Path, ranks: RankPool) -> None:
    """With two key heads on four ranks, heads are replicated and products of their rows would count twice."""
    CASES["kasa"].write(tmp_path)
    for refusal in ranks.run(4, load_kasa, tmp_path):
        assert (
            "'model.layers.0.self_attn.k_proj' uses KaSA, which is not supported if tensor-parallel ranks replicate"
            in refusal
        )
