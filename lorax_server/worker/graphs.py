"""Decode steps as CUDA graphs: the layers are launched by one call, whatever their number.

A graph is captured for some batch sizes, and a batch is padded to the next of them. Embedding and head stay outside:
there the host decides what is computed.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from lorax_server.adapters.batch import AdapterBatchData, AdapterBatchMetadata
from lorax_server.kernels import Ops, reference
from lorax_server.layers.attention import KVCache, PagedContext, Seqlen
from lorax_server.models.custom_modeling.paged import PagedCausalLM
from lorax_server.plan import StepPlan
from lorax_server.worker.adapter_memory import AdapterMemory
from lorax_server.worker.inputs import DecodeInputs, RowTables

logger = logging.getLogger(__name__)

LADDER = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 257, 32))


def graph_sizes(max_rows: int) -> list[int]:
    """Return the batch sizes that have a graph, in ascending order."""
    largest = min(max_rows, LADDER[-1])
    return [*(size for size in LADDER if size < largest), largest]


def can_capture(ops: Ops) -> bool:
    """Return whether kernels read nothing on the host, so that a graph may launch them: the reference ones do."""
    return ops is not reference


class _Graph(NamedTuple):
    """A captured batch size."""

    graph: torch.cuda.CUDAGraph
    hidden: torch.Tensor  # its output
    context: PagedContext  # holds the tensors that it reads


class DecodeGraphs:
    """Graphs of a model's layers, one for each size, and another where there are adapters.

    Without `capture` the same padded inputs go through the layers one by one: that is for tests on a CPU.
    """

    def __init__(
        self,
        model: PagedCausalLM,
        kv_cache: KVCache,
        tables: RowTables,
        memory: AdapterMemory | None,
        sizes: Sequence[int],
        *,
        capture: bool = True,
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._memory = memory
        self._sizes = sizes
        self.max_rows = sizes[-1]
        self._inputs = DecodeInputs(tables, self.max_rows)
        self._x = self._embed(torch.zeros_like(self._inputs.rows), None, 1).clone()
        self._graphs: dict[tuple[int, bool], _Graph] = {}
        self._planned: dict[int, bytes] = {}  # by size: the adapters that its graph was last planned for
        self._capture = capture
        self.num_bytes: list[int] = []  # that the graphs of each size take, those of the largest first
        if capture:
            self._capture_all()

    @torch.inference_mode()
    def run(self, plan: StepPlan, adapter_data: AdapterBatchData | None) -> torch.Tensor:
        """Return the hidden states after the one token of each sequence."""
        count = len(plan.rows)
        size = self._sizes[bisect_left(self._sizes, count)]
        input_ids = self._inputs.write(plan, size)
        self._x[:count] = self._embed(input_ids, adapter_data, int(plan.starts.max()) + 1)
        if not self._capture:
            data = adapter_data and self._describe(size, adapter_data.meta)
            return self._model.model.run_layers(self._x[:size], self._context(size, data))[:count]
        graph = self._graphs[size, adapter_data is not None]
        if adapter_data is not None:
            self._plan(size, graph, plan.adapter_indices.tobytes())
        graph.graph.replay()
        return graph.hidden[:count]

    def forget_adapters(self) -> None:
        """Note that adapters have come, gone or moved: the table is another."""
        self._planned.clear()

    def _plan(self, size: int, graph: _Graph, adapters: bytes) -> None:
        """Let the kernels work out again what they have derived of a batch's adapters, if it is not the last one's."""
        if self._planned.get(size) != adapters:
            assert graph.context.adapter_data is not None
            lora = graph.context.adapter_data.lora
            self._model.ops.plan_lora(lora, lora)
            self._planned[size] = adapters

    # --- Contexts: the same tensors for every batch of one size -------------------------------------------------------

    def _context(self, size: int, adapter_data: AdapterBatchData | None, max_position: int = 1) -> PagedContext:
        inputs, rows = self._inputs, slice(size)
        lengths = Seqlen(
            inputs.input_lengths[rows], inputs.cache_lengths[rows], prompt_lengths=inputs.prompt_lengths[rows]
        )
        return self._model.make_context(
            self._kv_cache,
            lengths,
            inputs.position_ids[rows],
            block_tables=inputs.block_tables[rows],
            slots=inputs.slots[rows],
            max_position=max_position,
            adapter_data=adapter_data,
        )

    def _describe(self, size: int, meta: AdapterBatchMetadata | None = None) -> AdapterBatchData:
        """Describe the adapters of a padded batch. A graph knows them on the device only."""
        assert self._memory is not None
        bounds: list[int] = []
        adapters: list[int] = []
        if meta is not None:
            bounds, adapters = [*meta.adapter_segments, size], [*meta.segment_indices, 0]
        padded = AdapterBatchMetadata(self._inputs.adapter_indices[:size], bounds, adapters)
        return AdapterBatchData(padded, self._memory.arena)

    def _embed(self, input_ids: torch.Tensor, adapter_data: AdapterBatchData | None, max_position: int) -> torch.Tensor:
        context = self._context(len(input_ids), adapter_data, max_position)
        return self._model.model.embed(input_ids, context)

    # --- Capture ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _capture_all(self) -> None:
        """Capture every size, the largest first: the others then find their memory in its pool."""
        device, start = self._model.device, time.monotonic()
        used = [_used_bytes(device)]
        pool: Any = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for size in reversed(self._sizes):
                self._graphs[size, False] = self._capture_one(size, None, pool)
                if self._memory is not None:
                    self._graphs[size, True] = self._capture_one(size, self._describe(size), pool)
                used.append(_used_bytes(device))
        torch.cuda.current_stream(device).wait_stream(stream)
        torch.cuda.synchronize(device)
        self.num_bytes = [after - before for before, after in pairwise(used)]
        sizes, seconds = ", ".join(map(str, self._sizes)), time.monotonic() - start
        logger.info("captured graphs of %s rows in %.1f s; they take %d bytes", sizes, seconds, sum(self.num_bytes))

    def _capture_one(self, size: int, adapter_data: AdapterBatchData | None, pool: Any) -> _Graph:
        layers, x = self._model.model, self._x[:size]
        layers.run_layers(x, self._context(size, adapter_data))  # compiles kernels, which cannot be captured
        torch.cuda.current_stream().synchronize()
        # Another context: what layers derive of lengths must be in the graph. What kernels derive of adapters stays.
        context, graph = self._context(size, adapter_data), torch.cuda.CUDAGraph()
        # Not `torch.cuda.graph`, which collects garbage each time. Other threads may use the device meanwhile.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        hidden = layers.run_layers(x, context)
        graph.capture_end()
        return _Graph(graph, hidden, context)


def measure_graphs(
    model: PagedCausalLM, memory: AdapterMemory | None, sizes: Sequence[int], max_length: int, block_size: int
) -> int:
    """Return the bytes that graphs of these sizes will take beside the cache, whose place they must know.

    So those of the two largest sizes are captured over a cache of one block, and given up. The largest take the pool
    that all share. Each of the others takes what the second largest do beyond it.
    """
    if not sizes:
        return 0
    tables = RowTables(1, max_length, block_size, model.device)
    kv_cache = model.allocate_kv_cache(1, block_size)
    num_bytes = DecodeGraphs(model, kv_cache, tables, memory, sizes[-2:]).num_bytes
    torch.cuda.empty_cache()
    return num_bytes[0] + num_bytes[-1] * (len(sizes) - 1)


def _used_bytes(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return total - free
