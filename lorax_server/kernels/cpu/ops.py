"""All ops for CPUs. They use native kernels, and fall back to the reference ops in rare cases."""

from collections.abc import Callable

import torch

from lorax_server.kernels import reference
from lorax_server.kernels.cpu.attention import CpuAttention
from lorax_server.kernels.cpu.graph import BufferPool, CpuGraph, Recording
from lorax_server.kernels.cpu.library import Library
from lorax_server.kernels.cpu.linear import CpuLinears
from lorax_server.kernels.cpu.norm import CpuNorms
from lorax_server.kernels.cpu.sampling import CpuSampling
from lorax_server.kernels.cpu.structs import refresh_lora_plan
from lorax_server.kernels.ops import SampleTokens


class CpuOps(CpuAttention, CpuLinears, CpuNorms, CpuSampling):
    """All ops for CPUs. Kernels use `torch.get_num_threads()` threads."""

    def __init__(self, library: Library | None = None) -> None:
        """Create the ops. If `library` is None, load the library for this CPU, or raise `LibraryUnavailableError`."""
        self._library = library or Library()

    records_graphs = True
    max_lora_rank: int | None = None
    sample_tokens: SampleTokens | None = None

    # Reference fallbacks for rare adapters: embeddings, and LM heads with adapter-specific token rows.
    add_lora = staticmethod(reference.add_lora)
    adapt_embedding = staticmethod(reference.adapt_embedding)
    refresh_lora_plan = staticmethod(refresh_lora_plan)
    prepare = staticmethod(reference.prepare)  # native kernels need no compilation at run time

    @property
    def name(self) -> str:
        return f"native {self._library.name}{' with AMX' if self._library.has_tiles else ''}"

    @property
    def has_fast_bfloat16(self) -> bool:
        return self._library.has_tiles

    def make_recorder(self, max_rows: int) -> "CpuRecorder":
        return CpuRecorder(self, max_rows)

    def record(self, run: Callable[[], torch.Tensor], rows: int, buffers: BufferPool) -> CpuGraph:
        """Record a model run, as documented in `Recorder.record`. Intermediate tensors use `buffers`."""
        library, recording = self._library, Recording(self._library, buffers, rows)
        self._library = recording.library
        try:
            with recording:
                output = run()
        finally:
            self._library = library
        return recording.finish(output)


class CpuRecorder:
    """Records graphs for CPUs. All graphs share one buffer pool."""

    def __init__(self, ops: CpuOps, max_rows: int) -> None:
        self._ops = ops
        self.buffers = BufferPool(max_rows)

    def record(self, run: Callable[[], torch.Tensor], rows: int) -> CpuGraph:
        return self._ops.record(run, rows, self.buffers)
