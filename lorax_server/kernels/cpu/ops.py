"""The op table in C++ for CPUs. What is rare is left to the reference."""

from collections.abc import Callable

import torch

from lorax_server.kernels import reference
from lorax_server.kernels.cpu.attention import CpuAttention
from lorax_server.kernels.cpu.library import Library
from lorax_server.kernels.cpu.linear import CpuLinears
from lorax_server.kernels.cpu.norm import CpuNorms
from lorax_server.kernels.cpu.program import BufferPool, CpuGraph, Recording
from lorax_server.kernels.cpu.sampling import CpuSampling
from lorax_server.kernels.cpu.structs import plan_lora
from lorax_server.kernels.ops import ChooseRows


class CpuOps(CpuAttention, CpuLinears, CpuNorms, CpuSampling):
    """The ops, on all threads of torch."""

    def __init__(self, library: Library | None = None) -> None:
        """Load the library of this CPU, if none is given; an error says why there is none."""
        self._library = library or Library()

    records_graphs = True
    max_lora_rank: int | None = None
    choose_rows: ChooseRows | None = None

    # Adapters of embeddings, and those with token rows of their own at the head, which are rare.
    add_lora = staticmethod(reference.add_lora)
    adapt_embedding = staticmethod(reference.adapt_embedding)
    plan_lora = staticmethod(plan_lora)
    prepare = staticmethod(reference.prepare)  # there is nothing to compile

    @property
    def has_fast_bfloat16(self) -> bool:
        return self._library.has_tiles

    def make_recorder(self, max_rows: int) -> "CpuRecorder":
        return CpuRecorder(self, max_rows)

    def record(self, run: Callable[[], torch.Tensor], rows: int, buffers: BufferPool) -> CpuGraph:
        """Record as `Recorder` says, with buffers of the caller."""
        library, recording = self._library, Recording(self._library, buffers, rows)
        self._library = recording.library
        try:
            with recording:
                output = run()
        finally:
            self._library = library
        return recording.finish(output)


class CpuRecorder:
    """A recorder whose graphs share one pool of buffers."""

    def __init__(self, ops: CpuOps, max_rows: int) -> None:
        self._ops = ops
        self.buffers = BufferPool(max_rows)

    def record(self, run: Callable[[], torch.Tensor], rows: int) -> CpuGraph:
        return self._ops.record(run, rows, self.buffers)
