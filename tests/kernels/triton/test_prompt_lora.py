"""LoRA for prompts: linear layers and gated activations."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from lorax_server.kernels import Activation, LoraBatch, reference
from lorax_server.kernels.triton import lora_tiles, prompt_lora
from lorax_server.kernels.triton.ops import TritonOps
from tests.kernels.triton.cases import (
    BF16,
    DTYPES,
    FP16,
    FP32,
    LARGE_LAYERS,
    LAYERS,
    MIXED_RANKS,
    PROMPT_GROUPS,
    RANKS,
    SMALL_LAYERS,
    SOME_RANKS,
    Layer,
    Runs,
    bits,
    check_close,
    choose_cases,
    expected_linear,
    inputs_of,
    linear_weights,
    lora_batch,
    nan_filled_memory,  # noqa: F401 - a fixture
    normal,
    pairwise_cases,
    targets_of,
    widened,
    widened_weights,
)
from tests.kernels.triton.interpreter import IS_INTERPRETED

pytestmark = [
    pytest.mark.usefixtures("nan_filled_memory"),
    pytest.mark.filterwarnings(
        "ignore:(overflow|invalid value) encountered:RuntimeWarning"
    ),  # NumPy warning in the sigmoid
]

RUNS: dict[str, Runs] = {
    "groups": PROMPT_GROUPS,
    "one": [(3, 42 if IS_INTERPRETED else 258)],
    "base": [(0, 300)],
    "5000": [(adapter, 35 + adapter) for adapter in range(6)] * 20 + [(1, 500), (0, 100)],
}
KERNEL_ACTIVATIONS = ["silu", "gelu", "gelu_tanh", "relu"]
CASES = choose_cases(
    [(SMALL_LAYERS[1], FP32, "24", "one"), (SMALL_LAYERS[0], BF16, "mixed", "groups")],
    [
        *pairwise_cases(SMALL_LAYERS, DTYPES, SOME_RANKS, RUNS),
        *pairwise_cases(LARGE_LAYERS, [BF16], ["16", "wide mix"], ["groups", "5000"]),
    ],
    fast=1,
)
GATED_CASES = choose_cases(
    [
        (SMALL_LAYERS[2], FP16, "8", "one", "gelu"),
        (SMALL_LAYERS[2], BF16, "mixed", "groups", "silu"),
        (SMALL_LAYERS[2], FP32, "1", "one", "gelu_tanh"),
    ],
    [
        *pairwise_cases(SMALL_LAYERS[2:], DTYPES, ["16", "mixed", "512"], RUNS, KERNEL_ACTIVATIONS),
        *pairwise_cases(LARGE_LAYERS[2:], [BF16], ["mixed"], ["groups", "5000"], ["silu"]),
    ],
    fast=1,
)
VECTOR_CASES = choose_cases(
    [(SMALL_LAYERS[1], BF16, False), (SMALL_LAYERS[0], FP16, True)],
    list(zip(LAYERS, DTYPES * 3, [False, True] * 4, strict=False)),
    fast=1,
)

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def activation_of(name: str) -> Activation:
    return Activation(name, ACTIVATIONS[name])


def treat_as_long_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the interpreter's small prompts as long prompts."""
    monkeypatch.setattr(prompt_lora, "SHORT_PROMPT_TOKENS", 10)


def check_linear(layer: Layer, batch: LoraBatch, *, bias: bool) -> None:
    dtype = batch.buffer.dtype
    weights, x = linear_weights(layer, dtype, batch.buffer.device, bias=bias), inputs_of(layer, batch)
    out = TritonOps().linear(x, weights, batch, targets_of(layer))
    check_close(out, expected_linear(x, layer, batch, bias=bias), dtype)


@pytest.mark.parametrize(("layer", "dtype", "ranks", "runs"), CASES, ids=str)
def test_linear_applies_adapter_of_each_token(
    device: torch.device, layer: Layer, dtype: torch.dtype, ranks: str, runs: str
) -> None:
    check_linear(layer, lora_batch(layer, RUNS[runs], RANKS[ranks], device=device, dtype=dtype), bias=False)


