"""The native kernels. Where they were not built, the tests of this folder fail: they must not be left out unseen."""

from collections.abc import Iterator

import pytest
import torch

from lorax_server.kernels.cpu.library import Library
from lorax_server.kernels.cpu.ops import CpuOps
from tests.kernels.cpu.emulated_amx import build_emulated


@pytest.fixture(scope="session")
def library() -> Library:
    return Library()


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> CpuOps:
    """Linears of bfloat16 as AMX computes them, on any CPU."""
    return CpuOps(build_emulated(tmp_path_factory.mktemp("emulated")))


@pytest.fixture
def restored_threads() -> Iterator[None]:
    """Let a test change the number of threads."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
