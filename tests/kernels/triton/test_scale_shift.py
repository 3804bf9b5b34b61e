"""Output scales and output biases as a separate op."""

import pytest
import torch

from lorax_server.kernels import reference
from lorax_server.kernels.triton.ops import TritonOps
from tests.kernels.triton.cases import (
    BF16,
    DTYPES,
    FP16,
    FP32,
    GROUPS,
    LAYERS,
    PROMPT_GROUPS,
    SMALL_LAYERS,
    Layer,
    Runs,
    check_close,
    choose_cases,
    lora_batch,
    normal,
    pairwise_cases,
    targets_of,
    widened,
)

RUNS: dict[str, Runs] = {"decode": GROUPS, "prompt": PROMPT_GROUPS}
VECTORS = [([1, 2], [2, 3]), ([1, 3], []), ([], [1, 3])]
CASES = choose_cases(
    [
        (SMALL_LAYERS[1], BF16, VECTORS[0], "decode"),
        (SMALL_LAYERS[1], FP16, VECTORS[1], "prompt"),
        (SMALL_LAYERS[2], FP32, VECTORS[2], "prompt"),
    ],
    pairwise_cases(LAYERS[::2], DTYPES, VECTORS, RUNS),
    fast=2,
)


@pytest.mark.parametrize(("layer", "dtype", "vectors", "runs"), CASES, ids=str)
def test_output_scale_is_applied_before_output_bias(
    device: torch.device, layer: Layer, dtype: torch.dtype, vectors: tuple[list[int], list[int]], runs: str
) -> None:
    output_scales, output_biases = vectors
    batch = lora_batch(
        layer,
        RUNS[runs],
        [[0]] * 5,
        device=device,
        dtype=dtype,
        output_scales=output_scales,
        output_biases=output_biases,
    )
    width, targets = sum(layer[1]), targets_of(layer)
    out = normal(len(batch.adapter_indices), width + 8, seed=1, dtype=dtype).to(device)
    before, expected = out.clone(), out[:, :width].float().cpu()
    TritonOps().scale_and_shift(out, batch, targets)
    reference.scale_and_shift(expected, widened(batch), targets)
    check_close(out[:, :width], expected, dtype)
    assert torch.equal(out[:, width:], before[:, width:])
    is_same = [index not in (*output_scales, *output_biases) for index in batch.adapter_indices.tolist()]
    assert torch.equal(out[is_same], before[is_same])
