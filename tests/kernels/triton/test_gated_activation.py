"""The Triton kernel for gated activations without adapters, compared with torch."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from lorax_server.kernels import Activation
from lorax_server.kernels.triton.gated_activation import apply_gate
from lorax_server.models.custom_modeling.flash_gpt_oss_modeling import FlashGPTOSSForCausalLM
from tests.parity.other_variants import OTHER_VARIANTS

ACTIVATIONS = {
    "silu": Activation("silu", F.silu),
    "gelu": Activation("gelu", F.gelu),
    "gelu_tanh": Activation("gelu_tanh", partial(F.gelu, approximate="tanh")),
    "relu": Activation("relu", F.relu),
    "other": Activation("other", torch.tanh),
    "gpt-oss": FlashGPTOSSForCausalLM.describe(OTHER_VARIANTS["gptoss"].config()).activation,
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter warns about NaN
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("rows", [1, 5])
def test_gates_match_torch(name: str, rows: int, device: torch.device) -> None:
    activation = ACTIVATIONS[name]
    assert activation is not None
    gate_up = torch.randn(rows, 140, generator=torch.Generator().manual_seed(1)) * 4
    gate_up[0, 3], gate_up[-1, 90] = torch.nan, torch.nan
    expected = activation.apply_gate(*gate_up.chunk(2, dim=-1))
    out = apply_gate(gate_up.to(device), activation).cpu()
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
