"""Run the kernels in Triton's interpreter where there is no GPU."""

import os
from typing import Any, cast

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

interpreter = pytest.importorskip("triton.runtime.interpreter", reason="Triton is not installed")
patch_tensor = interpreter._patch_lang_tensor


def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
    """Patch as the interpreter does. Its scalars have a dimension, and numpy 2.4 makes no number of such."""
    patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = patch_tensor_and_index


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("Triton's interpreter is off where there is a GPU")
    return torch.device(cast(str, request.param))
