import torch

from lorax_server.kernels.device import allocate_zeros
from lorax_server.machine import resident_memory_bytes

CPU = torch.device("cpu")


def test_allocate_zeros_commits_memory_on_write() -> None:
    before = resident_memory_bytes()
    zeros = allocate_zeros([2**20, 256], torch.float32, CPU)  # 1 GiB
    assert zeros.shape == (2**20, 256)
    assert resident_memory_bytes() - before < 2**26
    zeros[: 2**17] = 1.0  # 128 MiB
    assert 2**27 <= resident_memory_bytes() - before < 2**28
    assert not zeros[2**17].any()


def test_allocate_zeros_supports_all_dtypes_and_shapes() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        for shape in ([3, 5], [0, 4], [1]):
            zeros = allocate_zeros(shape, dtype, CPU)
            assert (zeros.shape, zeros.dtype) == (torch.Size(shape), dtype)
            assert not zeros.float().any()
