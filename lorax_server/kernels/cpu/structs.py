"""The structs that native kernels read, and their addresses."""

import ctypes
from itertools import chain
from typing import NamedTuple

from lorax_server.kernels.ops import LoraBatch


class Matrix(ctypes.Structure):
    """A packed matrix: `native/linear.h` has the same fields."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("stored", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    )


class Lora(ctypes.Structure):
    """The adapters of a batch: `native/linear.h` has the same fields."""

    _fields_ = (
        ("buffer", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("widths", ctypes.c_void_p),
        ("targets", ctypes.c_int64),
        ("bounds", ctypes.c_void_p),
        ("adapters", ctypes.c_void_p),
        ("segments", ctypes.c_int64),
    )


class Described(NamedTuple):
    """A struct's address, and what must live as long as it is used."""

    address: int
    kept: tuple[object, ...]


def describe_lora(lora: LoraBatch) -> Described:
    """Return the struct of a batch, which is the same for all layers."""
    return lora.once("cpu", _describe_lora, lora)


def _describe_lora(lora: LoraBatch) -> Described:
    count = len(lora.adapters)
    numbers = (ctypes.c_int64 * (2 * count + 1))(*chain(lora.bounds, lora.adapters))
    start = ctypes.addressof(numbers)
    tensors = (lora.buffer, lora.host_table, lora.scales, lora.widths)
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError("the tables of adapters must be contiguous")
    pointers = [tensor.data_ptr() for tensor in tensors]
    struct = Lora(*pointers, lora.host_table.shape[1], start, start + 8 * (count + 1), count)
    return Described(ctypes.addressof(struct), (struct, numbers, tensors))
