"""The table of ops."""

import pytest
import torch

from lorax_server.kernels import LoraBatch, Ops, select_ops
from tests.kernels.triton.cases import SMALL_LAYERS, linear_weights, lora_batch, on_devices, on_gpu, targets_of

triton_ops = pytest.importorskip("lorax_server.kernels.triton.ops", reason="Triton is not installed")


def test_all_ops_are_there() -> None:
    names = {name for name in vars(Ops) if not name.startswith("_")}
    assert {name for name in names if not callable(getattr(triton_ops.TritonOps, name, None))} == set()


@on_gpu
def test_a_gpu_gets_them(device: str) -> None:
    assert isinstance(select_ops(torch.device(device)), triton_ops.TritonOps)


@on_devices
def test_no_tokens_and_no_adapters(device: str) -> None:
    layer, ops = SMALL_LAYERS[2], triton_ops.TritonOps()
    targets, weights = targets_of(layer), linear_weights(layer, torch.float32, device, bias=True)
    batch: LoraBatch = lora_batch(layer, [], [[4]], device=device, dtype=torch.float32)
    nothing = torch.zeros(0, layer[0], device=device)
    out = ops.linear(nothing, weights, batch, targets)
    ops.add_lora(out, nothing, batch, targets)
    ops.scale_and_shift(out, batch, targets)
    assert out.shape == (0, 80)
    x = torch.ones(3, layer[0], device=device)
    expected = torch.nn.functional.linear(x, weights.weight, weights.bias)
    assert torch.equal(ops.linear(x, weights, None, ()), expected)
