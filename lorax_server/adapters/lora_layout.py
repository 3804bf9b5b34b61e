"""Packs the tensors of LoRA adapters that only need to be copied. The result is the same as with `prepare`.

A layout depends only on the config and the shapes, so that new versions of an adapter can use it again. The checks of
the config and the tensor names take longer than the copy.
"""

import re
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lorax_server.adapters.config import AdapterConfig, parse_config
from lorax_server.adapters.host import UNIT_BYTES, HostAdapter, copy_tensor, empty_table
from lorax_server.adapters.target import AdapterTarget, TargetKind
from lorax_server.adapters.tensor_reader import is_finite
from lorax_server.adapters.weights import StoredAdapter
from lorax_server.kernels import Field

Shapes = Mapping[str, tuple[torch.Size, torch.dtype]]  # shapes and dtypes by tensor name
LAYER_NUMBER = re.compile(r"\.\d+\.")


class _Factor(NamedTuple):
    """A LoRA factor in the packed buffer."""

    key: str  # tensor name
    offset: int
    shape: torch.Size  # of the tensor
    is_transposed: bool


class _Run(NamedTuple):
    """Factors of the same module in several layers, at equal distances in the packed buffer, so that a GPU can copy
    them with one operation.
    """

    factors: list[_Factor]

    @property
    def distance(self) -> int:
        """The distance between two factors, in elements."""
        return self.factors[1].offset - self.factors[0].offset if len(self.factors) > 1 else 0

    def is_continued_by(self, factor: _Factor) -> bool:
        last = self.factors[-1]
        has_distance = len(self.factors) == 1 or factor.offset - last.offset == self.distance
        return factor.shape == last.shape and has_distance


