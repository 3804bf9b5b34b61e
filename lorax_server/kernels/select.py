"""Choose the implementation of the operations for a device."""

import logging

import torch

from lorax_server.kernels import reference
from lorax_server.kernels.ops import Ops

logger = logging.getLogger(__name__)

AMPERE, HOPPER = 8, 9  # major compute capability


def select_ops(device: torch.device) -> Ops:
    """Return the fastest ops of a device: CUDA C++ on Hopper, Triton on other NVIDIA GPUs, C++ on a CPU."""
    if device.type != "cuda":
        return _select_cpu_ops()
    capability = torch.cuda.get_device_capability(device)[0]
    if capability < AMPERE:
        logger.warning("there are no kernels for this GPU, which is older than Ampere: plain torch is used")
        return reference
    from lorax_server.kernels.triton.ops import TritonOps

    if capability == HOPPER:
        try:
            from lorax_server.kernels.hopper.ops import HopperOps

            return HopperOps(device)
        except Exception as error:  # whatever a compiler, a driver or a missing library says
            logger.warning("kernels for Hopper cannot be compiled, Triton's are used instead: %s", error)
    return TritonOps()


def _select_cpu_ops() -> Ops:
    from lorax_server.kernels.cpu.library import NoLibraryError
    from lorax_server.kernels.cpu.ops import CpuOps

    try:
        return CpuOps()
    except NoLibraryError as reason:
        logger.warning("there are no kernels for this CPU, plain torch is used, which is slower: %s", reason)
        return reference
