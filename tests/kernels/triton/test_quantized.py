"""Quantized matrices: the kernels decode the specified weights, and adapters apply as on unquantized weights."""

from dataclasses import replace
from itertools import cycle, product

import pytest
import torch

from lorax_server.kernels import LinearWeights, reference
from lorax_server.kernels.matrix import StoredMatrix
from lorax_server.kernels.quantized import BlockMatrix, quantize_blocks
from lorax_server.kernels.triton import quantized
from lorax_server.kernels.triton.ops import TritonOps
from tests.kernels.quantized_cases import KINDS, Kind, make_matrix
from tests.kernels.triton.cases import (
    BF16,
    DTYPES,
    FP16,
    FP32,
    MIXED_RANKS,
    Layer,
    Runs,
    check_close,
    choose_cases,
    lora_batch,
    nan_filled_memory,  # noqa: F401 - a fixture
    normal,
    targets_of,
    widened,
    widened_weights,
)
from tests.kernels.triton.interpreter import IS_INTERPRETED
from tests.kernels.triton.test_prompt_lora import activation_of

pytestmark = pytest.mark.usefixtures("nan_filled_memory")

LAYER: Layer = (64, (24, 24)) if IS_INTERPRETED else (192, (72, 72))
ADAPTER_RANKS = [[4], [0], [3, 16]] if IS_INTERPRETED else MIXED_RANKS
DECODE_RUNS: Runs = [(0, 1), (3, 2), (1, 1), (0, 2)]
PROMPT_RUNS: Runs = [(0, 20), (3, 30), (1, 16)] if IS_INTERPRETED else [(0, 90), (3, 200), (1, 70)]
FAST_CASES: list[tuple[Kind, torch.dtype]] = [
    ((4, 32, "plain"), BF16),
    ((4, 16, "offsets"), FP32),
    ((4, 64, "levels"), FP16),
    ((8, 32, "offsets"), FP16),
    ((8, 16, "plain"), BF16),
    ((8, 192, "levels"), FP32),
]
CASES = choose_cases([*FAST_CASES, *zip(KINDS, cycle(DTYPES))], list(product(KINDS, DTYPES)), fast=len(FAST_CASES))
ADAPTER_KINDS: list[Kind] = [(4, 64, "levels"), (8, 32, "plain")] if IS_INTERPRETED else KINDS
# With and without rounded activations
ADAPTER_CASES = [*((kind, False) for kind in ADAPTER_KINDS), ((8, LAYER[0], "levels"), True)]


def place(matrix: BlockMatrix, device: torch.device, dtype: torch.dtype) -> BlockMatrix:
    return replace(matrix.to(device), dtype=dtype)


@pytest.mark.parametrize(("kind", "dtype"), CASES, ids=str)
def test_decoded_matrix_matches_specification(device: torch.device, kind: Kind, dtype: torch.dtype) -> None:
    matrix = place(make_matrix(kind, rows=70), device, dtype)
    weights = TritonOps().make_linear(matrix, None)
    found, expected = weights.plain, matrix.read()
    # A GPU fuses the multiplication with the addition, and the interpreter does not round to bfloat16 but truncates.
    torch.testing.assert_close(found, expected, rtol=1e-2 if dtype == BF16 else 1e-3, atol=1e-6)
    assert weights.shape == (70, 192)
    assert isinstance(weights.weight, StoredMatrix)
    assert torch.equal(weights.weight[3:9].read(), found[3:9])


@pytest.mark.parametrize(("kind", "dtype"), CASES, ids=str)
def test_product_matches_decoded_matrix(device: torch.device, kind: Kind, dtype: torch.dtype) -> None:
    matrix = place(make_matrix(kind, rows=40), device, dtype)
    x, bias = normal(5, 192, seed=1, dtype=dtype).to(device), normal(40, seed=2, dtype=dtype).to(device)
    out = TritonOps().linear(x, TritonOps().make_linear(matrix, bias), None, ())
    expected = torch.nn.functional.linear(x.float(), matrix.read().float(), bias.float())
    check_close(out, expected.cpu(), dtype)


@pytest.mark.parametrize("rows", [0, 1, quantized.MAX_ROWS, quantized.MAX_ROWS + 1])
def test_every_number_of_rows_gives_same_product(device: torch.device, rows: int) -> None:
    matrix = place(make_matrix((4, 32, "plain"), rows=20), device, FP32)
    x = normal(rows, 400, seed=1).to(device)[:, 8:200]  # strided
    out = TritonOps().linear(x, TritonOps().make_linear(matrix, None), None, ())
    check_close(out, (x @ matrix.read().t()).cpu(), FP32)


def test_all_8_bit_floats_are_exact(device: torch.device) -> None:
    stored = torch.arange(256, dtype=torch.uint8).repeat(2, 1)
    levels = make_matrix((8, 64, "levels")).levels
    matrix = BlockMatrix(stored, torch.ones(2, 1, dtype=torch.half), None, 8, FP32, levels).to(device)
    found = TritonOps().make_linear(matrix, None).plain.cpu()
    expected = stored.view(torch.float8_e4m3fn).float()
    assert torch.equal(found.nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9))


@pytest.mark.parametrize(
    "runs", [DECODE_RUNS, pytest.param(PROMPT_RUNS, marks=pytest.mark.slow)], ids=["decode", "prompt"]
)
@pytest.mark.parametrize(("kind", "rounds_inputs"), ADAPTER_CASES, ids=str)
def test_adapters_apply_to_quantized_matrix(device: torch.device, kind: Kind, rounds_inputs: bool, runs: Runs) -> None:
    batch = lora_batch(LAYER, runs, MIXED_RANKS, device=device, dtype=BF16, output_scales=[1, 3], output_biases=[2, 3])
    targets, ops, (inputs, outputs) = targets_of(LAYER), TritonOps(), LAYER
    matrix = replace(place(make_matrix(kind, sum(outputs), inputs), device, BF16), rounds_inputs=rounds_inputs)
    weights = ops.make_linear(matrix, normal(sum(outputs), seed=8, dtype=BF16).to(device))
    x = normal(len(batch.adapter_indices), inputs, seed=1, dtype=BF16).to(device)
    wide = replace(widened_weights(weights), rounds_inputs=rounds_inputs)
    expected = reference.linear(x.float().cpu(), wide, widened(batch), targets)
    check_close(ops.linear(x, weights, batch, targets), expected, BF16)
    silu = activation_of("silu")
    expected = reference.gated_linear(x.float().cpu(), wide, silu, widened(batch), targets)
    check_close(ops.gated_linear(x, weights, silu, batch, targets), expected, BF16)


def test_embedding_rows_are_decoded(device: torch.device) -> None:
    matrix = quantize_blocks(normal(10, 64, seed=3), 4).to(device)
    ids = torch.tensor([[9, 0], [3, 3]], device=device)
    for weight in (matrix, TritonOps().make_linear(matrix, None).weight):
        assert torch.equal(TritonOps().look_up_rows(weight, ids), matrix.read()[ids])


def test_float_matrix_is_not_copied(device: torch.device) -> None:
    weight = torch.ones(4, 32, device=device)
    weights: LinearWeights = TritonOps().make_linear(weight, None)
    assert weights.weight is weight
    assert not weights.is_quantized
