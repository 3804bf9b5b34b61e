"""Packs the LoRA factors of adapters that are passed as tensors, in device memory."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from lorax_server.adapters.host import HostAdapter
from lorax_server.adapters.lora_layout import LoraLayout, ReusedMemory
from lorax_server.worker.copier import Copier

logger = logging.getLogger(__name__)


class DevicePacker:
    """Packs adapters on a device, and copies them to host memory afterwards.

    All work runs on the copier's stream. The results of `pack` are therefore ready for the copier's next copies, and
    memory that is freed on this stream is reused in order.
    """

    def __init__(self, device: torch.device, copier: Copier) -> None:
        self._device = device
        self._copier = copier
        self._host_memory = ReusedMemory()

    def warm_up(self, dtype: torch.dtype) -> None:
        """Load the kernels, because loading kernels during the first update would delay steps."""
        layout = LoraLayout.make_example(dtype)
        for device in (torch.device("cpu"), self._device):
            tensors = {key: torch.zeros(shape, dtype=dtype, device=device) for key, (shape, _) in layout.shapes.items()}
            self.pack(layout, tensors)

    def pack(self, layout: LoraLayout, tensors: Mapping[str, torch.Tensor]) -> HostAdapter | None:
        """Return the adapter in the device layout, in device memory. The tensors are read before this returns.

        Return None if the adapter must be packed in host memory: it has invalid values, its tensors are on several
        devices, or too little device memory is free.
        """
        sources = layout.list_staged(tensors)
        devices = {source.device for source in sources}
        if devices not in ({self._device}, {torch.device("cpu")}):
            return None
        is_on_device = devices == {self._device}
        if is_on_device:
            self._copier.wait_for_caller_stream()  # the caller may still be computing the tensors
        try:
            with self._copier.use_stream():
                staged = torch.empty(layout.num_staged, dtype=layout.packed.buffer.dtype, device=self._device)
                if is_on_device:
                    torch._foreach_copy_(staged.split([len(source) for source in sources]), sources)
                else:
                    self._copier.wait_until_submitted(self._copier.start_all(staged, sources))
                return layout.pack_staged(staged)
        except torch.OutOfMemoryError:
            logger.info("adapter %r is packed in host memory: too little device memory is free", layout.config.name)
            return None

    def start_fetch(self, packed: HostAdapter, on_done: Callable[[HostAdapter], None]) -> None:
        """Start copying a packed adapter to host memory. `on_done` is called on another thread with the copy."""
        buffer = self._host_memory.allocate(packed.buffer.numel(), packed.buffer.dtype)
        copied = replace(packed, buffer=buffer)
        self._copier.start_fetch(buffer, packed.buffer, lambda: on_done(copied))
