"""Two and four CPU processes match a single process, with and without adapters, for every variant."""

import re
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from lorax_server.distributed import FakeGroup, ProcessGroup
from lorax_server.errors import ConfigError
from lorax_server.layers.targets import collect_adapter_targets
from lorax_server.models.custom_modeling.neox_modeling import GPTNeoxForCausalLM
from lorax_server.models.custom_modeling.opt_modeling import OPTForCausalLM
from lorax_server.models.registry import build_model
from tests.grids import slow_except
from tests.lora import make_arena, random_factors
from tests.paged import PagedDriver
from tests.parity.variants import TOLERANCE, VARIANTS, checkpoint, make_oracle, make_weights
from tests.ranks import GROUP_SIZES, RankPool

CPU = torch.device("cpu")
ROWS = [[5, 9, 33, 60, 7, 7, 81, 12, 3, 44, 90, 96], [96, 4], [17, 23, 55, 61, 8]]
ADAPTERS = [2, 0, 1]
PADDED = ("neox-parallel", "neox-sequential", "opt-pre-norm", "opt-350m-like")


def run_paged(group: ProcessGroup, name: str, stored_tensors: bytes) -> torch.Tensor:
    """Run a batch of two adapters and the base model: one prefill and three steps of decode."""
    model = build_model(VARIANTS[name].config(), make_weights(load(stored_tensors), CPU, group))
    targets = collect_adapter_targets(model)
    adapters = [(random_factors(targets, 2, 0), 0.5), (random_factors(targets, 5, 1), 0.2)]
    arena = make_arena(targets, adapters, CPU)
    driver = PagedDriver(model)
    seqs = [driver.add(adapter, len(row)) for adapter, row in zip(ADAPTERS, ROWS, strict=True)]
    logits = driver.forward(list(zip(seqs, ROWS, strict=True)), arena)
    for token in (11, 12, 13):
        logits += driver.forward([(seq, [token]) for seq in seqs], arena)
    return torch.cat(logits)


@torch.no_grad()
def run_padded(group: ProcessGroup, name: str, stored_tensors: bytes) -> torch.Tensor:
    config = VARIANTS[name].config()
    weights = make_weights(load(stored_tensors), CPU, group)
    model: Any = {"gpt_neox": GPTNeoxForCausalLM, "opt": OPTForCausalLM}[config.model_type](config, weights)
    ids = torch.tensor([ROWS[0], ROWS[0][::-1]])
    mask = torch.linspace(0.1, 1.0, 12).view(3, 4)
    first = model(input_ids=ids, head_mask=mask, use_cache=True)
    second = model(input_ids=ids[:, :2], head_mask=mask, past_key_values=first.past_key_values)
    return torch.cat([first.logits, second.logits], 1)


def tolerance(logits: torch.Tensor) -> torch.Tensor:
    """Return 1e-5 of the largest logit: an adapter makes some logits large."""
    return 1e-5 * logits.abs().max().clamp(min=1)


@pytest.fixture(scope="module")
def stored_tensors(name: str) -> bytes:
    """Save the variant's tensors once, because ranks read them faster than they create them."""
    return save(checkpoint(name, make_oracle(name)))


@pytest.fixture(scope="module")
def single_rank_logits(name: str, stored_tensors: bytes) -> torch.Tensor:
    return run_paged(FakeGroup(), name, stored_tensors)


# One variant for each way to divide matrices over ranks.
QUICK = ("llama-gqa", "gpt2", "neox-parallel", "opt-pre-norm", "falcon", "bloom", "phi3", "gemma2", "deepseek2")


@pytest.mark.parametrize("size", slow_except(GROUP_SIZES[:1], GROUP_SIZES))
@pytest.mark.parametrize("name", slow_except(QUICK, VARIANTS), scope="module")
def test_sharded_paged_model_matches_one_rank(
    name: str, size: int, stored_tensors: bytes, single_rank_logits: torch.Tensor, ranks: RankPool
) -> None:
    for logits in ranks.run(size, run_paged, name, stored_tensors):
        assert logits.shape == single_rank_logits.shape
        assert (logits - single_rank_logits).abs().max() < (
            TOLERANCE[name] if "fp8" in name else tolerance(single_rank_logits)
        )


@pytest.mark.parametrize("size", slow_except(GROUP_SIZES[-1:], GROUP_SIZES))
@pytest.mark.parametrize("name", slow_except(QUICK, PADDED), scope="module")
def test_sharded_padded_model_matches_one_rank(name: str, size: int, stored_tensors: bytes, ranks: RankPool) -> None:
    single_rank_logits = run_padded(FakeGroup(), name, stored_tensors)
    for logits in ranks.run(size, run_padded, name, stored_tensors):
        assert (logits - single_rank_logits).abs().max() < tolerance(single_rank_logits)


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("llama-gqa", 3, "num_attention_heads = 4 is not divisible by 3 tensor-parallel ranks"),
        ("llama-mqa", 8, "num_attention_heads = 4 is not divisible by 8 tensor-parallel ranks"),
        ("gpt2", 3, "num_attention_heads = 4 is not divisible by 3 tensor-parallel ranks"),
        ("neox-parallel", 8, "num_attention_heads = 4 is not divisible by 8 tensor-parallel ranks"),
        ("deepseek3", 3, "num_attention_heads = 4 is not divisible by 3 tensor-parallel ranks"),
        ("opt-pre-norm", 3, "num_attention_heads = 4 is not divisible by 3 tensor-parallel ranks"),
    ],
)
def test_indivisible_heads_are_rejected(name: str, size: int, message: str) -> None:
    weights = make_weights(checkpoint(name, make_oracle(name)), CPU, FakeGroup(0, size))
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_model(VARIANTS[name].config(), weights)
