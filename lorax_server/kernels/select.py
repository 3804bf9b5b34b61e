"""Choose the implementation of the operations for a device."""

import torch

from lorax_server.kernels import reference
from lorax_server.kernels.ops import Ops


def select_ops(device: torch.device) -> Ops:
    if device.type == "cuda":
        from lorax_server.kernels.triton.ops import TritonOps  # only a machine with a GPU has Triton

        return TritonOps()
    return reference
