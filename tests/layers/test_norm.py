import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from lorax_server.adapters.weights import ModuleWeights
from lorax_server.distributed import FakeGroup
from lorax_server.errors import WeightsError
from lorax_server.layers.norm import LayerNorm, RMSNorm
from lorax_server.layers.targets import collect_adapter_targets
from tests.builders import CPU, adapter_batch, memory_weights
from tests.lora import GivenAdapter, fill_arena

INDICES = [1, 0, 2, 2, 0, *[1] * 9, 3]


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_rms_norm_adds_residual_and_returns_sum(eps: float) -> None:
    torch.manual_seed(0)
    theirs = LlamaRMSNorm(16, eps=eps)
    theirs.weight.data = torch.randn(16)
    norm = RMSNorm("model.norm", memory_weights({"model.norm.weight": theirs.weight.data}), 16, eps)
    x, residual = torch.randn(5, 16), torch.randn(5, 16)
    normed, summed = norm(x, residual)
    torch.testing.assert_close(normed, theirs(x + residual), rtol=0, atol=1e-6)
    assert torch.equal(summed, x + residual)
    normed, summed = norm(x)
    torch.testing.assert_close(normed, theirs(x), rtol=0, atol=1e-6)
    assert torch.equal(summed, x)


@pytest.mark.parametrize("eps", [1e-5, 1e-2])
def test_layer_norm_matches_torch(eps: float) -> None:
    torch.manual_seed(0)
    theirs = torch.nn.LayerNorm(16, eps=eps)
    weight, bias, x = torch.randn(16), torch.randn(16), torch.randn(5, 16)
    theirs.weight.data, theirs.bias.data = weight, bias
    norm = LayerNorm("ln", memory_weights({"ln.weight": weight, "ln.bias": bias}), 16, eps)
    torch.testing.assert_close(norm(x), theirs(x), rtol=0, atol=1e-6)


def test_layer_norm_without_affine_loads_no_tensors() -> None:
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    out = LayerNorm("ln", memory_weights({}), 16, affine=False)(x)
    torch.testing.assert_close(out, torch.nn.LayerNorm(16, elementwise_affine=False)(x), rtol=0, atol=1e-6)


def test_norm_size_mismatch_is_rejected() -> None:
    weights = memory_weights({"ln.weight": torch.ones(8), "ln.bias": torch.ones(8)})
    for make in (RMSNorm, LayerNorm):
        with pytest.raises(WeightsError, match=r"'ln.weight' has shape \(8,\), expected \(16,\)"):
            make("ln", weights, 16)


def test_rms_norm_uses_adapter_weight_per_token() -> None:
    torch.manual_seed(0)
    weights = torch.randn(4, 16)  # the base model and three adapters, the last without norm weights
    weights[3] = weights[0]
    norm = RMSNorm("norm", memory_weights({"norm.weight": weights[0]}), 16)
    adapters = [GivenAdapter({"norm": ModuleWeights(weight=weight)}, 0) for weight in weights[1:3]]
    arena = fill_arena(collect_adapter_targets(norm), [*adapters, GivenAdapter({}, 0)], CPU, FakeGroup())
    x, residual = torch.randn(len(INDICES), 16), torch.randn(len(INDICES), 16)
    data = adapter_batch(INDICES, arena)
    normed, summed = norm(x, residual, data)
    assert torch.equal(summed, x + residual)
    plain, _ = norm(x, residual)
    torch.testing.assert_close(normed, plain / weights[0] * weights[INDICES], rtol=1e-5, atol=1e-5)
    base = torch.tensor([index in (0, 3) for index in INDICES])
    assert torch.equal(normed[base], plain[base])
    fixed = RMSNorm("norm", memory_weights({"norm.weight": weights[0]}), 16, is_adaptable=False)
    assert fixed.targets == ()
    assert torch.equal(fixed(x, residual, data)[0], plain)


def test_layer_norm_uses_adapter_weight_and_bias_per_token() -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(4, 16), torch.randn(4, 16)
    weight[2], bias[1], weight[3], bias[3] = weight[0], bias[0], weight[0], bias[0]
    norm = LayerNorm("ln", memory_weights({"ln.weight": weight[0], "ln.bias": bias[0]}), 16)
    modules = [{"ln": ModuleWeights(weight=weight[1])}, {"ln": ModuleWeights(bias=bias[2])}, {}]
    arena = fill_arena(collect_adapter_targets(norm), [GivenAdapter(given, 0) for given in modules], CPU, FakeGroup())
    x = torch.randn(len(INDICES), 16)
    expected = torch.nn.functional.layer_norm(x, (16,)) * weight[INDICES] + bias[INDICES]
    normed = norm(x, adapter_batch(INDICES, arena))
    torch.testing.assert_close(normed, expected, rtol=1e-5, atol=1e-5)
    base = torch.tensor([index in (0, 3) for index in INDICES])
    assert torch.equal(normed[base], norm(x)[base])
