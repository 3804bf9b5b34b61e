"""Graphs: what a run of a model's layers calls, recorded once, then called again without Python between.

While a run is recorded, no kernel is called. Each call is noted with its arguments, and what torch allocates lies in
buffers that stay. Torch's own operations on them are noted, too, and made again between the kernels; views are not, as
they only name a place. A run that does anything else, above all one that reads a number on the host, has no graph.

All graphs share the buffers: one that is released within a run serves again in it, and in every other graph.
"""

import ctypes
import struct
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lorax_server.kernels.cpu.abi import ARGUMENT_TYPES
from lorax_server.kernels.cpu.library import Library
from lorax_server.kernels.ops import UnrecordableError

# The kernels of a decode step's layers. Others write to memory that does not outlive a call.
RECORDED = ("linear", "rms_norm", "layer_norm", "scale_and_shift", "gate", "rotary", "write_kv", "decode_attention")
WORDS = 1 + max(len(ARGUMENT_TYPES[op]) for op in RECORDED)  # of a call: its function, then its arguments
aten = torch.ops.aten
ALLOCATIONS = (aten.empty.memory_format, aten.empty_like.default)
# Beside those on each number alone, those that move numbers.
MOVES = (
    aten.index_select.default,
    aten.index.Tensor,
    aten.cat.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.contiguous.default,
    aten.to.dtype,
    aten.flatten.using_ints,
    aten.reshape.default,
)
# Which `tolist` and `numpy` begin with: their results are numbers of this run, not of the next.
READS = (aten.resolve_conj.default, aten.resolve_neg.default, aten.to.dtype_layout)

_Step = Callable[[], Any]
_Bytes = npt.NDArray[np.uint8]


class BufferPool:
    """Memory for what runs of up to `max_rows` rows compute on the way. A tensor's is free again when it is gone."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._free: dict[int, list[_Bytes]] = {}  # by bytes of a row
        self._made: dict[int, _Bytes] = {}  # by address

    @property
    def num_bytes(self) -> int:
        return sum(len(made) for made in self._made.values())

    def take(self, like: torch.Tensor, rows: int) -> torch.Tensor:
        """Return a tensor of the shape, strides and dtype of another one, of a run of so many rows."""
        num_bytes = like.untyped_storage().nbytes()
        row_bytes = -(-num_bytes // rows)
        free = self._free.setdefault(row_bytes, [])
        whole = free.pop() if free else self._make(row_bytes)
        mine = whole[:num_bytes]  # lives as long as any view of the tensor
        weakref.finalize(mine, free.append, whole).atexit = False
        return torch.from_numpy(mine).view(like.dtype).as_strided(like.shape, like.stride(), like.storage_offset())

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same tensor; one in a buffer without keeping the buffer from serving again."""
        whole = self._made.get(tensor.untyped_storage().data_ptr())
        if whole is None:
            return tensor
        same = torch.from_numpy(whole)[: tensor.untyped_storage().nbytes()].view(tensor.dtype)
        return same.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _make(self, row_bytes: int) -> _Bytes:
        whole: _Bytes = torch.empty(max(row_bytes * self._max_rows, 1), dtype=torch.uint8).numpy()
        self._made[whole.ctypes.data] = whole
        return whole


class CpuGraph:
    """A recorded run. What its kernels read besides the buffers must live as long as it does."""

    def __init__(self, steps: Sequence[_Step], output: torch.Tensor) -> None:
        self._steps = steps
        self.output = output  # of the last replay, of this program or of another

    def replay(self) -> None:
        for step in self._steps:
            step()


class RecordingLibrary(Library):
    """A library whose functions only note their calls."""

    def __init__(self, library: Library, note: Callable[..., None]) -> None:
        self.panel, self.has_tiles = library.panel, library.has_tiles
        for op in ARGUMENT_TYPES:
            setattr(self, op, partial(note, op))


class Recording(TorchDispatchMode):
    """Notes what a run of so many rows does."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing its compiler, which is never used here: it takes seconds and 100 MB."""
        return False

    def __init__(self, library: Library, buffers: BufferPool, rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._library, self._buffers, self._rows = library, buffers, rows
        self._steps: list[_Step] = []
        self._calls: list[bytes] = []  # of kernels, since the last operation of torch
        self.library = RecordingLibrary(library, self._note)

    def finish(self, output: torch.Tensor) -> CpuGraph:
        self._end_calls()
        return CpuGraph(self._steps, self._buffers.alias(output))

    def _note(self, op: str, *arguments: Any) -> None:
        if op not in RECORDED:
            raise UnrecordableError(op)
        words = [_to_word(*pair) for pair in zip(arguments, ARGUMENT_TYPES[op], strict=True)]
        words = [struct.pack("q", self._library.entries[op]), *words]
        self._calls.append(b"".join(words).ljust(8 * WORDS, b"\0"))

    def _end_calls(self) -> None:
        if self._calls:
            calls = ctypes.create_string_buffer(b"".join(self._calls), 8 * WORDS * len(self._calls))
            self._steps.append(partial(self._library.run_program, calls, len(self._calls), WORDS))
            self._calls = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in READS or func._schema.is_mutable or not _is_of_tensors(result):
            raise UnrecordableError(func)
        if func in ALLOCATIONS:
            return self._buffers.take(result, self._rows)
        if func.is_view and _shares(result, (args, kwargs)):
            return result
        if not isinstance(result, torch.Tensor) or not (torch.Tag.pointwise in func.tags or func in MOVES):
            raise UnrecordableError(func)
        return self._note_torch(func, args, kwargs, result)

    def _note_torch(self, func: Any, args: Any, kwargs: Any, result: torch.Tensor) -> torch.Tensor:
        self._end_calls()
        kept = self._buffers.take(result, self._rows).copy_(result)  # others may be looked up by these numbers
        args, kwargs = tree_map_only(torch.Tensor, self._buffers.alias, (args, kwargs))
        self._steps.append(partial(_compute, self._buffers.alias(kept), partial(func, *args, **kwargs)))
        return kept


def _compute(out: torch.Tensor, function: Callable[[], torch.Tensor]) -> None:
    out.copy_(function())


def _to_word(argument: Any, kind: Any) -> bytes:
    if kind is ctypes.c_float:
        return struct.pack("fxxxx", argument)
    return struct.pack("q", argument or 0)


def _is_of_tensors(result: Any) -> bool:
    return all(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result))


def _shares(result: Any, arguments: Any) -> bool:
    """Tell whether tensors are views of arguments."""
    places = {x.untyped_storage().data_ptr() for x in tree_leaves(arguments) if isinstance(x, torch.Tensor)}
    return all(x.untyped_storage().data_ptr() in places for x in tree_leaves(result))
