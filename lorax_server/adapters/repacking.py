"""Packs new weights of a LoRA adapter into the layout of an earlier version with the same config and shapes.

This skips the checks and the conversion in `prepare`, which depend only on the config and the shapes. Updates from a
training loop therefore take less time than the first load.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from lorax_server.adapters.config import AdapterConfig
from lorax_server.adapters.host import UNIT_BYTES, HostAdapter, copy_tensor
from lorax_server.adapters.target import AdapterTarget, TargetKind
from lorax_server.adapters.tensor_reader import is_finite
from lorax_server.adapters.weights import StoredAdapter
from lorax_server.kernels import Field
from lorax_server.kernels.device import is_host

Shapes = Mapping[str, tuple[torch.Size, torch.dtype]]  # shapes and dtypes by tensor name


class _Factor(NamedTuple):
    """A LoRA factor in the packed buffer."""

    key: str  # tensor name
    offset: int
    is_transposed: bool


@dataclass(frozen=True)
class Repacking:
    """The layout of a prepared adapter that contains only LoRA factors for linear layers, without shards."""

    config: AdapterConfig
    shapes: Shapes
    packed: HostAdapter  # with an empty buffer
    num_elements: int
    factors: tuple[_Factor, ...]

    @classmethod
    def find(
        cls,
        adapter: StoredAdapter,
        tensors: Mapping[str, torch.Tensor],
        targets: Mapping[str, AdapterTarget],
        packed: HostAdapter,
    ) -> "Repacking | None":
        """Return the layout of the prepared adapter `packed`, or None if its weights need more than a copy."""
        keys = adapter.find_plain_factors()
        if not keys:
            return None
        factors = list[_Factor]()
        for index, target in enumerate(targets.values()):
            if target.name not in keys:
                continue
            if target.kind is not TargetKind.LINEAR or not (target.inputs.is_whole and target.outputs.is_whole):
                return None
            offsets = packed.table[index].tolist()
            if min(offsets[Field.A], offsets[Field.B]) < 0:
                return None
            key_a, key_b = keys[target.name]
            factors += [_Factor(key_a, offsets[Field.A], False), _Factor(key_b, offsets[Field.B], True)]
        layout = replace(packed, buffer=packed.buffer.new_empty(0))
        return cls(adapter.config, describe(tensors), layout, packed.buffer.numel(), tuple(factors))

    def fits(self, config: AdapterConfig, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Return True if these tensors have the layout of the earlier version."""
        return config == self.config and describe(tensors) == self.shapes

    def pack(self, tensors: Mapping[str, torch.Tensor], pause: Callable[[], object]) -> HostAdapter | None:
        """Return the adapter in the device layout, or None if it has values that are not finite.

        The buffer is on the same device as the tensors. See `prepare` for `pause`.
        """
        device = tensors[self.factors[0].key].device
        buffer = torch.empty(self.num_elements, dtype=self.packed.buffer.dtype, device=device)
        fill = self._fill_on_host if is_host(device) else self._fill_on_device
        return replace(self.packed, buffer=buffer) if fill(buffer, tensors, pause) else None

    def _fill_on_host(
        self, buffer: torch.Tensor, tensors: Mapping[str, torch.Tensor], pause: Callable[[], object]
    ) -> bool:
        """Copy the factors to the buffer. Return False as soon as a value is not finite."""
        unit = UNIT_BYTES // buffer.itemsize
        for key, offset, is_transposed in self.factors:
            pause()
            source = _cast(tensors[key], buffer.dtype)
            end = offset + source.numel()
            target = buffer[offset:end]
            buffer[end : -(-end // unit) * unit] = 0  # padding
            source = source.t() if is_transposed else source
            copy_tensor(source, target.view(source.shape))
            if not is_finite(target):
                return False
        return True

    def _fill_on_device(
        self, buffer: torch.Tensor, tensors: Mapping[str, torch.Tensor], pause: Callable[[], object]
    ) -> bool:
        """Copy the factors to the buffer. Return False if a value is not finite. This synchronizes only once."""
        buffer.zero_()  # padding
        for key, offset, is_transposed in self.factors:
            pause()
            source = tensors[key].t() if is_transposed else tensors[key]
            buffer[offset : offset + source.numel()].view(source.shape).copy_(_cast(source, buffer.dtype))
        return bool(torch.isfinite(buffer).all())


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (tensor.float() if tensor.dtype is torch.float64 else tensor).to(dtype)


def describe(tensors: Mapping[str, torch.Tensor]) -> Shapes:
    return {key: (tensor.shape, tensor.dtype) for key, tensor in tensors.items()}
