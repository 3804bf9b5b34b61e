"""The mixture of experts on the CPU, native and reference, compared with float64."""

from typing import Any

import pytest
import torch

from lorax_server.kernels import (
    ExpertMatrices,
    LoraBatch,
    QuantizedMatrix,
    Routing,
    quantize_blocks,
    reference,
    select_ops,
)
from lorax_server.kernels.cpu.ops import CpuOps
from tests.kernels.expert_cases import Mixture, Runs

CPU = torch.device("cpu")
MIXTURES = {
    "small": Mixture(hidden=32, inner=24, num_experts=6, top_k=3),
    "one of many": Mixture(hidden=40, inner=64, num_experts=17, top_k=1),
    "all": Mixture(hidden=16, inner=7, num_experts=4, top_k=4),
}
RUNS: Runs = [(1, 3), (0, 2), (2, 1), (1, 4), (3, 2)]
RANKS = [(3, 1, 9), (8, 0, 2), (0, 0, 16)]


@pytest.fixture(params=["native", "reference"])
def ops(request: pytest.FixtureRequest) -> Any:
    return select_ops(CPU) if request.param == "native" else reference


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("activation", ["silu", "relu"])
def test_each_token_uses_its_routed_experts(ops: Any, name: str, activation: str) -> None:
    mixture = MIXTURES[name]
    x, routing = mixture.inputs(12), mixture.route(12)
    out = ops.run_experts(x, routing, mixture.make(ops, activation=activation), None, ())
    torch.testing.assert_close(out.double(), mixture.expected(x, routing, activation=activation), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", MIXTURES)
def test_each_token_uses_its_adapter_and_rank(ops: Any, name: str) -> None:
    mixture = MIXTURES[name]
    x, routing, lora = mixture.inputs(12), mixture.route(12), mixture.lora(RUNS, RANKS)
    out = ops.run_experts(x, routing, mixture.make(ops), lora, mixture.targets)
    torch.testing.assert_close(out.double(), mixture.expected(x, routing, lora), rtol=1e-4, atol=1e-4)
    base = ops.run_experts(x, routing, mixture.make(ops), None, ())
    changed = (out != base).any(1)
    assert torch.equal(changed, lora.adapter_indices > 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_expert_outputs_are_batch_invariant(dtype: torch.dtype) -> None:
    ops, mixture = select_ops(CPU), MIXTURES["small"]
    experts, x, routing = mixture.make(ops, dtype), mixture.inputs(40, dtype), mixture.route(40)
    lora = mixture.lora([(1, 20), (0, 5), (2, 15)], RANKS, dtype)
    together = ops.run_experts(x, routing, experts, lora, mixture.targets)
    for first, last in ((0, 1), (17, 30), (39, 40)):
        part = Routing(routing.experts[first:last], routing.weights[first:last])
        adapters = lora.adapter_indices[first:last].unique_consecutive(return_counts=True)
        runs = list(zip(*(column.tolist() for column in adapters), strict=True))
        alone: LoraBatch = mixture.lora(runs, RANKS, dtype)
        assert torch.equal(ops.run_experts(x[first:last], part, experts, alone, mixture.targets), together[first:last])


def test_half_precision_is_summed_in_float32() -> None:
    ops, mixture = select_ops(CPU), MIXTURES["small"]
    x, routing = mixture.inputs(9, torch.bfloat16), mixture.route(9)
    out = ops.run_experts(x, routing, mixture.make(ops, torch.bfloat16), None, ())
    expected = mixture.expected(x, routing)
    assert (out.double() - expected).abs().max() < 0.02 * expected.abs().max()


def test_quantized_experts_match_dequantized_experts() -> None:
    ops, mixture = select_ops(CPU), MIXTURES["one of many"]._replace(hidden=64)
    plain = mixture.matrices()
    quantized = [ExpertMatrices(_quantize(expert.gate_up), _quantize(expert.down)) for expert in plain]
    activation = mixture.make(reference).activation
    x, routing = mixture.inputs(5), mixture.route(5)
    expected = reference.run_experts(x, routing, reference.make_experts(17, quantized, activation), None, ())
    out = ops.run_experts(x, routing, ops.make_experts(17, quantized, activation), None, ())
    assert (out - expected).abs().max() < 0.03 * expected.abs().max()


def test_empty_batch_has_empty_output(ops: Any) -> None:
    mixture = MIXTURES["small"]
    assert ops.run_experts(mixture.inputs(0), mixture.route(0), mixture.make(ops), None, ()).shape == (0, 32)


def test_experts_are_loaded_one_at_a_time() -> None:
    """The next expert is read after the last one is stored, so that two copies of all experts never exist."""
    mixture, read = MIXTURES["small"], []
    ops = select_ops(CPU)
    assert isinstance(ops, CpuOps)

    def load() -> Any:
        for index, matrices in enumerate(mixture.matrices()):
            read.append(index)
            yield matrices

    ops.make_experts(mixture.num_experts, load(), mixture.make(ops).activation)
    assert read == list(range(mixture.num_experts))


def _quantize(matrix: torch.Tensor | QuantizedMatrix) -> QuantizedMatrix:
    assert isinstance(matrix, torch.Tensor)
    return quantize_blocks(matrix, 8, 32)
