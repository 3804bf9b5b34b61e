"""Records all layers of a step as a graph, and replays the graph with one call.

On a GPU, CUDA graphs for decode steps and mixed steps are captured at startup for some sizes, and steps are padded to
the next size. On a CPU, one `CpuGraph` per decode batch size is recorded when the size is first used. The embedding and
the LM head are not part of the graphs.
"""

import itertools
import logging
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from lorax_server.adapters.batch import AdapterBatchData, AdapterBatchMetadata
from lorax_server.kernels import RecordedGraph, UnrecordableError
from lorax_server.layers.attention import KVCache, PagedContext, Seqlen
from lorax_server.models.custom_modeling.paged import PagedCausalLM
from lorax_server.plan import StepPlan
from lorax_server.worker.adapter_memory import AdapterMemory
from lorax_server.worker.inputs import SlotTables, StaticInputs, StepTokens
from lorax_server.worker.model_info import reserve_rotary, rotary_capacity

logger = logging.getLogger(__name__)

_Segments = tuple[list[int], list[int]]

STEP_PRIORITY = -1  # CUDA stream priority, higher than adapter preparation (0, the lowest)

DECODE_GRAPH_SIZES: tuple[int, ...] = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 257, 32))
# Sizes are coarse, because padding is cheap compared with prompts. Larger steps do not benefit from graphs.
MIXED_GRAPH_SIZES: tuple[int, ...] = (
    *(16, 32, 64, 96, 128, 192),
    *range(256, 512, 64),
    *range(512, 1024, 128),
    *range(1024, 2305, 256),
)
MAX_GRAPH_SEQS = 256  # maximum number of sequences in a step with a graph
MAX_CPU_GRAPH_TOKENS = 64  # in larger steps, the Python overhead is negligible


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the decode batch sizes for which graphs are captured, in ascending order."""
    return _truncate_sizes(DECODE_GRAPH_SIZES, max_num_seqs)


def _truncate_sizes(ladder: Sequence[int], max_size: int) -> list[int]:
    largest = min(max_size, ladder[-1])
    return [*(size for size in ladder if size < largest), largest]


class GraphSizes(NamedTuple):
    """The token counts for which graphs are captured, in ascending order. An empty list disables graphs for this kind
    of step.
    """

    decode: Sequence[int] = ()
    mixed: Sequence[int] = ()

    @classmethod
    def choose(cls, max_num_seqs: int, step_tokens: int) -> "GraphSizes":
        return cls(graph_sizes(max_num_seqs), _truncate_sizes(MIXED_GRAPH_SIZES, step_tokens))

    @classmethod
    def choose_for_cpu(cls) -> "GraphSizes":
        return cls(range(1, MAX_CPU_GRAPH_TOKENS + 1))

    def for_step(self, tokens: StepTokens) -> Sequence[int]:
        """Return the graph sizes for this kind of step (decode or mixed)."""
        return self.decode if tokens.is_single else self.mixed


class GraphKey(NamedTuple):
    """Identifies a graph by size, kind of step and use of adapters."""

    size: int  # number of tokens
    is_mixed: bool = False
    has_adapters: bool = False

    @property
    def num_seqs(self) -> int:
        return min(self.size, MAX_GRAPH_SEQS)

    @property
    def is_large(self) -> bool:
        """Return True if the step uses prefill kernels.

        These kernels plan LoRA on the host, and running them takes time even if no adapter is used.
        """
        return self.size > DECODE_GRAPH_SIZES[-1]


class _Graph(NamedTuple):
    """A captured or recorded graph."""

    graph: torch.cuda.CUDAGraph | RecordedGraph
    hidden: torch.Tensor  # output
    context: PagedContext  # keeps the input tensors alive


class StepGraphs:
    """The graphs of a model's layers. Each size has one graph with adapters and one graph without adapters.

    Small mixed steps have only one graph per size, with adapters if adapters are enabled. With `capture=False` (for
    tests), the layers run eagerly on the same padded inputs.
    """

    def __init__(
        self,
        model: PagedCausalLM,
        kv_cache: KVCache,
        tables: SlotTables,
        memory: AdapterMemory | None,
        sizes: GraphSizes,
        *,
        capture: bool = True,
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._memory = memory
        self._sizes = sizes
        max_tokens = max(*sizes.decode, *sizes.mixed, 1)
        self._inputs = StaticInputs(tables, max_tokens, min(max_tokens, MAX_GRAPH_SEQS))
        self._embedding: PagedContext | None = None  # context of the last embedding call
        self._longest = tables.token_ids.shape[1] - 1
        self._x = self._embed(torch.zeros_like(self._inputs.token_indices), None).clone()
        self._graphs: dict[GraphKey, _Graph] = {}
        self._planned: dict[GraphKey, bytes] = {}  # adapters of each graph's last replay
        self._capture = capture
        self._recorder = model.ops.make_recorder(max_tokens) if capture else None  # None for CUDA graphs
        # Graph memory for each size, largest first, for decode steps and then for mixed steps.
        self.num_bytes: list[int] = []
        self._rotary_capacity = rotary_capacity(model)
        if capture and self._recorder is None:
            self._capture_all()

    @property
    def has_cpu_graphs(self) -> bool:
        """Return True if decode steps run as CPU graphs."""
        return self._recorder is not None and bool(self._sizes.decode)

    def find(self, tokens: StepTokens, adapter_data: AdapterBatchData | None) -> GraphKey | None:
        """Return the key of the graph for a step, or None if the step must run without a graph.

        On CPUs, record the graph if it does not exist yet.
        """
        if adapter_data is not None and adapter_data.lora.changes(
            adapter_data.find_targets(self._model.unrecorded_targets)
        ):
            return None
        count, is_mixed, sizes = len(tokens.slots), not tokens.is_single, self._sizes.for_step(tokens)
        if not sizes or count > sizes[-1] or len(tokens.lengths) > MAX_GRAPH_SEQS:
            return None
        key = GraphKey(sizes[bisect_left(sizes, count)], is_mixed, adapter_data is not None)
        if key.is_large:
            return key if adapter_data is None or adapter_data.lora.fits_graph else None
        if is_mixed:
            return key._replace(has_adapters=self._memory is not None)
        if self._recorder is None:
            return key
        self._reserve_rotary(max(tokens.lengths.tolist()))
        return key if key in self._graphs or self._record(key) else None

    def run(
        self, key: GraphKey, plan: StepPlan, tokens: StepTokens, adapter_data: AdapterBatchData | None
    ) -> torch.Tensor:
        """Run a step with this graph, and return the hidden states of all tokens."""
        count = len(tokens.slots)
        input_ids = self._inputs.write(plan, tokens, key.num_seqs)
        self._x[:count] = self._embed(input_ids, adapter_data)
        if not self._capture:
            return self._run_eager(key, adapter_data)[:count]
        graph = self._graphs[key]
        if key.has_adapters:
            self._plan(key, graph, plan.adapter_indices[tokens.layout.sequences].tobytes(), adapter_data)
        graph.graph.replay()
        return graph.hidden[:count]

    def invalidate_adapters(self) -> None:
        """Discard LoRA plans after adapters were loaded, unloaded or moved."""
        self._planned.clear()

    def _plan(self, key: GraphKey, graph: _Graph, adapters: bytes, adapter_data: AdapterBatchData | None) -> None:
        """Refresh the graph's LoRA plan if the adapters of the batch have changed since the last replay."""
        if self._planned.get(key) != adapters:
            assert graph.context.adapter_data is not None
            self._planned.pop(key, None)  # stays invalid if the refresh runs out of memory
            lora = graph.context.adapter_data.lora
            self._model.ops.refresh_lora_plan(lora, lora if adapter_data is None else adapter_data.lora)
            self._planned[key] = adapters

    def _run_eager(self, key: GraphKey, adapter_data: AdapterBatchData | None) -> torch.Tensor:
        """Run the layers of this graph eagerly, and return the hidden states.

        Ops that cannot record graphs need the batch's adapters on the host.
        """
        layers, x = self._model.model, self._x[: key.size]
        data = self._describe(key.size, _pad(adapter_data, key.size)) if key.has_adapters else None
        if data is not None and self._model.ops.records_graphs:
            captured = self._describe(key.size)
            layers.run_layers(x, self._context(key, captured))  # creates the LoRA plan that is refreshed below
            self._model.ops.refresh_lora_plan(captured.lora, data.lora)
            data = captured
        return layers.run_layers(x, self._context(key, data))

    # --- Contexts with static tensors ---------------------------------------------------------------------------------

    def _context(self, key: GraphKey, adapter_data: AdapterBatchData | None, max_position: int = 1) -> PagedContext:
        """Return the context for a padded step. Padding sequences have no tokens."""
        inputs, seqs, tokens = self._inputs, slice(key.num_seqs), slice(key.size)
        return self._model.make_context(
            self._kv_cache,
            Seqlen(inputs.input_lengths[seqs], inputs.cache_lengths[seqs]),
            inputs.position_ids[tokens],
            block_tables=inputs.block_tables[seqs],
            slots=inputs.kv_slots[tokens],
            cu_seqlens=inputs.cu_seqlens[: key.num_seqs + 1] if key.is_mixed else None,
            token_prompt_lengths=inputs.prompt_lengths[tokens],
            stores_all=key.is_mixed,  # all keys and values except padding are stored
            in_graph=True,
            max_position=max_position,
            adapter_data=adapter_data,
        )

    def _describe(self, size: int, segments: _Segments | None = None) -> AdapterBatchData:
        """Return the adapter data of a padded batch. In graphs, `segments` is None, because the segments change in each
        replay.
        """
        assert self._memory is not None
        padded = AdapterBatchMetadata(self._inputs.adapter_indices[:size], *(segments or ([], [])))
        return AdapterBatchData(padded, self._memory.arena, in_graph=segments is None)

    def _embed(self, input_ids: torch.Tensor, adapter_data: AdapterBatchData | None) -> torch.Tensor:
        known = self._embedding
        if known is None or len(known.position_ids) != len(input_ids) or known.adapter_data is not adapter_data:
            self._embedding = known = self._context(GraphKey(len(input_ids)), adapter_data, self._longest)
        return self._model.model.embed(input_ids, known)

    # --- CPU graphs ---------------------------------------------------------------------------------------------------

    def _record(self, key: GraphKey) -> bool:
        """Record a CPU graph and return True. If recording fails, disable all CPU graphs and return False."""
        assert self._recorder is not None
        adapter_data = self._describe(key.size) if key.has_adapters else None
        if adapter_data is not None:
            self._model.ops.refresh_lora_plan(adapter_data.lora, adapter_data.lora)  # before recording starts
        context = self._context(key, adapter_data)
        run = partial(self._model.model.run_layers, self._x[: key.size], context)
        try:
            program = self._recorder.record(run, key.size)
        except UnrecordableError as what:
            logger.info("steps run without CPU graphs: %s cannot be recorded", what)
            self._sizes = GraphSizes()
            return False
        self._graphs[key] = _Graph(program, program.output, context)
        return True

    def _reserve_rotary(self, length: int) -> None:
        """Grow the RoPE tables if necessary. This discards all graphs, because they contain the old addresses."""
        if length > self._rotary_capacity:
            self._rotary_capacity = max(length, 2 * self._rotary_capacity)
            reserve_rotary(self._model, self._rotary_capacity)
            self._graphs.clear()
            self._planned.clear()

    # --- Capture ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _capture_all(self) -> None:
        """Capture all graphs, largest first, so that smaller graphs reuse the memory of the largest graph."""
        device, start = self._model.device, time.monotonic()
        used = [_get_used_bytes(device)]
        pool: Any = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(device, priority=STEP_PRIORITY)  # captured kernels keep the stream's priority
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for keys in self._list_keys():
                for key in keys:
                    self._graphs[key] = self._capture_one(key, pool)
                used.append(_get_used_bytes(device))
        torch.cuda.current_stream(device).wait_stream(stream)
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # releases the capture stream's cache
        self.num_bytes = [after - before for before, after in itertools.pairwise(used)]
        num_seqs, tokens = (", ".join(map(str, sizes)) for sizes in self._sizes)
        seconds, num_bytes = time.monotonic() - start, sum(self.num_bytes)
        logger.info(
            "captured graphs for decode batches of %s and mixed steps of %s tokens in %.1f s (%d bytes)",
            num_seqs,
            tokens,
            seconds,
            num_bytes,
        )

    def _list_keys(self) -> Iterator[list[GraphKey]]:
        """Yield the graph keys of each size, largest first, for decode steps and then for mixed steps."""
        for is_mixed, sizes in ((False, self._sizes.decode), (True, self._sizes.mixed)):
            for size in reversed(sizes):
                plain, adapted = GraphKey(size, is_mixed), GraphKey(size, is_mixed, has_adapters=True)
                if self._memory is None:
                    yield [plain]
                else:
                    yield [adapted] if is_mixed and not plain.is_large else [plain, adapted]

    def _capture_one(self, key: GraphKey, pool: Any) -> _Graph:
        layers, x = self._model.model, self._x[: key.size]
        adapter_data = self._describe(key.size) if key.has_adapters else None
        # The first graph of each type runs all layers. Later graphs only need the kernels that depend on the size.
        is_first = all(key._replace(size=0) != known._replace(size=0) for known in self._graphs)
        count = None if is_first else layers.num_warmup_layers
        layers.run_layers(x, self._context(key, adapter_data), count)  # compile kernels before the capture
        torch.cuda.current_stream().synchronize()
        # A new context, so that values derived from lengths are computed inside the graph.
        context, graph = self._context(key, adapter_data), torch.cuda.CUDAGraph()
        # `torch.cuda.graph` would run the garbage collector. With "thread_local", other threads may use the device.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        hidden = layers.run_layers(x, context)
        graph.capture_end()
        return _Graph(graph, hidden, context)


