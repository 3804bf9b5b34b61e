"""Steps as graphs: the layers are launched by one call, whatever their number.

A graph is captured for some numbers of tokens, and a step is padded to the next of them. There are two kinds: of decode
steps, in which each sequence has one token, and of mixed steps, in which sequences have any number. Embedding and head
stay outside: there the host decides what is computed.

On a GPU they are CUDA graphs, captured before the first step. On a CPU they are programs of its kernels, of decode
steps only, also of those in which answers have several tokens (`unroll`): one for every number of tokens, so that
nothing is padded. Each is captured when it is first needed.
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
from lorax_server.worker.facts import find_rotary_room, fix_rotary
from lorax_server.worker.inputs import FixedInputs, SlotTables, StepTokens

logger = logging.getLogger(__name__)

_Segments = tuple[list[int], list[int]]

STEP_PRIORITY = -1  # of streams: before the preparation of adapters, which has 0, the lowest

LADDER: tuple[int, ...] = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 257, 32))
# Coarse: where prompts are, a few tokens more cost little. More tokens keep a GPU busy for longer than launches take.
MIXED_LADDER: tuple[int, ...] = (
    *(16, 32, 64, 96, 128, 192),
    *range(256, 512, 64),
    *range(512, 1024, 128),
    *range(1024, 2305, 256),
)
MIXED_SEQUENCES = 256  # the most of a mixed step with a graph
CPU_ROWS = 64  # the most tokens of a step with a program: more keep a CPU busy for much longer than Python takes


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes of decode steps that have a graph, in ascending order."""
    return _cut_ladder(LADDER, max_num_seqs)


def _cut_ladder(ladder: Sequence[int], most: int) -> list[int]:
    largest = min(most, ladder[-1])
    return [*(size for size in ladder if size < largest), largest]


class GraphSizes(NamedTuple):
    """The numbers of tokens that have a graph, in ascending order; without any, there are no graphs."""

    decode: Sequence[int] = ()
    mixed: Sequence[int] = ()

    @classmethod
    def choose(cls, max_num_seqs: int, step_tokens: int) -> "GraphSizes":
        return cls(graph_sizes(max_num_seqs), _cut_ladder(MIXED_LADDER, step_tokens))

    @classmethod
    def choose_for_cpu(cls) -> "GraphSizes":
        return cls(range(1, CPU_ROWS + 1))

    def of(self, tokens: StepTokens) -> Sequence[int]:
        """Return those of steps of one kind."""
        return self.decode if tokens.is_single else self.mixed


class StepKind(NamedTuple):
    """A kind of step that has a graph."""

    size: int  # tokens
    is_mixed: bool = False
    has_adapters: bool = False

    @property
    def num_seqs(self) -> int:
        return min(self.size, MIXED_SEQUENCES)

    @property
    def is_large(self) -> bool:
        """Return whether kernels take it for a prompt: their part of LoRA costs something without adapters too, and
        learns from the host which token has which adapter."""
        return self.size > LADDER[-1]


class _Graph(NamedTuple):
    """A captured kind of step."""

    graph: torch.cuda.CUDAGraph | RecordedGraph
    hidden: torch.Tensor  # its output
    context: PagedContext  # holds the tensors that it reads


