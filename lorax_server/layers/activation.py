"""Activations by the names that configs use."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from lorax_server.errors import ConfigError
from lorax_server.kernels import Activation

# Those of nearly all models: to import transformers' takes seconds of every start.
COMMON: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "relu": F.relu,
}
# transformers writes the tanh form out in eight operations; torch has it as one.
TANH_GELU = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_accurate", "gelu_python_tanh")


def get_activation(name: str, field: str) -> Activation:
    """Return an activation; errors name `field`, the config's field that asks for it."""
    if name in TANH_GELU:
        return Activation("gelu_tanh", partial(F.gelu, approximate="tanh"))
    if name in COMMON:
        return Activation(name, COMMON[name])
    from transformers.activations import ACT2CLS, ACT2FN  # noqa: PLC0415 - takes seconds

    if name not in ACT2CLS:
        raise ConfigError(f"config field {field} = {name!r} is not an activation we know")
    activation = ACT2FN[name]
    if any(True for _ in activation.parameters()):
        raise ConfigError(f"config field {field} = {name!r} is not supported: it has learned parameters")
    return Activation(name, activation)
