"""Run kernels on a GPU if available, otherwise in Triton's interpreter."""

from importlib.util import find_spec

import pytest
import torch

from tests.kernels.triton.interpreter import IS_INTERPRETED, patch_interpreter, use_small_tiles

if find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]  # Triton supports only Linux
elif IS_INTERPRETED:
    patch_interpreter()
    use_small_tiles()


@pytest.fixture(params=["cpu" if IS_INTERPRETED else pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)
