"""Factors and shifts on their own."""

import pytest
import torch

from lorax_server.kernels import reference
from lorax_server.kernels.triton.ops import TritonOps
from tests.kernels.triton.cases import (
    DTYPES,
    GROUPS,
    LAYERS,
    Layer,
    Runs,
    check_close,
    lora_batch,
    normal,
    targets_of,
    widened,
)


@pytest.mark.parametrize(("layer", "dtype"), list(zip(LAYERS, DTYPES * 3, strict=False)), ids=str)
@pytest.mark.parametrize(("factors", "shifts"), [([1, 3], []), ([], [1, 3]), ([1, 2], [2, 3])])
@pytest.mark.parametrize("runs", [GROUPS, [(1, 130), (4, 20), (3, 140)]], ids=["decode", "prompt"])
def test_outputs_are_multiplied_and_then_shifted(
    device: torch.device, layer: Layer, dtype: torch.dtype, factors: list[int], shifts: list[int], runs: Runs
) -> None:
    batch = lora_batch(layer, runs, [[0]] * 5, device=device, dtype=dtype, factors=factors, shifts=shifts)
    width, targets = sum(layer[1]), targets_of(layer)
    out = normal(len(batch.adapter_indices), width + 8, seed=1, dtype=dtype).to(device)
    before, expected = out.clone(), out[:, :width].float().cpu()
    TritonOps().scale_and_shift(out, batch, targets)
    reference.scale_and_shift(expected, widened(batch), targets)
    check_close(out[:, :width], expected, dtype)
    assert torch.equal(out[:, width:], before[:, width:])
    is_same = [index not in (*factors, *shifts) for index in batch.adapter_indices.tolist()]
    assert torch.equal(out[is_same], before[is_same])
