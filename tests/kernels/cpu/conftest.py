"""Fixtures for native kernels. Without a built library, the tests fail instead of being skipped."""

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
    """CPU ops with emulated AMX tiles, on any CPU."""
    return CpuOps(build_emulated(tmp_path_factory.mktemp("emulated")))


@pytest.fixture
def restored_threads() -> Iterator[None]:
    """Restore the number of torch threads after the test."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
