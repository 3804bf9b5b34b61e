"""Tests for `TritonOps` as a whole."""

import pytest
import torch

from lorax_server.kernels import LoraBatch, Ops, select_ops
from lorax_server.kernels.triton.ops import TritonOps
from tests.kernels.triton.cases import SMALL_LAYERS, linear_weights, lora_batch, targets_of


def test_triton_ops_implement_all_ops() -> None:
    names = {name for name in vars(Ops) if not name.startswith("_")}
    assert {name for name in names if not hasattr(TritonOps, name)} == set()


@pytest.mark.gpu
def test_gpu_selects_triton_ops(device: torch.device) -> None:
    assert isinstance(select_ops(device), TritonOps)


def test_ops_support_empty_batch_and_batch_without_adapters(device: torch.device) -> None:
    layer, ops = SMALL_LAYERS[2], TritonOps()
    targets, weights = targets_of(layer), linear_weights(layer, torch.float32, device, bias=True)
    batch: LoraBatch = lora_batch(layer, [], [[4]], device=device, dtype=torch.float32)
    nothing = torch.zeros(0, layer[0], device=device)
    out = ops.linear(nothing, weights, batch, targets)
    ops.add_lora(out, nothing, batch, targets)
    ops.scale_and_shift(out, batch, targets)
    assert out.shape == (0, 80)
    x = torch.ones(3, layer[0], device=device)
    expected = torch.nn.functional.linear(x, weights.plain, weights.bias)
    assert torch.equal(ops.linear(x, weights, None, ()), expected)
