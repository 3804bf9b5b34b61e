"""Run the kernels on a GPU, or in Triton's interpreter where there is none."""

from importlib.util import find_spec

import pytest
import torch

from tests.kernels.triton.interpreter import IS_INTERPRETED, cut_small_shapes, repair_interpreter

if find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]  # there is no Triton outside Linux
elif IS_INTERPRETED:
    repair_interpreter()
    cut_small_shapes()


@pytest.fixture(params=["cpu" if IS_INTERPRETED else pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)
