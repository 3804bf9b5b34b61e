"""The Triton kernels for mixtures of experts compared with the reference."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lorax_server.kernels import (
    Activation,
    ExpertMatrices,
    ExpertWeights,
    LinearWeights,
    LoraBatch,
    QuantizedMatrix,
    Routing,
    StackedMatrices,
    quantize_blocks,
    quantize_float8,
)
from lorax_server.kernels.triton import experts as kernels
from tests.grids import slow_except
from tests.kernels.expert_cases import Mixture, Runs

MIXTURES = {
    "small": Mixture(hidden=32, inner=24, num_experts=6, top_k=3),
    "many": Mixture(hidden=48, inner=16, num_experts=20, top_k=2),
}
RANKS = [(3, 1, 9), (18, 0, 2), (0, 0, 16)]


def add_offsets(weight: torch.Tensor) -> QuantizedMatrix:
    matrix = quantize_blocks(weight, 4)
    return replace(matrix, offsets=-8 * matrix.scales.float())


def quantize_some(weight: torch.Tensor) -> torch.Tensor | QuantizedMatrix:
    """Quantize a matrix in one of two formats, or not at all, depending on its weights."""
    number = int(weight[0, 0] > 0) + int(weight[1, 0] > 0)
    return weight if number == 2 else quantize_blocks(weight, bits=4 if number else 8)


FORMATS = [
    pytest.param(partial(quantize_blocks, bits=4), id="int4"),
    pytest.param(partial(quantize_float8, block=64), id="fp8", marks=pytest.mark.slow),
    pytest.param(add_offsets, id="offsets"),
    pytest.param(quantize_some, id="mixed", marks=pytest.mark.slow),
]


def place(lora: LoraBatch, device: torch.device) -> LoraBatch:
    names = ("buffer", "table", "scales", "features", "adapter_indices")
    return replace(lora, **{name: getattr(lora, name).to(device) for name in names})


def make(mixture: Mixture, device: torch.device, dtype: torch.dtype = torch.float32) -> ExpertWeights:
    made = mixture.make(kernels, dtype)
    assert made.stacked is not None
    stacked: Any = made.stacked
    gate_up, down = (
        StackedMatrices(weight.to(device), None if bias is None else bias.to(device)) for weight, bias in stacked
    )
    return replace(made, stacked=(gate_up, down))


@pytest.mark.parametrize("name", slow_except({"small"}, MIXTURES))
@pytest.mark.parametrize("tokens", [1, 9, 21])
def test_each_token_uses_its_routed_experts(name: str, tokens: int, device: torch.device) -> None:
    mixture = MIXTURES[name]
    x, routing = mixture.inputs(tokens), mixture.route(tokens)
    out = kernels.run_experts(
        x.to(device), Routing(*(part.to(device) for part in routing)), make(mixture, device), None, ()
    )
    torch.testing.assert_close(out.cpu().double(), mixture.expected(x, routing), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", slow_except({"small"}, MIXTURES))
@pytest.mark.parametrize("in_graph", slow_except([True], [False, True]))
def test_adapters_with_different_ranks_share_a_tile(name: str, in_graph: bool, device: torch.device) -> None:
    mixture = MIXTURES[name]
    x, routing = mixture.inputs(13), mixture.route(13)
    lora = mixture.lora([(2, 1), (1, 3), (0, 2), (3, 1), (2, 4), (1, 2)], RANKS)
    batch = replace(place(lora, device), in_graph=in_graph)
    out = kernels.run_experts(
        x.to(device), Routing(*(part.to(device) for part in routing)), make(mixture, device), batch, mixture.targets
    )
    torch.testing.assert_close(out.cpu().double(), mixture.expected(x, routing, lora), rtol=1e-4, atol=1e-4)


def run(
    mixture: Mixture, lora: LoraBatch, dtype: torch.dtype, device: torch.device, *, can_use_wide_tiles: bool = False
) -> torch.Tensor:
    """Return the outputs for a batch on the CPU."""
    tokens = len(lora.adapter_indices)
    routing = Routing(*(part.to(device) for part in mixture.route(tokens)))
    made, batch = make(mixture, device, dtype), place(lora, device)
    x = mixture.inputs(tokens, dtype).to(device)
    return kernels.run_experts(x, routing, made, batch, mixture.targets, can_use_wide_tiles=can_use_wide_tiles).cpu()


MANY, FEW = Mixture(hidden=40, inner=16, num_experts=9, top_k=8), Mixture(hidden=40, inner=24, num_experts=2, top_k=1)
DECODE_CASES: dict[str, tuple[Mixture, Runs]] = {
    "one token": (MANY, [(1, 1)]),
    "adapter in separate runs": (MANY, [(2, 1), (1, 1), (0, 1), (3, 1), (2, 1)]),
    "one adapter": (FEW, [(2, 40)]),
    "different adapters": (FEW, [(1, 1), (2, 1), (3, 1), (4, 1), (0, 1), (5, 1)]),
}
DECODE_RANKS = [(64, 33, 17), (1, 16, 3), (0, 5, 0), (0, 0, 2), (8, 0, 80)]


@pytest.mark.parametrize("name", DECODE_CASES)
@pytest.mark.parametrize("in_graph", slow_except([True], [False, True]))
def test_decode_steps_use_each_adapter_at_its_rank(
    name: str, in_graph: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "DECODE_PART_INPUTS", 32)
    monkeypatch.setattr(kernels, "SHRINK_BYTES", 64)
    monkeypatch.setattr(kernels, "DECODE_BLOCK_N", 32)
    mixture, runs = DECODE_CASES[name]
    lora = replace(mixture.lora(runs, DECODE_RANKS), in_graph=in_graph)
    out, tokens = run(mixture, lora, torch.float32, device), len(lora.adapter_indices)
    expected = mixture.expected(mixture.inputs(tokens), mixture.route(tokens), lora)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close_to_float64(dtype: torch.dtype, device: torch.device) -> None:
    mixture, runs = DECODE_CASES["different adapters"]
    lora = mixture.lora(runs, DECODE_RANKS, dtype)
    out, tokens = run(mixture, lora, dtype, device), len(lora.adapter_indices)
    expected = mixture.expected(mixture.inputs(tokens, dtype), mixture.route(tokens), lora)
    assert (out.double() - expected).abs().max() < 0.03 * expected.abs().max()


def test_adapters_do_not_change_other_tokens(device: torch.device) -> None:
    mixture, tokens = FEW._replace(top_k=2), 6
    outputs = [
        run(mixture, mixture.lora([(1, 1), (other, 4), (3, 1)], DECODE_RANKS), torch.float32, device)
        for other in (0, 1, 2, 5)
    ]
    for row in (0, tokens - 1):
        assert all(torch.equal(out[row], outputs[0][row]) for out in outputs)
    assert not torch.equal(outputs[0][1:5], outputs[1][1:5])


def test_empty_batch_has_empty_output(device: torch.device) -> None:
    mixture = MIXTURES["small"]
    assert run(mixture, mixture.lora([], RANKS), torch.float32, device).shape == (0, mixture.hidden)


def test_wide_tiles_match_other_tiles(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "DECODE_TOKENS", 4)
    monkeypatch.setattr(kernels, "WIDE_TOKENS", 10)
    dtype, tolerance = (torch.float32, 1e-5) if device.type == "cpu" else (torch.bfloat16, 0.05)
    mixture = MIXTURES["small"]
    for tokens in (10, 11):
        lora = mixture.lora([(1, 5), (0, 3), (2, tokens - 8)], RANKS, dtype)
        outputs = [run(mixture, lora, dtype, device, can_use_wide_tiles=flag) for flag in (False, True)]
        torch.testing.assert_close(*outputs, rtol=tolerance, atol=tolerance)


def test_tiles_depend_on_number_of_tokens() -> None:
    sizes = {256: kernels.DECODE_TILES, 1024: kernels.SHORT_TILES, 2048: kernels.SHORT_TILES, 2049: kernels.LONG_TILES}
    for tokens, tiles in sizes.items():
        assert kernels.choose_tiles(tokens, can_use_wide_tiles=False) is tiles
        wide = kernels.choose_tiles(tokens, can_use_wide_tiles=True)
        assert wide is (kernels.WIDE_TILES if tokens > kernels.WIDE_TOKENS else tiles)


@pytest.mark.parametrize("quantize", FORMATS)
def test_quantized_experts_match_their_decoded_weights(
    quantize: Callable[[torch.Tensor], torch.Tensor | QuantizedMatrix], device: torch.device
) -> None:
    mixture = Mixture(hidden=64, inner=64, num_experts=5, top_k=2)
    matrices: Any = mixture.matrices()
    stored = [ExpertMatrices(quantize(each[0].to(device)), quantize(each[1].to(device))) for each in matrices]
    decoded = [ExpertMatrices(*(LinearWeights(part).plain for part in expert[:2])) for expert in stored]
    activation = Activation("silu", F.silu)
    x, routing, lora = mixture.inputs(13), mixture.route(13), mixture.lora([(2, 6), (0, 3), (1, 4)], RANKS)
    outputs = []
    for experts in (stored, decoded):
        made = kernels.make_experts(mixture.num_experts, iter(experts), activation)
        for gate_up, down, expert in zip(made.gate_up, made.down, decoded, strict=True):
            assert torch.equal(gate_up.plain, LinearWeights(expert.gate_up).plain)
            assert torch.equal(down.plain, LinearWeights(expert.down).plain)
        placed = Routing(*(part.to(device) for part in routing))
        outputs.append(kernels.run_experts(x.to(device), placed, made, place(lora, device), mixture.targets))
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=2e-5)


@pytest.mark.slow
def test_large_tiles_match_small_tiles(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    mixture = MIXTURES["small"]
    x, routing = mixture.inputs(30), Routing(*(part.to(device) for part in mixture.route(30)))
    lora = place(mixture.lora([(1, 20), (0, 4), (2, 6)], RANKS), device)
    arguments = (x.to(device), routing, make(mixture, device), lora, mixture.targets)
    small = kernels.run_experts(*arguments)
    monkeypatch.setattr(kernels, "DECODE_TOKENS", 4)
    torch.testing.assert_close(kernels.run_experts(*arguments), small, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("tokens", "num_experts", "top_k"), [(1, 3, 2), (40, 5, 2), (7, 8, 8)])
def test_pairs_are_stably_sorted_by_expert(
    tokens: int, num_experts: int, top_k: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "DECODE_TILES", kernels.DECODE_TILES._replace(sort_block=16))
    chosen = Mixture(0, 0, num_experts, top_k).route(tokens).experts.to(device)
    pairs = kernels.sort_pairs(chosen, num_experts)
    order = chosen.flatten().argsort(stable=True)
    assert torch.equal(pairs.order.long(), order)
    assert torch.equal(pairs.positions.long()[order], torch.arange(len(order), device=device))
    counts = torch.bincount(chosen.flatten(), minlength=num_experts)
    assert pairs.starts.tolist() == [0, *counts.cumsum(0).tolist()]
    assert sum(-(-count // pairs.tiles.height) for count in counts.tolist()) <= pairs.max_tiles
