"""The structs that native kernels read, and their addresses."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from lorax_server.kernels.cpu.abi import list_fields
from lorax_server.kernels.ops import LoraBatch


class Matrix(ctypes.Structure):
    """A packed matrix."""

    _fields_ = list_fields("Matrix")


class Lora(ctypes.Structure):
    """The adapters of a batch."""

    _fields_ = list_fields("Lora")


class Described(NamedTuple):
    """A struct's address, and what must live as long as it is used."""

    address: int
    kept: tuple[object, ...]


class DescribedLora(NamedTuple):
    """The struct of a batch's adapters, which is the same for all layers, and the number of its tokens."""

    address: int
    tokens: int
    struct: Lora
    numbers: ctypes.Array[ctypes.c_int64]  # bounds of the segments, then their adapters
    tensors: tuple[torch.Tensor, ...]

    def write(self, bounds: Sequence[int], adapters: Sequence[int]) -> None:
        """Write the segments. Tokens after the last of them are padding, and belong to the base model."""
        if bounds[-1] < self.tokens:
            bounds, adapters = [*bounds, self.tokens], [*adapters, 0]
        elif len(adapters) > 1 and bounds[-2] == bounds[-1]:  # a padded batch without padding
            bounds, adapters = bounds[:-1], adapters[:-1]
        count, room = len(adapters), len(self.numbers) // 2
        self.numbers[: count + 1] = [*bounds]
        self.numbers[room + 1 : room + 1 + count] = [*adapters]
        self.struct.segments = count


def describe_lora(lora: LoraBatch) -> DescribedLora:
    """Return the struct of a batch. In a graph it has room for any other of as many tokens."""
    return lora.once("cpu", _describe_lora, lora)


def plan_lora(lora: LoraBatch, current: LoraBatch) -> None:
    """Let the struct of a batch in a graph describe the adapters of another batch, which may have fewer tokens."""
    describe_lora(lora).write(*_list_segments(current))


def _describe_lora(lora: LoraBatch) -> DescribedLora:
    tensors = (lora.buffer, lora.host_table, lora.scales, lora.widths)
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError("the tables of adapters must be contiguous")
    tokens = len(lora.adapter_indices) if lora.in_graph else lora.bounds[-1]
    room = tokens if lora.in_graph else len(lora.adapters)
    numbers = (ctypes.c_int64 * (2 * room + 1))()
    start = ctypes.addressof(numbers)
    pointers = [tensor.data_ptr() for tensor in tensors]
    struct = Lora(*pointers, lora.host_table.shape[1], start, start + 8 * (room + 1), 0)
    described = DescribedLora(ctypes.addressof(struct), tokens, struct, numbers, tensors)
    described.write(*_list_segments(lora))
    return described


def _list_segments(lora: LoraBatch) -> tuple[list[int], list[int]]:
    return ([0], []) if lora.in_graph else (lora.bounds, lora.adapters)