@dataclass(frozen=True)
class LoraLayout:
    """The layout of an adapter that contains only LoRA factors for linear layers, without shards."""

    config: AdapterConfig
    shapes: Shapes
    packed: HostAdapter  # with an empty buffer
    num_elements: int
    factors: tuple[_Factor, ...]
    padding: tuple[slice, ...]

    @classmethod
    def find(
        cls,
        adapter: StoredAdapter,
        tensors: Mapping[str, torch.Tensor],
        targets: Mapping[str, AdapterTarget],
        dtype: torch.dtype,
        after_kv: Collection[str] = (),
    ) -> "LoraLayout | None":
        """Return the layout of an adapter, or None if its weights need more than a copy. See `prepare` for
        `after_kv`.
        """
        keys = adapter.find_plain_factors()
        if not keys:
            return None
        table, scales = empty_table(len(targets)).tolist(), [0.0] * len(targets)
        factors, padding, unit, end = list[_Factor](), list[slice](), UNIT_BYTES // dtype.itemsize, 0
        for index, target in enumerate(targets.values()):
            if target.name not in keys:
                continue
            is_sharded = not (target.inputs.is_whole and target.outputs.is_whole)
            if target.kind is not TargetKind.LINEAR or is_sharded or target.input_order is not None:
                return None
            table[index][Field.RANK], scales[index] = adapter.find_rank(target.name), adapter.find_scale(target.name)
            for key, field in zip(keys[target.name], (Field.A, Field.B), strict=True):
                table[index][field], shape = end, tensors[key].shape
                factors.append(_Factor(key, end, shape, field is Field.B))
                stop, end = end + shape.numel(), end + -(-shape.numel() // unit) * unit
                if stop < end:
                    padding.append(slice(stop, end))
        packed = HostAdapter(
            torch.empty(0, dtype=dtype),
            torch.tensor(table, dtype=torch.long),
            torch.tensor(scales),
            adapter.vocab_size,
            end // unit,
            any(module not in after_kv for module in keys),
        )
        return cls(adapter.config, _describe(tensors), packed, end, tuple(factors), tuple(padding))

    @classmethod
    def make_example(cls, dtype: torch.dtype) -> "LoraLayout":
        """Return a small layout with two layers."""
        config = parse_config({"peft_type": "LORA", "r": 16, "lora_alpha": 16, "target_modules": ["layer"]}, "example")
        shapes = (torch.Size((16, 64)), torch.Size((64, 16)))
        factors = tuple(
            _Factor(f"layers.{layer}.{field}", (2 * layer + field) * shape.numel(), shape, bool(field))
            for layer in range(2)
            for field, shape in enumerate(shapes)
        )
        packed = HostAdapter(torch.empty(0, dtype=dtype), empty_table(0), torch.zeros(0), 0, 0)
        num_elements = sum(factor.shape.numel() for factor in factors)
        return cls(config, {factor.key: (factor.shape, dtype) for factor in factors}, packed, num_elements, factors, ())

    def fits(self, config: AdapterConfig, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Return True if the tensors of another version have the same layout."""
        return config == self.config and _describe(tensors) == self.shapes

    def pack(
        self,
        tensors: Mapping[str, torch.Tensor],
        memory: "ReusedMemory",
        pause: Callable[[], object],
        is_parallel: bool,
    ) -> HostAdapter | None:
        """Return the adapter in the device layout, or None if it has values that are not finite.

        `is_parallel` uses several threads and does not pause. See `prepare` for `pause`.
        """
        buffer = memory.allocate(self.num_elements, self.packed.buffer.dtype)
        for part in self.padding:
            buffer[part] = 0
        if is_parallel:
            is_valid = self._fill_in_parallel(buffer, tensors)
        else:
            is_valid = self._fill_on_one_thread(buffer, tensors, pause)
        return replace(self.packed, buffer=buffer) if is_valid else None

    @cached_property
    def _runs(self) -> list[_Run]:
        by_module: dict[str, list[_Factor]] = {}
        for factor in self.factors:
            by_module.setdefault(LAYER_NUMBER.sub(".", factor.key), []).append(factor)
        runs = list[_Run]()
        for factors in by_module.values():
            runs.append(_Run(factors[:1]))
            for factor in factors[1:]:
                if runs[-1].is_continued_by(factor):
                    runs[-1].factors.append(factor)
                else:
                    runs.append(_Run([factor]))
        return runs

    @property
    def num_staged(self) -> int:
        """The number of elements in all factors, without padding."""
        return sum(factor.shape.numel() for factor in self.factors)

    def list_staged(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the factors as flat tensors, in the order of the staging buffer for `pack_staged`."""
        return [_round_float64(tensors[factor.key]).view(-1) for run in self._runs for factor in run.factors]

    def pack_staged(self, staged: torch.Tensor) -> HostAdapter | None:
        """Return the adapter in the device layout, or None if it has values that are not finite.

        `staged` contains the factors without padding, in the model's dtype. The result is on the same device. This
        needs a few operations per module type, instead of one per tensor, because launching kernels takes longer than
        running them. It synchronizes with the current stream once.
        """
        buffer = staged.new_empty(self.num_elements)
        if self.padding:
            buffer.zero_()
        start = 0
        for run in self._runs:
            first, count = run.factors[0], len(run.factors)
            stop = start + count * first.shape.numel()
            source = staged[start:stop].view(count, *first.shape)
            source = source.mT if first.is_transposed else source
            buffer.as_strided(source.shape, (run.distance, source.shape[2], 1), first.offset).copy_(source)
            start = stop
        is_valid = bool(torch.stack(torch.aminmax(buffer)).isfinite().all())
        return replace(self.packed, buffer=buffer) if is_valid else None

    def _fill_on_one_thread(
        self, buffer: torch.Tensor, tensors: Mapping[str, torch.Tensor], pause: Callable[[], object]
    ) -> bool:
        """Copy the factors to the buffer. Return False as soon as a value is not finite."""
        for key, offset, shape, is_transposed in self.factors:
            pause()
            source = _round_float64(tensors[key]).to(buffer.dtype)
            target = buffer[offset : offset + shape.numel()]
            source = source.t() if is_transposed else source
            copy_tensor(source, target.view(source.shape))
            if not is_finite(target):
                return False
        return True

    def _fill_in_parallel(self, buffer: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Copy the factors to the buffer with two operations, which release the GIL, so that the engine thread can
        prepare steps. Return False if a value is not finite.
        """
        targets = [
            buffer.as_strided(shape, (1, shape[0]) if is_transposed else (shape[1], 1), offset)
            for _, offset, shape, is_transposed in self.factors
        ]
        torch._foreach_copy_(targets, [_round_float64(tensors[factor.key]) for factor in self.factors])
        return bool(torch.stack(torch.aminmax(buffer)).isfinite().all())


class ReusedMemory:
    """Allocates tensors, and keeps the memory of the last freed tensor, because page faults take longer than the copy
    of an adapter. Any thread may use it.
    """

    def __init__(self) -> None:
        self._free: deque[npt.NDArray[np.uint8]] = deque(maxlen=1)  # thread-safe

    def allocate(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor."""
        num_bytes = num_elements * dtype.itemsize
        try:
            memory = self._free.pop()
        except IndexError:
            memory = None
        if memory is None or len(memory) != num_bytes:
            memory = np.empty(num_bytes, np.uint8)
        array = memory.view()  # freed together with the tensor and all its views
        weakref.finalize(array, self._free.append, memory).atexit = False
        return torch.from_numpy(array).view(dtype)


def _round_float64(tensor: torch.Tensor) -> torch.Tensor:
    """Convert float64 to float32, as `MemoryReader` does."""
    return tensor.float() if tensor.dtype is torch.float64 else tensor


def _describe(tensors: Mapping[str, torch.Tensor]) -> Shapes:
    return {key: (tensor.shape, tensor.dtype) for key, tensor in tensors.items()}
