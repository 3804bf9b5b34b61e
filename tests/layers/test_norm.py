import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from lorax_server.errors import WeightsError
from lorax_server.layers.norm import LayerNorm, RMSNorm
from tests.builders import memory_weights


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_rms_norm_adds_the_residual_and_returns_the_sum(eps: float) -> None:
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
def test_layer_norm_is_torchs(eps: float) -> None:
    torch.manual_seed(0)
    theirs = torch.nn.LayerNorm(16, eps=eps)
    weight, bias, x = torch.randn(16), torch.randn(16), torch.randn(5, 16)
    theirs.weight.data, theirs.bias.data = weight, bias
    norm = LayerNorm("ln", memory_weights({"ln.weight": weight, "ln.bias": bias}), 16, eps)
    torch.testing.assert_close(norm(x), theirs(x), rtol=0, atol=1e-6)


def test_layer_norm_without_weight_and_bias_asks_for_none() -> None:
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    out = LayerNorm("ln", memory_weights({}), 16, affine=False)(x)
    torch.testing.assert_close(out, torch.nn.LayerNorm(16, elementwise_affine=False)(x), rtol=0, atol=1e-6)


def test_a_norm_of_another_size_is_refused() -> None:
    weights = memory_weights({"ln.weight": torch.ones(8), "ln.bias": torch.ones(8)})
    for make in (RMSNorm, LayerNorm):
        with pytest.raises(WeightsError, match=r"'ln.weight' has shape \(8,\), the config asks for \(16,\)"):
            make("ln", weights, 16)
