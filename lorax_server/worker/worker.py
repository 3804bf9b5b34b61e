"""One rank: its model and its adapters, which follow the engine's plans."""

import json
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch

from lorax_server.adapters.host import UNIT_BYTES
from lorax_server.config import EngineConfig
from lorax_server.distributed import FakeGroup, ProcessGroup, TorchGroup
from lorax_server.errors import BusyError, ConfigError, LoraxError
from lorax_server.files.names import MODEL_CONFIG_FILE
from lorax_server.kernels import select_ops
from lorax_server.kernels.device import is_host, make_stream, use_stream
from lorax_server.layers.targets import collect_adapter_targets
from lorax_server.models.custom_modeling.paged import PagedCausalLM
from lorax_server.models.registry import MODELS, PADDED_ONLY_FIELDS, get_model, load_config
from lorax_server.phases import Phases
from lorax_server.plan import (
    AdapterOp,
    Capabilities,
    Drop,
    Load,
    Move,
    Prepare,
    Prepared,
    StepMasks,
    StepPlan,
    StepResult,
    Unload,
)
from lorax_server.worker.adapter_memory import AdapterMemory
from lorax_server.worker.copier import Copier, StreamLane
from lorax_server.worker.facts import describe, find_max_length, fix_rotary
from lorax_server.worker.graphs import STEP_PRIORITY, GraphSizes, graph_sizes
from lorax_server.worker.memory import (
    adapter_bytes,
    adapter_rows,
    count_blocks,
    explain_lack,
    find_max_num_seqs,
    lacks_memory,
    measure_needs,
    report_memory,
    resolve_sizes,
)
from lorax_server.worker.preparer import Preparer
from lorax_server.worker.runner import PagedRunner
from lorax_server.worker.warm_up import CacheShape, warm_up

logger = logging.getLogger(__name__)

CPU_STEP_TOKENS, GPU_STEP_TOKENS = 512, 4096
GPU_MIXED_TOKENS = 2048  # some 50 ms of an 8B on an H200


class Runner(Protocol):
    """Runs steps, one after the other."""

    def submit(self, plan: StepPlan) -> Any: ...

    def mask(self, ticket: Any, masks: StepMasks) -> Any:
        """Let a masked step choose its tokens; the ticket that is returned replaces its own."""

    def collect(self, ticket: Any) -> StepResult: ...