def _pad(adapter_data: AdapterBatchData | None, size: int) -> _Segments:
    """Return the segment bounds and adapters of a padded batch. Padding tokens use the base model."""
    if adapter_data is None:
        return [0, size], [0]
    meta = adapter_data.meta
    return [*meta.adapter_segments, size], [*meta.segment_indices, 0]


def measure_graphs(model: PagedCausalLM, memory: AdapterMemory | None, sizes: GraphSizes, tables: SlotTables) -> int:
    """Estimate the memory of all graphs in bytes.

    Call this before the KV cache is allocated. This captures graphs for the two largest sizes with a KV cache of one
    block, and discards them. The largest graph determines the shared memory pool. Each smaller graph is assumed to take
    as much memory as the second largest.
    """
    if not sizes.decode:
        return 0
    kv_cache = model.allocate_kv_cache(1, tables.block_size)
    largest = GraphSizes(sizes.decode[-2:], sizes.mixed[-2:])
    num_bytes = iter(StepGraphs(model, kv_cache, tables, memory, largest).num_bytes)
    torch.cuda.empty_cache()
    total = 0
    for ladder, captured in zip(sizes, largest, strict=True):
        measured = list(itertools.islice(num_bytes, len(captured)))
        total += sum(measured) + sum(measured[1:]) * (len(ladder) - 2)
    return total


def _get_used_bytes(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return total - free
