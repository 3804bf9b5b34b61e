"""Selects the ops for a device."""

import logging
from typing import TYPE_CHECKING, Any

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


class ReferenceAttentionOps:
    """The ops of another backend with the reference attention, for models whose attention the backend does not
    support.
    """

    records_graphs = False  # the reference attention reads lengths on the host
    attend = staticmethod(reference.attend)
    attend_sequences = staticmethod(reference.attend_sequences)
    make_recorder = staticmethod(reference.make_recorder)

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    @property
    def name(self) -> str:
        return f"{self._ops.name}, attention: {reference.name}"

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    else:

        def __getattr__(self, name):
            return getattr(self._ops, name)


def _select_cpu_ops() -> Ops:
    from lorax_server.kernels.cpu.library import LibraryUnavailableError
    from lorax_server.kernels.cpu.ops import CpuOps

    try:
        return CpuOps()
    except LibraryUnavailableError as reason:
        logger.warning("no native CPU kernels; using the slower torch ops: %s", reason)
        return reference
