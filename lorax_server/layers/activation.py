"""Look up activation functions by their names in model configs."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from lorax_server.errors import ConfigError
from lorax_server.kernels import Activation

# Activations of most models. Importing transformers for other activations adds seconds to the start.
TORCH_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "relu": F.relu,
    "tanh": torch.tanh,
}
# transformers computes the tanh approximation in eight operations, torch in one.
TANH_GELU_NAMES = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_accurate", "gelu_python_tanh")


def get_activation(name: str, field: str) -> Activation:
    """Return the activation called `name`. Error messages mention `field`, the config field that contains the name."""
    if name in TANH_GELU_NAMES:
        return Activation("gelu_tanh", partial(F.gelu, approximate="tanh"))
    if name in TORCH_ACTIVATIONS:
        return Activation(name, TORCH_ACTIVATIONS[name])
    from transformers.activations import ACT2CLS, ACT2FN  # noqa: PLC0415 - takes seconds

    if name not in ACT2CLS:
        raise ConfigError(f"config field {field} = {name!r} is not a known activation")
    activation = ACT2FN[name]
    if any(True for _ in activation.parameters()):
        raise ConfigError(f"config field {field} = {name!r} is not supported: it has learned parameters")
    return Activation(name, activation)
