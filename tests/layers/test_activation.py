import pytest
import torch
from transformers.activations import ACT2CLS, ACT2FN

from lorax_server.errors import ConfigError
from lorax_server.layers.activation import TANH_GELU_NAMES, get_activation

OTHERS = ["gelu", "gelu_python", "gelu_10", "quick_gelu", "relu", "relu2", "relu6", "silu", "swish", "mish", "tanh"]


@pytest.mark.parametrize("name", [*TANH_GELU_NAMES, *OTHERS])
def test_activation_matches_transformers(name: str) -> None:
    x = torch.cat([torch.linspace(-12, 12, 2001), torch.tensor([0.0, 1e-6, -1e-6, 80.0, -80.0])])
    torch.testing.assert_close(get_activation(name, "hidden_act")(x), ACT2FN[name](x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", TANH_GELU_NAMES)
def test_activation_names_exist_in_transformers(name: str) -> None:
    assert name in ACT2CLS


@pytest.mark.parametrize("name", ["nope", "", "GELU", None])
def test_unknown_activation_error_names_config_field(name: str) -> None:
    with pytest.raises(ConfigError, match="config field hidden_act = ") as caught:
        get_activation(name, "hidden_act")
    assert repr(name) in str(caught.value)