class Worker:
    """Executes plans: first the operations on adapters, then the step."""

    def __init__(
        self,
        capabilities: Capabilities,
        runner: Runner,
        memory: AdapterMemory | None = None,
        preparer: Preparer | None = None,
        *,
        can_retry: bool = False,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """With `can_retry`, a step that ends in the middle for lack of memory may be submitted again. On a GPU, steps
        and what is done to adapters between them run on `stream`, one after the other."""
        self.capabilities = capabilities
        self._stream = stream
        self._can_retry = can_retry
        self.preparer = preparer
        self._runner = runner
        self._memory = memory
        self._loading: list[int] = []  # adapter indices whose load the engine has not heard the end of
        self._tickets: deque[Any] = deque()

    def on_news(self, notify: Callable[[], None]) -> None:
        """Call `notify`, on any thread, when there is something for `take_prepared` or `take_loaded`."""
        if self.preparer is not None:
            self.preparer.notify = notify
        if self._memory is not None:
            self._memory.on_arrival(notify)

    def submit(self, plan: StepPlan) -> LoraxError | None:
        """Start a step. If there is no memory for its sequences, even when none is kept for later, compute nothing, and
        return the error for the one that asks for too much."""
        with use_stream(self._stream):
            for op in plan.adapter_ops:
                self._do(op)
            if self._memory is not None:
                for index in set(plan.adapter_indices.tolist()) - {0}:
                    self._memory.wait_for(index)
            return self._run(lambda: self._tickets.append(self._runner.submit(plan)), plan)

    def mask(self, masks: StepMasks) -> LoraxError | None:
        """Let the last step choose its tokens. Errors are those of `submit`."""
        ticket = self._tickets.pop()
        with use_stream(self._stream):
            return self._run(lambda: self._tickets.append(self._runner.mask(ticket, masks)), ticket.plan)

    def _run(self, work: Callable[[], None], plan: StepPlan) -> LoraxError | None:
        if self._try(work):
            return None
        torch.cuda.empty_cache()
        if self._try(work):
            return None
        logger.warning("a step of %d tokens in %d sequences has no memory", plan.num_tokens, len(plan.slots))
        self._tickets.append(self._runner.submit(plan.without_sequences()))
        return BusyError(
            "the device has too little memory for this request beside the others; try again, or ask for less: a "
            "shorter prompt, fewer alternatives, no log probabilities of the prompt"
        )

    def _try(self, work: Callable[[], None]) -> bool:
        """Do a part of a step; False if there is no memory. The error must be gone before the next try: it holds
        tensors."""
        try:
            work()
        except RuntimeError as error:
            if not self._can_retry or not lacks_memory(error):
                raise
            return False
        return True

    def collect(self) -> StepResult:
        """Wait for the oldest step. On a GPU, adapters are prepared meanwhile, and not while the next one is made."""
        beside = self.preparer if self._stream is not None else None
        if beside is not None:
            beside.go_on()
        result = self._runner.collect(self._tickets.popleft())
        if beside is not None and self._tickets:
            beside.rest()
        loaded = self.take_loaded()
        return replace(result, loaded=loaded) if loaded else result

    def take_loaded(self) -> list[int]:
        """Return the adapter indices whose load has ended since this, or the result of a step, last told."""
        if not self._loading:
            return []
        loaded = [index for index in self._loading if self._memory and self._memory.is_loaded(index)]
        self._loading = [index for index in self._loading if index not in loaded]
        return loaded

    def forget(self) -> None:
        """Forget the oldest step and its loads: the first rank reports them."""
        self._tickets.popleft()
        self._loading.clear()

    def take_prepared(self) -> list[Prepared]:
        return self.preparer.take_results() if self.preparer else []

    def close(self) -> None:
        if self.preparer is not None:
            self.preparer.close()
        if self._memory is not None:
            self._memory.close()

    def _do(self, op: AdapterOp) -> None:
        assert self._memory is not None
        assert self.preparer is not None
        match op:
            case Prepare():
                self.preparer.enqueue(op.spec)
            case Load():
                self._memory.load(op.index, self.preparer.get(op.identity), op.first_unit)
                self._loading.append(op.index)
            case Move():
                self._memory.move(op.index, op.source, op.target)
            case Unload():
                self._memory.unload(op.index)
                self._loading = [index for index in self._loading if index != op.index]
            case Drop():
                self.preparer.drop(op.identity)


def build_worker(config: EngineConfig, group: ProcessGroup | None = None, phases: Phases | None = None) -> Worker:
    """Load this rank's part of the model, and allocate the memory that it may use."""
    if is_paged(config):
        group, phases = group or FakeGroup(), phases or Phases()
        with phases.measure("imports"):
            load_config(config.model)  # which may have to ask transformers
        with phases.measure("kernels"):
            ops = select_ops(torch.device(config.model.device))
        with phases.measure("weights"):
            paged = get_model(config.model, group, ops)
        return paged_worker(paged, config, group, phases)
    from lorax_server.worker.padded import build_padded  # noqa: PLC0415 - importing transformers' models takes seconds

    return Worker(*build_padded(config))


def is_paged(config: EngineConfig) -> bool:
    """Return whether we have a model of our own for it. Errors in a config are reported when it is loaded."""
    try:
        stored = json.loads((config.model.path / MODEL_CONFIG_FILE).read_text())
        model_type = stored.get("model_type")
        return model_type in MODELS and not stored.get(PADDED_ONLY_FIELDS.get(model_type))
    except (OSError, ValueError, AttributeError, TypeError):
        return True


def paged_worker(
    model: PagedCausalLM, config: EngineConfig, group: ProcessGroup, phases: Phases | None = None
) -> Worker:
    """Build a worker around this rank's part of a model. Refuse where the device's memory does not suffice."""
    config = resolve_sizes(config, model)
    num_units = _fewest(adapter_bytes(config, model.device) // UNIT_BYTES, group, model.device)
    copier = Copier(StreamLane(model.device)) if num_units and not is_host(model.device) else None
    try:
        memory = _make_memory(model, num_units, group, copier) if num_units else None
        return _build_paged(model, config, group, phases or Phases(), memory)
    except BaseException as error:
        if copier is not None:
            copier.close()
        if isinstance(error, torch.OutOfMemoryError):
            raise explain_lack(model, num_units * UNIT_BYTES) from error
        raise


def _make_memory(model: PagedCausalLM, num_units: int, group: ProcessGroup, copier: Copier | None) -> AdapterMemory:
    targets, dtype = collect_adapter_targets(model), model.lm_head.linear.weight.dtype
    num_rows = adapter_rows(num_units * UNIT_BYTES, len(targets))
    return AdapterMemory(targets, dtype, model.device, num_units, num_rows, group.rank() > 0, copier)


def _build_paged(
    model: PagedCausalLM, config: EngineConfig, group: ProcessGroup, phases: Phases, memory: AdapterMemory | None
) -> Worker:
    device, is_gpu = model.device, not is_host(model.device)
    max_num_seqs = _fewest(find_max_num_seqs(config, device), group, device)
    step_tokens = max(config.max_step_tokens or (GPU_STEP_TOKENS if is_gpu else CPU_STEP_TOKENS), max_num_seqs)
    sizes = GraphSizes.choose(max_num_seqs, step_tokens) if uses_graphs(model, config, group) else GraphSizes()
    if uses_programs(model, group):
        sizes = GraphSizes.choose_for_cpu()
    num_units = 0 if memory is None else memory.num_units
    shape = CacheShape(min(config.max_length or find_max_length(model), find_max_length(model)), config.block_size)
    if is_gpu:
        fix_rotary(model, shape.max_length)
    with phases.measure("kernels"):
        warm_up(
            model,
            memory,
            {max_num_seqs} if sizes.decode else {*graph_sizes(max_num_seqs), max_num_seqs},
            step_tokens,
            shape,
        )
    with phases.measure("memory"):
        needs = measure_needs(model, memory, sizes, max_num_seqs, step_tokens, shape)
        num_blocks = _fewest(count_blocks(model, config, max_num_seqs, shape.max_length, needs), group, device)
    max_length = min(shape.max_length, num_blocks * config.block_size)
    capabilities = replace(
        describe(model),
        max_num_seqs=max_num_seqs,
        max_length=max_length,
        max_step_tokens=step_tokens,
        max_mixed_tokens=config.max_mixed_tokens or (GPU_MIXED_TOKENS if is_gpu else None),
        num_blocks=num_blocks,
        block_size=shape.block_size,
        depth=config.depth or (2 if is_gpu else 1),
        is_synchronous=not is_gpu,
        num_adapter_units=num_units,
        max_adapters=0 if memory is None else len(memory.arena.host_table) - 1,
    )
    with phases.measure("graphs"):
        runner = PagedRunner(
            model,
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_num_seqs=max_num_seqs,
            max_length=max_length,
            memory=memory,
            graph_sizes=sizes,
        )
    preparer = None if memory is None else _make_preparer(model, group)
    report_memory(model, config, memory, num_blocks, needs)
    stream = make_stream(device, STEP_PRIORITY)
    return Worker(capabilities, runner, memory, preparer, can_retry=group.size() == 1, stream=stream)


def _make_preparer(model: PagedCausalLM, group: ProcessGroup) -> Preparer:
    host_group = group.make_host_group() if isinstance(group, TorchGroup) else group
    targets, dtype = collect_adapter_targets(model), model.lm_head.linear.weight.dtype
    return Preparer(targets, dtype, host_group, max_rank=model.ops.max_lora_rank)


def uses_graphs(model: PagedCausalLM, config: EngineConfig, group: ProcessGroup) -> bool:
    """Tell whether small steps run as CUDA graphs. Refuse where they were asked for and cannot be."""
    is_gpu = not is_host(model.device)
    if config.cuda_graphs is False or (config.cuda_graphs is None and not is_gpu):
        return False
    if not is_gpu:
        problem = "need a GPU"
    elif group.size() > 1:
        problem = "are for one GPU so far"
    elif not model.ops.records_graphs:
        problem = "need kernels for this GPU, and there are none"
    else:
        return True
    if config.cuda_graphs:
        raise ConfigError(f"cuda_graphs: they {problem}; leave the setting out, or make it false")
    logger.info("steps run without CUDA graphs: they %s", problem)
    return False


def uses_programs(model: PagedCausalLM, group: ProcessGroup) -> bool:
    """Tell whether decode steps run as programs of a CPU's kernels.

    Ranks wait for each other between kernels, and a float8 cache is read by plain torch.
    """
    has_own_dtype = model.kv_dtype == model.lm_head.linear.weight.dtype
    return is_host(model.device) and model.ops.records_graphs and has_own_dtype and group.size() == 1


def _fewest(count: int, group: ProcessGroup, device: torch.device) -> int:
    """Return the lowest count of all ranks: one engine hands out the blocks and units of all of them."""
    return count if group.size() == 1 else int(group.all_gather(torch.tensor([count], device=device), dim=0).min())