@pytest.mark.slow
@pytest.mark.parametrize(("layer", "dtype", "is_long"), VECTOR_CASES, ids=str)
def test_linear_applies_output_scales_and_biases(
    device: torch.device, layer: Layer, dtype: torch.dtype, is_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_long:
        treat_as_long_prompts(monkeypatch)
    batch = lora_batch(
        layer, RUNS["groups"], MIXED_RANKS, device=device, dtype=dtype, output_scales=[1, 2, 3], output_biases=[2, 3, 4]
    )
    check_linear(layer, batch, bias=True)


@pytest.mark.slow
def test_padded_lm_head_matches_reference(device: torch.device) -> None:
    layer = SMALL_LAYERS[1]
    batch, width = lora_batch(layer, RUNS["groups"], MIXED_RANKS, device=device, dtype=BF16), sum(layer[1])
    x, ops, targets = inputs_of(layer, batch), TritonOps(), targets_of(layer)
    weights = linear_weights(layer, BF16, device, bias=False, padding=8)
    out = ops.linear(x, weights, batch, targets)
    expected = reference.linear(x.float().cpu(), widened_weights(weights), widened(batch), targets)
    check_close(out, expected, BF16)
    added = normal(len(x), width + 8, seed=3, dtype=BF16).to(device)
    before, expected = added.clone(), added.float().cpu()
    ops.add_lora(added, x, batch, targets)
    reference.add_lora(expected, x.float().cpu(), widened(batch), targets)
    check_close(added, expected, BF16)
    is_base = batch.adapter_indices == 0
    assert torch.equal(added[is_base], before[is_base])


def check_gated(layer: Layer, batch: LoraBatch, name: str) -> None:
    dtype, targets, activation = batch.buffer.dtype, targets_of(layer), activation_of(name)
    x, weights = inputs_of(layer, batch), linear_weights(layer, dtype, batch.buffer.device, bias=True)
    out = TritonOps().gated_linear(x, weights, activation, batch, targets)
    wide = widened_weights(weights)
    check_close(out, reference.gated_linear(x.float().cpu(), wide, activation, widened(batch), targets), dtype)


@pytest.mark.parametrize(("layer", "dtype", "ranks", "runs", "name"), GATED_CASES, ids=str)
def test_gate_applies_adapter_of_each_token(
    device: torch.device, layer: Layer, dtype: torch.dtype, ranks: str, runs: str, name: str
) -> None:
    batch = lora_batch(
        layer, RUNS[runs], RANKS[ranks], device=device, dtype=dtype, output_scales=[1, 3], output_biases=[3, 4]
    )
    check_gated(layer, batch, name)


@pytest.mark.parametrize("ranks", choose_cases(["none", "mixed"], ["none", "mixed"], fast=1))
def test_gated_prompt_lora_matches_reference(device: torch.device, ranks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    treat_as_long_prompts(monkeypatch)
    layer, of_adapters = SMALL_LAYERS[2], MIXED_RANKS if ranks == "mixed" else [[0]] * 5
    check_gated(
        layer, lora_batch(layer, RUNS["groups"], of_adapters, device=device, dtype=BF16, output_scales=[1, 3]), "relu"
    )


@pytest.mark.parametrize("name", choose_cases(["quick_gelu", "relu"], list(ACTIVATIONS), fast=1))
@pytest.mark.parametrize(
    "runs", [[(0, 3), (1, 2)], [(0, 40 if IS_INTERPRETED else 270), (1, 2)]], ids=["decode", "prompt"]
)
def test_gates_without_fused_kernel_match_reference(device: torch.device, name: str, runs: Runs) -> None:
    """Check decode steps, unsupported activations, and gate and up as one target."""
    for layer in ((16, (24, 24)), (16, (48,))):
        check_gated(layer, lora_batch(layer, runs, MIXED_RANKS, device=device, dtype=FP32), name)


def find_tile_addresses(batch: LoraBatch) -> dict[object, int]:
    """Return the addresses of the prompt tiles."""
    return {key: tile.data_ptr() for key, tile in batch.derived.items() if lora_tiles.PROMPT_TILES in str(key)}


@pytest.mark.slow
@pytest.mark.parametrize("layer", choose_cases(SMALL_LAYERS[2:3], LAYERS), ids=str)
def test_graph_batch_adapters_are_refreshed_in_place(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, layer: Layer
) -> None:
    monkeypatch.setattr(lora_tiles, "GRAPH_SEGMENTS", 3 if IS_INTERPRETED else 8)
    ranks = MIXED_RANKS
    if IS_INTERPRETED:  # the interpreter also runs empty programs
        ranks = [[16, 0, 5], [0], [3, 16, 1], [9], [8]]
        monkeypatch.setattr("lorax_server.kernels.ops.GRAPH_RANK", 16)
    ops, targets, weights = TritonOps(), targets_of(layer), linear_weights(layer, BF16, device, bias=True)
    made = lora_batch(layer, PROMPT_GROUPS, ranks, device=device, dtype=BF16, output_scales=[2, 3], output_biases=[2])
    num_tokens, activation = len(made.adapter_indices), activation_of("silu")
    batch = replace(made, host_table=torch.zeros(0), bounds=[], adapters=[], in_graph=True, derived={})
    x = inputs_of(layer, batch)
    ops.linear(x, weights, batch, targets)
    places = find_tile_addresses(batch)
    assert places
    for runs in ([(4, num_tokens - 1), (2, 1)], [(0, num_tokens)], [(1, 3), (0, 5), (3, num_tokens - 8)]):
        indices = torch.tensor([adapter for adapter, count in runs for _ in range(count)], dtype=torch.int32)
        batch.adapter_indices.copy_(indices)
        bounds = [0, *itertools.accumulate(count for _, count in runs)]
        current = replace(made, bounds=bounds, adapters=[adapter for adapter, _ in runs], derived={})
        ops.refresh_lora_plan(batch, current)
        result = ops.linear(x, weights, batch, targets)
        check_close(result, expected_linear(x, layer, current, bias=True), BF16)
        if not current.has_low_rank(targets):
            continue  # without adapters, the bias is added inside the product
        assert torch.equal(result, ops.linear(x, weights, current, targets))
        if len(targets) == 2:
            gated = [ops.gated_linear(x, weights, activation, each, targets) for each in (batch, current)]
            assert torch.equal(*gated)
    assert places == find_tile_addresses(batch)


@pytest.mark.slow
def test_nan_tokens_and_adapters_do_not_affect_other_tokens(device: torch.device) -> None:
    layer = SMALL_LAYERS[2]
    more = 1 if IS_INTERPRETED else 130  # large enough for the prompt kernels
    runs: Runs = [(1, 9), (3, 20), (0, 5), (4, 6), (3, more), (1, more)]
    batch = lora_batch(layer, runs, [[16, 0], [0], [24, 8], [17], [8]], device=device, dtype=BF16)
    weights, ops, targets = linear_weights(layer, BF16, device, bias=False), TritonOps(), targets_of(layer)
    x = inputs_of(layer, batch)

    def run() -> list[torch.Tensor]:
        gated = ops.gated_linear(x, weights, activation_of("silu"), batch, targets)
        return [ops.linear(x, weights, batch, targets), gated]

    clean = run()
    x[7] = math.nan  # a token
    broken = batch.host_table[4, targets[0].index]  # an adapter
    batch.buffer[broken[0] : broken[0] + layer[0]] = math.nan
    others = [row for row in range(len(x)) if row != 7 and not 34 <= row < 40]
    for result, before in zip(run(), clean, strict=True):
        assert torch.equal(bits(result[others]), bits(before[others]))
        assert result[7].isnan().all()
        assert result[34:40, :40].isnan().all()
