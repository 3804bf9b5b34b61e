import torch

from lorax_server.kernels import reference, select_ops


def test_a_cpu_gets_the_reference() -> None:
    assert select_ops(torch.device("cpu")) is reference