class StepGraphs:
    """Graphs of a model's layers: one for each size, and another where there are adapters. Of mixed steps that are not
    large there is one of each size, with adapters if there can be any.

    Without `capture` the same padded inputs go through the layers one by one: that is for tests.
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
        most = max(*sizes.decode, *sizes.mixed, 1)
        self._inputs = FixedInputs(tables, most, min(most, MIXED_SEQUENCES))
        self._embedding: PagedContext | None = None  # the context of the last step's embedding
        self._longest = tables.token_ids.shape[1] - 1
        self._x = self._embed(torch.zeros_like(self._inputs.places), None).clone()
        self._graphs: dict[StepKind, _Graph] = {}
        self._planned: dict[StepKind, bytes] = {}  # the adapters that a graph was last planned for
        self._capture = capture
        self._recorder = model.ops.make_recorder(most) if capture else None  # None: CUDA graphs
        # Bytes that the graphs of each size take, those of the largest first, then likewise those of mixed steps.
        self.num_bytes: list[int] = []
        self._room = find_rotary_room(model)
        if capture and self._recorder is None:
            self._capture_all()

    @property
    def has_programs(self) -> bool:
        """Tell whether decode steps are programs of a CPU."""
        return self._recorder is not None and bool(self._sizes.decode)

    def find(self, tokens: StepTokens, adapter_data: AdapterBatchData | None) -> StepKind | None:
        """Return the kind of a step, or None if it has no graph."""
        count, is_mixed, sizes = len(tokens.slots), not tokens.is_single, self._sizes.of(tokens)
        if not sizes or count > sizes[-1] or len(tokens.lengths) > MIXED_SEQUENCES:
            return None
        kind = StepKind(sizes[bisect_left(sizes, count)], is_mixed, adapter_data is not None)
        if kind.is_large:
            return kind if adapter_data is None or adapter_data.lora.fits_graph else None
        if is_mixed:
            return kind._replace(has_adapters=self._memory is not None)
        if self._recorder is None:
            return kind
        self._make_room(max(tokens.lengths.tolist()))
        return kind if kind in self._graphs or self._record(kind) else None

    def run(
        self, kind: StepKind, plan: StepPlan, tokens: StepTokens, adapter_data: AdapterBatchData | None
    ) -> torch.Tensor:
        """Return the hidden states after each token of a step of this kind."""
        count = len(tokens.slots)
        input_ids = self._inputs.write(plan, tokens, kind.num_seqs)
        self._x[:count] = self._embed(input_ids, adapter_data)
        if not self._capture:
            return self._run_one_by_one(kind, adapter_data)[:count]
        graph = self._graphs[kind]
        if kind.has_adapters:
            self._plan(kind, graph, plan.adapter_indices[tokens.layout.sequences].tobytes(), adapter_data)
        graph.graph.replay()
        return graph.hidden[:count]

    def forget_adapters(self) -> None:
        """Note that adapters have come, gone or moved: the table is another."""
        self._planned.clear()

    def _plan(self, kind: StepKind, graph: _Graph, adapters: bytes, adapter_data: AdapterBatchData | None) -> None:
        """Let the kernels work out again what they have derived of a batch's adapters, if it is not the last one's."""
        if self._planned.get(kind) != adapters:
            assert graph.context.adapter_data is not None
            self._planned.pop(kind, None)  # there may be no memory in the middle
            lora = graph.context.adapter_data.lora
            self._model.ops.plan_lora(lora, lora if adapter_data is None else adapter_data.lora)
            self._planned[kind] = adapters

    def _run_one_by_one(self, kind: StepKind, adapter_data: AdapterBatchData | None) -> torch.Tensor:
        """Launch what a graph of this kind launches. Ops without graphs need the adapters of the batch on the host."""
        layers, x = self._model.model, self._x[: kind.size]
        data = self._describe(kind.size, _pad(adapter_data, kind.size)) if kind.has_adapters else None
        if data is not None and self._model.ops.records_graphs:
            captured = self._describe(kind.size)
            layers.run_layers(x, self._context(kind, captured))  # derives what is then planned
            self._model.ops.plan_lora(captured.lora, data.lora)
            data = captured
        return layers.run_layers(x, self._context(kind, data))

    # --- Contexts: the same tensors for every batch of one size -------------------------------------------------------

    def _context(self, kind: StepKind, adapter_data: AdapterBatchData | None, max_position: int = 1) -> PagedContext:
        """Describe a padded step: as many sequences as there can be, of which the last have no tokens."""
        inputs, seqs, tokens = self._inputs, slice(kind.num_seqs), slice(kind.size)
        return self._model.make_context(
            self._kv_cache,
            Seqlen(inputs.input_lengths[seqs], inputs.cache_lengths[seqs]),
            inputs.position_ids[tokens],
            block_tables=inputs.block_tables[seqs],
            slots=inputs.kv_slots[tokens],
            cu_seqlens=inputs.cu_seqlens[: kind.num_seqs + 1] if kind.is_mixed else None,
            token_prompt_lengths=inputs.prompt_lengths[tokens],
            stores_all=kind.is_mixed,  # but for padding
            in_graph=True,
            max_position=max_position,
            adapter_data=adapter_data,
        )

    def _describe(self, size: int, segments: _Segments | None = None) -> AdapterBatchData:
        """Describe the adapters of a padded batch; without segments, of one in a graph."""
        assert self._memory is not None
        padded = AdapterBatchMetadata(self._inputs.adapter_indices[:size], *(segments or ([], [])))
        return AdapterBatchData(padded, self._memory.arena, in_graph=segments is None)

    def _embed(self, input_ids: torch.Tensor, adapter_data: AdapterBatchData | None) -> torch.Tensor:
        known = self._embedding
        if known is None or len(known.position_ids) != len(input_ids) or known.adapter_data is not adapter_data:
            self._embedding = known = self._context(StepKind(len(input_ids)), adapter_data, self._longest)
        return self._model.model.embed(input_ids, known)

    # --- Programs of a CPU --------------------------------------------------------------------------------------------

    def _record(self, kind: StepKind) -> bool:
        """Record a kind of step. If that is impossible for one, no step has a graph from now on."""
        assert self._recorder is not None
        adapter_data = self._describe(kind.size) if kind.has_adapters else None
        if adapter_data is not None:
            self._model.ops.plan_lora(adapter_data.lora, adapter_data.lora)  # describes them: not part of the program
        context = self._context(kind, adapter_data)
        run = partial(self._model.model.run_layers, self._x[: kind.size], context)
        try:
            program = self._recorder.record(run, kind.size)
        except UnrecordableError as what:
            logger.info("steps run without programs: %s cannot be recorded", what)
            self._sizes = GraphSizes()
            return False
        self._graphs[kind] = _Graph(program, program.output, context)
        return True

    def _make_room(self, length: int) -> None:
        """Make the tables of angles long enough for a sequence. Programs know where they were."""
        if length > self._room:
            self._room = max(length, 2 * self._room)
            fix_rotary(self._model, self._room)
            self._graphs.clear()
            self._planned.clear()

    # --- Capture ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _capture_all(self) -> None:
        """Capture every size, the largest first: the others then find their memory in its pool."""
        device, start = self._model.device, time.monotonic()
        used = [_used_bytes(device)]
        pool: Any = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(device, priority=STEP_PRIORITY)  # which its kernels keep
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for kinds in self._list_kinds():
                for kind in kinds:
                    self._graphs[kind] = self._capture_one(kind, pool)
                used.append(_used_bytes(device))
        torch.cuda.current_stream(device).wait_stream(stream)
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # of the stream above, which no step uses
        self.num_bytes = [after - before for before, after in itertools.pairwise(used)]
        num_seqs, tokens = (", ".join(map(str, sizes)) for sizes in self._sizes)
        seconds, num_bytes = time.monotonic() - start, sum(self.num_bytes)
        logger.info(
            "captured graphs of %s sequences and of %s tokens of mixed steps in %.1f s; they take %d bytes",
            num_seqs,
            tokens,
            seconds,
            num_bytes,
        )

    def _list_kinds(self) -> Iterator[list[StepKind]]:
        """Yield the kinds of each size, the largest first, then likewise those of mixed steps."""
        for is_mixed, sizes in ((False, self._sizes.decode), (True, self._sizes.mixed)):
            for size in reversed(sizes):
                plain, adapted = StepKind(size, is_mixed), StepKind(size, is_mixed, has_adapters=True)
                if self._memory is None:
                    yield [plain]
                else:
                    yield [adapted] if is_mixed and not plain.is_large else [plain, adapted]

    def _capture_one(self, kind: StepKind, pool: Any) -> _Graph:
        layers, x = self._model.model, self._x[: kind.size]
        adapter_data = self._describe(kind.size) if kind.has_adapters else None
        # The first of its sort runs all layers. Of the others' kernels, only those that depend on the size are new.
        is_first = all(kind._replace(size=0) != known._replace(size=0) for known in self._graphs)
        count = None if is_first else layers.num_warmup_layers
        layers.run_layers(x, self._context(kind, adapter_data), count)  # compiles kernels, which cannot be captured
        torch.cuda.current_stream().synchronize()
        # Another context: what layers derive of lengths must be in the graph. What kernels derive of adapters stays.
        context, graph = self._context(kind, adapter_data), torch.cuda.CUDAGraph()
        # Not `torch.cuda.graph`, which collects garbage each time. Other threads may use the device meanwhile.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        hidden = layers.run_layers(x, context)
        graph.capture_end()
        return _Graph(graph, hidden, context)


def _pad(adapter_data: AdapterBatchData | None, size: int) -> _Segments:
    """Return the bounds and adapters of a batch's segments; padding belongs to the base model."""
    if adapter_data is None:
        return [0, size], [0]
    meta = adapter_data.meta
    return [*meta.adapter_segments, size], [*meta.segment_indices, 0]


def measure_graphs(model: PagedCausalLM, memory: AdapterMemory | None, sizes: GraphSizes, tables: SlotTables) -> int:
    """Return the bytes that graphs of these sizes will take beside the cache, whose place they must know.

    So those of the two largest sizes of each kind are captured over a cache of one block, and given up. The largest
    take the pool that all share. Each of the others takes what the second largest do beyond it.
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


def _used_bytes(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return total - free
