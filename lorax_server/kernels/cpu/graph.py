"""Graphs for CPUs: record the kernel calls in a model run, and replay them without Python overhead.

Recording does not execute kernels. Kernel calls and torch ops are recorded with fixed buffers; operations that only
create views are not replayed. Runs that read tensor values on the host cannot be recorded. All graphs share one buffer
pool.
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

# The kernels in a decode step's layers. Other kernels write to temporary memory, so they cannot be recorded.
RECORDABLE_KERNELS = (
    "linear",
    "run_experts",
    "rms_norm",
    "layer_norm",
    "scale_and_shift",
    "gate",
    "activate",
    "rotary",
    "write_kv",
    "decode_attention",
)
# A recorded call: function address and arguments, 8 bytes each.
WORDS_PER_CALL = 1 + max(len(ARGUMENT_TYPES[op]) for op in RECORDABLE_KERNELS)
aten = torch.ops.aten
ALLOCATION_OPS = (aten.empty.memory_format, aten.empty_like.default)
# Recordable torch ops, in addition to pointwise ops.
COPY_OPS = (
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
# Torch ops of routers.
ROUTING_OPS = (
    aten.softmax.int,
    aten.sum.dim_IntList,
    aten.topk.default,
    aten.gather.default,
    aten.zeros_like.default,
    aten.scatter.value,
    aten.amax.default,
)
# First ops of `tolist` and `numpy`, whose results would be constants in a replay.
HOST_READ_OPS = (aten.resolve_conj.default, aten.resolve_neg.default, aten.to.dtype_layout)

_Step = Callable[[], Any]
_Bytes = npt.NDArray[np.uint8]


class BufferPool:
    """Reusable memory for intermediate tensors of recorded runs with up to `max_rows` rows.

    A buffer returns to the pool when the last tensor that uses it is deleted.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._free: dict[int, list[_Bytes]] = {}  # bytes per row -> free buffers
        self._made: dict[int, _Bytes] = {}  # address -> buffer

    @property
    def num_bytes(self) -> int:
        return sum(len(buffer) for buffer in self._made.values())

    def take(self, like: torch.Tensor, rows: int) -> torch.Tensor:
        """Return a tensor in a pooled buffer, with the shape and strides of `like`, for a run with `rows` rows."""
        num_bytes = like.untyped_storage().nbytes()
        row_bytes = -(-num_bytes // rows)
        free = self._free.setdefault(row_bytes, [])
        buffer = free.pop() if free else self._make(row_bytes)
        view = buffer[:num_bytes]  # finalized when the last tensor view is deleted
        weakref.finalize(view, free.append, buffer).atexit = False
        return torch.from_numpy(view).view(like.dtype).as_strided(like.shape, like.stride(), like.storage_offset())

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor`, or a view of its pooled buffer that does not keep the buffer in use."""
        buffer = self._made.get(tensor.untyped_storage().data_ptr())
        if buffer is None:
            return tensor
        same = torch.from_numpy(buffer)[: tensor.untyped_storage().nbytes()].view(tensor.dtype)
        return same.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _make(self, row_bytes: int) -> _Bytes:
        buffer: _Bytes = torch.empty(max(row_bytes * self._max_rows, 1), dtype=torch.uint8).numpy()
        self._made[buffer.ctypes.data] = buffer
        return buffer


class CpuGraph:
    """A recorded model run that can be replayed. Its inputs and weights must outlive the graph."""

    def __init__(self, steps: Sequence[_Step], output: torch.Tensor) -> None:
        self._steps = steps
        self.output = output  # overwritten by the next replay of any graph in the pool

    def replay(self) -> None:
        for step in self._steps:
            step()


class RecordingLibrary(Library):
    """A kernel library whose functions record their calls instead of executing them."""

    def __init__(self, library: Library, on_call: Callable[..., None]) -> None:
        self.panel, self.weight_bias = library.panel, library.weight_bias
        self.has_tiles, self.has_dot = library.has_tiles, library.has_dot
        for op in ARGUMENT_TYPES:
            setattr(self, op, partial(on_call, op))


class Recording(TorchDispatchMode):
    """Records the kernel calls and torch ops in a run with `rows` rows."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, which prevents torch from importing Dynamo. The import takes seconds and 100 MB."""
        return False

    def __init__(self, library: Library, buffers: BufferPool, rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._library, self._buffers, self._rows = library, buffers, rows
        self._steps: list[_Step] = []
        self._calls: list[bytes] = []  # kernel calls since the last torch op
        self.library = RecordingLibrary(library, self._record_call)

    def finish(self, output: torch.Tensor) -> CpuGraph:
        self._flush_calls()
        return CpuGraph(self._steps, self._buffers.alias(output))

    def _record_call(self, op: str, *arguments: Any) -> None:
        if op not in RECORDABLE_KERNELS:
            raise UnrecordableError(op)
        words = [_to_word(*pair) for pair in zip(arguments, ARGUMENT_TYPES[op], strict=True)]
        words = [struct.pack("q", self._library.entries[op]), *words]
        self._calls.append(b"".join(words).ljust(8 * WORDS_PER_CALL, b"\0"))

    def _flush_calls(self) -> None:
        if self._calls:
            calls = ctypes.create_string_buffer(b"".join(self._calls), 8 * WORDS_PER_CALL * len(self._calls))
            self._steps.append(partial(self._library.run_graph, calls, len(self._calls), WORDS_PER_CALL))
            self._calls = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in HOST_READ_OPS or func._schema.is_mutable or not _only_tensors(result):
            raise UnrecordableError(func)
        if func in ALLOCATION_OPS:
            return self._buffers.take(result, self._rows)
        if func.is_view and _are_views_of(result, (args, kwargs)):
            return result
        if not (torch.Tag.pointwise in func.tags or func in COPY_OPS + ROUTING_OPS):
            raise UnrecordableError(func)
        return self._record_torch_op(func, args, kwargs, result)

    def _record_torch_op(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        self._flush_calls()
        # Keep the values, because later ops may use them as indices.
        kept = tree_map_only(torch.Tensor, lambda x: self._buffers.take(x, self._rows).copy_(x), result)
        args, kwargs = tree_map_only(torch.Tensor, self._buffers.alias, (args, kwargs))
        outputs = [self._buffers.alias(x) for x in tree_leaves(kept)]
        self._steps.append(partial(_run_into, outputs, partial(func, *args, **kwargs)))
        return kept


def _run_into(outputs: Sequence[torch.Tensor], function: Callable[[], Any]) -> None:
    for output, result in zip(outputs, tree_leaves(function()), strict=True):
        output.copy_(result)


def _to_word(argument: Any, kind: Any) -> bytes:
    if kind is ctypes.c_float:
        return struct.pack("fxxxx", argument)
    return struct.pack("q", argument or 0)


def _only_tensors(result: Any) -> bool:
    return all(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result))


def _are_views_of(result: Any, arguments: Any) -> bool:
    """Return True if each result tensor shares its storage with an argument."""
    argument_addresses = {x.untyped_storage().data_ptr() for x in tree_leaves(arguments) if isinstance(x, torch.Tensor)}
    return all(x.untyped_storage().data_ptr() in argument_addresses for x in tree_leaves(result))
