"""Linear layers whose quantized matrix stores its inputs in another order."""

from dataclasses import replace
from typing import cast

import pytest
import torch
import torch.nn.functional as F

from lorax_server.kernels import Activation, BlockMatrix, LoraBatch, Ops, UnrecordableError, quantize_blocks, reference
from lorax_server.kernels.cpu.graph import BufferPool
from lorax_server.kernels.cpu.ops import CpuOps
from lorax_server.layers.linear import AdapterLinear
from tests.kernels.batches import Adapter, LinearCase, draw_adapters, error
from tests.kernels.quantized_cases import reorder

INPUTS, WIDTHS = 96, (64, 64)
ADAPTERS = [Adapter([4, 0]), Adapter([0, 9], vectors=True), Adapter([16, 3], vectors=True)]
ROUNDING = {"reference": 2e-6, "cpu": 0.02}  # the CPU kernels round activations to 8 bits
OPS = {"reference": cast(Ops, reference), "cpu": CpuOps()}
ACTIVATIONS = {
    "silu": Activation("silu", F.silu),
    "scaled up": Activation("scaled_up", F.silu, lambda up: up * 2),
}


def make_case(name: str) -> tuple[LinearCase, AdapterLinear]:
    """Return a layer, and a case with the same weights."""
    world = LinearCase(INPUTS, WIDTHS, ADAPTERS, dtype=torch.float32, bias=True, device="cpu")
    matrix = reorder(quantize_blocks(world.weights.plain, 4))
    layer = AdapterLinear()
    layer.set_weights(OPS[name], matrix, world.weights.bias)
    world.weights = replace(world.weights, weight=matrix.read())
    return world, layer


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("rows", [0, 1, 7, 40])
def test_adapters_see_inputs_in_original_order(name: str, rows: int) -> None:
    world, layer = make_case(name)
    x, indices = world.normal(rows, INPUTS), draw_adapters(rows, len(ADAPTERS), rows)
    batches: list[tuple[LoraBatch | None, list[int]]] = [(world.batch(indices), indices), (None, [0] * rows)]
    for batch, adapters in batches if rows else batches[1:]:
        expected, targets = world.expected(x, adapters), world.targets if batch else ()
        got = layer.multiply(x, batch, targets)
        assert got.shape == expected.shape
        assert not rows or error(got, expected) < ROUNDING[name]
        for activation in ACTIVATIONS.values():
            gated = activation.apply_gate(*expected.chunk(2, dim=1))
            got = layer.multiply_gated(x, activation, batch, targets)
            assert got.shape == gated.shape
            assert not rows or error(got, gated) < 2 * ROUNDING[name]


@pytest.mark.parametrize("name", OPS)
def test_weight_is_read_in_original_order(name: str) -> None:
    world, layer = make_case(name)
    assert isinstance(layer.linear.weight, BlockMatrix) == (name == "reference")
    part = layer.weight[5:70]
    assert not isinstance(part, torch.Tensor)
    assert torch.equal(part.read(), world.weights.plain[5:70])


def test_cpu_graph_replays_product_without_adapters() -> None:
    """Adapters read their segments on the host, so they run without a graph."""
    world, layer = make_case("cpu")
    x, ops = world.normal(3, INPUTS), CpuOps()
    layer.ops = ops
    with torch.inference_mode():
        graph = ops.record(
            lambda: layer.multiply_gated(x, ACTIVATIONS["silu"], None, ()) + layer.multiply(x, None, ())[:, :64],
            3,
            BufferPool(3),
        )
        x.copy_(world.normal(3, INPUTS))
        graph.replay()
        expected = layer.multiply_gated(x, ACTIVATIONS["silu"], None, ()) + layer.multiply(x, None, ())[:, :64]
        assert torch.equal(graph.output, expected)
        batch = replace(world.batch([1, 2, 3]), in_graph=True, bounds=[], adapters=[])
        with pytest.raises(UnrecordableError, match="add_lora"):
            ops.record(lambda: layer.multiply(x, batch, world.targets), 3, BufferPool(3))
