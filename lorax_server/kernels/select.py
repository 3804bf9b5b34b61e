"""Selects the ops for a device."""

import logging

import torch

from lorax_server.kernels import reference
from lorax_server.kernels.ops import Ops

logger = logging.getLogger(__name__)

AMPERE, HOPPER = 8, 9  # major compute capabilities


def select_ops(device: torch.device) -> Ops:
    """Return the fastest ops for `device`: CUDA C++ on Hopper, Triton on other NVIDIA GPUs, C++ on CPUs."""
    if device.type != "cuda":
        return _select_cpu_ops()
    capability = torch.cuda.get_device_capability(device)[0]
    if capability < AMPERE:
        logger.warning("no kernels for this GPU (older than Ampere); using the slower torch ops")
        return reference
    from lorax_server.kernels.triton.ops import TritonOps

    if capability == HOPPER:
        try:
            from lorax_server.kernels.hopper.ops import HopperOps

            return HopperOps(device)
        except Exception as error:  # compiler, driver or import error
            logger.warning("Hopper kernels cannot be compiled; using the Triton kernels: %s", error)
    return TritonOps()


def _select_cpu_ops() -> Ops:
    from lorax_server.kernels.cpu.library import LibraryUnavailableError
    from lorax_server.kernels.cpu.ops import CpuOps

    try:
        return CpuOps()
    except LibraryUnavailableError as reason:
        logger.warning("no native CPU kernels; using the slower torch ops: %s", reason)
        return reference
