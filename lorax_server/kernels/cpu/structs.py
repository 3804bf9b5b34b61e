"""ctypes structs that the native kernels read. `native/product.h` defines the same structs in C++."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from lorax_server.kernels.cpu.abi import struct_fields
from lorax_server.kernels.ops import LoraBatch


class Matrix(ctypes.Structure):
    """The C++ struct for a weight matrix in panels, with its bias."""

    _fields_ = struct_fields("Matrix")


class Lora(ctypes.Structure):
    """The C++ struct with a batch's adapter table and LoRA segments."""

    _fields_ = struct_fields("Lora")


class NativeStruct(NamedTuple):
    """The address of a C++ struct, and the objects that must outlive the struct."""

    address: int
    kept_alive: tuple[object, ...]


class NativeLora(NamedTuple):
    """A batch's `Lora` struct, which all layers share, and its number of tokens."""

    address: int
    tokens: int
    struct: Lora
    segment_data: ctypes.Array[ctypes.c_int64]  # segment bounds, then the adapter of each segment
    tensors: tuple[torch.Tensor, ...]

    def write(self, bounds: Sequence[int], adapters: Sequence[int]) -> None:
        """Write the LoRA segments. Tokens after the last segment are padding and use the base model."""
        if bounds[-1] < self.tokens:
            bounds, adapters = [*bounds, self.tokens], [*adapters, 0]
        elif len(adapters) > 1 and bounds[-2] == bounds[-1]:  # the last segment is for padding, and there is no padding
            bounds, adapters = bounds[:-1], adapters[:-1]
        count, capacity = len(adapters), len(self.segment_data) // 2
        self.segment_data[: count + 1] = [*bounds]
        self.segment_data[capacity + 1 : capacity + 1 + count] = [*adapters]
        self.struct.segments = count


def lora_struct(lora: LoraBatch) -> NativeLora:
    """Return the `Lora` struct for a batch. In a graph, the struct has capacity for one segment per token."""
    return lora.cached("cpu", _make_lora_struct, lora)


def refresh_lora_plan(lora: LoraBatch, current: LoraBatch) -> None:
    """Write the segments of `current` to the struct of `lora`, which is a graph's padded batch. Call this before a
    replay.
    """
    lora_struct(lora).write(*_segments(current))


def _make_lora_struct(lora: LoraBatch) -> NativeLora:
    tensors = (lora.buffer, lora.host_table, lora.scales, lora.features)
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError("the adapter tables must be contiguous")
    tokens = len(lora.adapter_indices) if lora.in_graph else lora.bounds[-1]
    capacity = tokens if lora.in_graph else len(lora.adapters)
    segment_data = (ctypes.c_int64 * (2 * capacity + 1))()
    start = ctypes.addressof(segment_data)
    pointers = [tensor.data_ptr() for tensor in tensors]
    struct = Lora(*pointers, lora.host_table.shape[1], start, start + 8 * (capacity + 1), 0, lora.expert)
    described = NativeLora(ctypes.addressof(struct), tokens, struct, segment_data, tensors)
    described.write(*_segments(lora))
    return described


def _segments(lora: LoraBatch) -> tuple[list[int], list[int]]:
    return ([0], []) if lora.in_graph else (lora.bounds, lora.adapters)
