import torch

from lorax_server.kernels import find_max_rank, reference, select_ops


def test_a_cpu_gets_the_reference() -> None:
    assert select_ops(torch.device("cpu")) is reference


def test_kernels_of_a_gpu_limit_the_rank() -> None:
    assert find_max_rank(torch.device("cpu")) is None
    assert find_max_rank(torch.device("cuda")) == 512
