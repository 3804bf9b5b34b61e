"""The worker executes step plans and adapter operations on one rank."""

import json
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch

from lorax_server import model_types
from lorax_server.adapters.host import UNIT_BYTES
from lorax_server.adapters.spec import AdapterSpec
from lorax_server.config import EngineConfig
from lorax_server.distributed import FakeGroup, ProcessGroup, TorchGroup
from lorax_server.errors import BusyError, ConfigError, LoraxError
from lorax_server.files.names import MODEL_CONFIG_FILE
from lorax_server.kernels import select_ops
from lorax_server.kernels.device import is_host, make_stream, use_stream
from lorax_server.layers.targets import collect_adapter_targets
from lorax_server.models.custom_modeling.flash_llama_modeling import SparseMLP
from lorax_server.models.custom_modeling.paged import PagedCausalLM
from lorax_server.models.draft_heads import load_draft_heads
from lorax_server.models.registry import get_model, load_config
from lorax_server.phases import Phases
from lorax_server.plan import (
    AdapterOp,
    Capabilities,
    DropOp,
    LoadOp,
    MoveOp,
    PrepareOp,
    PrepareResult,
    StepMasks,
    StepPlan,
    StepResult,
    UnloadOp,
)
from lorax_server.pooling import PoolingConfig, read_pooling
from lorax_server.weights import Placement
from lorax_server.worker.adapter_memory import AdapterMemory
from lorax_server.worker.copier import Copier, CopyStream
from lorax_server.worker.device_packer import DevicePacker
from lorax_server.worker.expert_balance import ExpertBalance
from lorax_server.worker.graphs import STEP_PRIORITY, GraphSizes, graph_sizes
from lorax_server.worker.memory import (
    adapter_bytes,
    count_adapter_rows,
    count_blocks,
    find_max_num_seqs,
    find_weight_format,
    is_out_of_memory,
    measure_step_memory,
    model_bytes,
    out_of_memory_error,
    report_memory,
    resolve_sizes,
    warn_if_cache_is_small,
)
from lorax_server.worker.model_info import describe_model, find_max_length, reserve_rotary
from lorax_server.worker.pooled_runner import build_pooled_runner
from lorax_server.worker.preparer import Preparer
from lorax_server.worker.runner import PagedRunner
from lorax_server.worker.warm_up import CacheShape, warm_up

logger = logging.getLogger(__name__)

CPU_STEP_TOKENS, GPU_STEP_TOKENS = 512, 4096
GPU_MIXED_TOKENS = 2048  # takes about 50 ms with an 8B model on an H200


class Runner(Protocol):
    """Runs the steps of a model in order."""

    def submit(self, plan: StepPlan) -> Any: ...

    def mask(self, ticket: Any, masks: StepMasks) -> Any:
        """Sample the tokens of a masked step. The returned ticket replaces `ticket`."""

    def collect(self, ticket: Any) -> StepResult: ...


class Worker:
    """Executes step plans on one rank. A plan's adapter operations run before its step."""

    def __init__(
        self,
        capabilities: Capabilities,
        runner: Runner,
        memory: AdapterMemory | None = None,
        preparer: Preparer | None = None,
        *,
        balance: ExpertBalance | None = None,
        can_retry: bool = False,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Create the worker. If `can_retry` is set, a step that runs out of memory is retried.

        On a GPU, steps and adapter operations run in order on `stream`.
        """
        self.capabilities = capabilities
        self._stream = stream
        self._can_retry = can_retry
        self.preparer = preparer
        self._runner = runner
        self._memory = memory
        self._balance = balance
        self._loading: list[int] = []  # adapter indices that are not reported as loaded yet
        self._tickets: deque[Any] = deque()

    def on_event(self, notify: Callable[[], None]) -> None:
        """Register a callback. It is called on any thread when `pop_prepared` or `pop_loaded` has results."""
        if self.preparer is not None:
            self.preparer.notify = notify
        if self._memory is not None:
            self._memory.on_loaded(notify)

    def submit(self, plan: StepPlan) -> LoraxError | None:
        """Start a step. If it runs out of memory and retries are enabled, retry it once.

        If the retry also fails, run the step without sequences and return an error.
        """
        with use_stream(self._stream):
            for op in plan.adapter_ops:
                self._apply_adapter_op(op)
            if self._memory is not None:
                for index in set(plan.adapter_indices.tolist()) - {0}:
                    self._memory.wait_for(index)
            return self._run_with_retry(lambda: self._tickets.append(self._runner.submit(plan)), plan)

    def mask(self, masks: StepMasks) -> LoraxError | None:
        """Sample the tokens of the last submitted step with these masks. Return the same errors as `submit`."""
        ticket = self._tickets.pop()
        with use_stream(self._stream):
            return self._run_with_retry(lambda: self._tickets.append(self._runner.mask(ticket, masks)), ticket.plan)

    def _run_with_retry(self, work: Callable[[], None], plan: StepPlan) -> LoraxError | None:
        if self._try_run(work):
            return None
        torch.cuda.empty_cache()
        if self._try_run(work):
            return None
        logger.warning("out of memory in a step with %d tokens in %d sequences", plan.num_tokens, len(plan.slots))
        self._tickets.append(self._runner.submit(plan.without_sequences()))
        return BusyError(
            "not enough device memory for this request in addition to running requests; retry, or reduce the prompt "
            "length, the number of alternatives or prompt log probabilities"
        )

    def _try_run(self, work: Callable[[], None]) -> bool:
        """Run `work`, and return False if it runs out of memory.

        The exception is released here, because it references tensors.
        """
        try:
            work()
        except RuntimeError as error:
            if not self._can_retry or not is_out_of_memory(error):
                raise
            return False
        return True

    def collect(self) -> StepResult:
        """Wait for the oldest step and return its result. On a GPU, adapter preparation runs only during this wait."""
        preparer = self.preparer if self._stream is not None else None
        if preparer is not None:
            preparer.resume()
        result = self._runner.collect(self._tickets.popleft())
        if preparer is not None and self._tickets:
            preparer.pause()
        if self._balance is not None:
            with use_stream(self._stream):
                result = replace(result, expert_imbalance=self._balance.measure())
        loaded = self.pop_loaded()
        return replace(result, loaded=loaded) if loaded else result

    def pop_loaded(self) -> list[int]:
        """Return the indices of adapters that finished loading since the last call or step result."""
        if not self._loading:
            return []
        loaded = [index for index in self._loading if self._memory and self._memory.is_loaded(index)]
        self._loading = [index for index in self._loading if index not in loaded]
        return loaded

    def discard_oldest(self) -> None:
        """Discard the result of the oldest step, because only rank 0 reports results."""
        self._tickets.popleft()
        self._loading.clear()

    def pack(self, spec: AdapterSpec) -> PrepareResult | None:
        """Pack an in-memory adapter in device memory. Return None if it must be prepared in host memory."""
        return None if self.preparer is None else self.preparer.pack(spec)

    def pop_prepared(self) -> list[PrepareResult]:
        return self.preparer.pop_results() if self.preparer else []

    def close(self) -> None:
        if self.preparer is not None:
            self.preparer.close()
        if self._memory is not None:
            self._memory.close()

    def _apply_adapter_op(self, op: AdapterOp) -> None:
        assert self._memory is not None
        assert self.preparer is not None
        match op:
            case PrepareOp(is_packed=True):
                self.preparer.add_packed(op.spec)
            case PrepareOp():
                self.preparer.enqueue(op.spec)
            case LoadOp():
                self._memory.load(op.index, self.preparer.get(op.identity), op.first_unit)
                if op.is_ordered:
                    self._memory.wait_for(op.index)
                else:
                    self._loading.append(op.index)
            case MoveOp():
                self._memory.move(op.index, op.source, op.target)
            case UnloadOp():
                self._memory.unload(op.index)
                self._loading = [index for index in self._loading if index != op.index]
            case DropOp():
                self.preparer.drop(op.identity)


def build_worker(config: EngineConfig, group: ProcessGroup | None = None, phases: Phases | None = None) -> Worker:
    """Load this rank's shard of the model, and return a worker with allocated memory."""
    pooling = read_pooling(config.model)
    if pooling is not None:
        if config.draft_heads is not None:
            raise ConfigError("draft_heads is only supported for models that generate text")
        return _build_pooled(config, pooling)
    if is_paged(config):
        group, phases = group or FakeGroup(), phases or Phases()
        with phases.measure("imports"):
            load_config(config.model)  # may import transformers
        with phases.measure("kernels"):
            ops = select_ops(torch.device(config.model.device))
        logger.info("kernels: %s, %d CPU threads", ops.name, torch.get_num_threads())
        with phases.measure("weights"):
            paged = get_model(config.model, group, ops)
            if config.draft_heads is not None:
                placement = Placement(device=paged.device, dtype=paged.dtype, process_group=group, ops=ops)
                paged.draft_heads = load_draft_heads(config.draft_heads, paged.lm_head, **placement)
        return build_paged_worker(paged, config, group, phases)
    if config.draft_heads is not None:
        raise ConfigError(f"{config.model.path}: this model type does not support draft_heads")
    from lorax_server.worker.padded_runner import build_padded_runner  # noqa: PLC0415 - imports transformers

    return Worker(*build_padded_runner(config))


def _build_pooled(config: EngineConfig, pooling: PoolingConfig) -> Worker:
    """Return a worker for a model that does not generate text."""
    capabilities, runner, model, memory, stream = build_pooled_runner(config, pooling)
    preparer = None
    if memory is not None:
        targets, max_rank = collect_adapter_targets(model), model.ops.max_lora_rank
        preparer = Preparer(targets, model.dtype, FakeGroup(), max_rank=max_rank)
    return Worker(capabilities, runner, memory, preparer, can_retry=True, stream=stream)


def is_paged(config: EngineConfig) -> bool:
    """Return True if the model has a paged implementation.

    Also return True if the config cannot be read, because loading the model then reports the error.
    """
    try:
        return model_types.is_paged(json.loads((config.model.path / MODEL_CONFIG_FILE).read_text()))
    except (OSError, ValueError, AttributeError, TypeError):
        return True


def build_paged_worker(
    model: PagedCausalLM, config: EngineConfig, group: ProcessGroup, phases: Phases | None = None
) -> Worker:
    """Return a worker for this rank's shard of a model. Raise ConfigError if device memory is not sufficient."""
    config = resolve_sizes(config, model)
    num_units = _min_over_ranks(adapter_bytes(config, model.device) // UNIT_BYTES, group, model.device)
    is_gpu = not is_host(model.device)
    copier = Copier(CopyStream(model.device, STEP_PRIORITY)) if num_units and is_gpu else None
    try:
        memory = _make_memory(model, num_units, group, copier) if num_units else None
        return _build_paged(model, config, group, phases or Phases(), memory, copier)
    except BaseException as error:
        if copier is not None:
            copier.close()
        if isinstance(error, torch.OutOfMemoryError):
            raise out_of_memory_error(model, num_units * UNIT_BYTES) from error
        raise


def _make_memory(model: PagedCausalLM, num_units: int, group: ProcessGroup, copier: Copier | None) -> AdapterMemory:
    targets, dtype = collect_adapter_targets(model), model.lm_head.linear.weight.dtype
    num_rows = count_adapter_rows(num_units * UNIT_BYTES, len(targets))
    return AdapterMemory(targets, dtype, model.device, num_units, num_rows, group.rank() > 0, copier)


def _build_paged(
    model: PagedCausalLM,
    config: EngineConfig,
    group: ProcessGroup,
    phases: Phases,
    memory: AdapterMemory | None,
    copier: Copier | None,
) -> Worker:
    device, is_gpu = model.device, not is_host(model.device)
    max_num_seqs = _min_over_ranks(find_max_num_seqs(config, device), group, device)
    step_tokens = max(config.max_step_tokens or (GPU_STEP_TOKENS if is_gpu else CPU_STEP_TOKENS), max_num_seqs)
    sizes = GraphSizes.choose(max_num_seqs, step_tokens) if uses_graphs(model, config, group) else GraphSizes()
    if uses_cpu_graphs(model, group):
        sizes = GraphSizes.choose_for_cpu()
    num_units = 0 if memory is None else memory.num_units
    shape = CacheShape(min(config.max_length or find_max_length(model), find_max_length(model)), config.block_size)
    if is_gpu:
        reserve_rotary(model, shape.max_length)
    with phases.measure("kernels"):
        warm_up(
            model,
            memory,
            {max_num_seqs} if sizes.decode else {*graph_sizes(max_num_seqs), max_num_seqs},
            step_tokens,
            shape,
        )
    with phases.measure("memory"):
        step_memory = measure_step_memory(model, memory, sizes, max_num_seqs, step_tokens, shape)
        num_blocks = _min_over_ranks(
            count_blocks(model, config, max_num_seqs, shape.max_length, step_memory), group, device
        )
    warn_if_cache_is_small(model, config, num_blocks, shape.max_length)
    max_length = min(shape.max_length, num_blocks * config.block_size)
    capabilities = replace(
        describe_model(model),
        max_num_seqs=max_num_seqs,
        max_length=max_length,
        max_step_tokens=step_tokens,
        max_mixed_tokens=config.max_mixed_tokens or (GPU_MIXED_TOKENS if is_gpu else None),
        num_blocks=num_blocks,
        block_size=shape.block_size,
        max_steps_in_flight=config.max_steps_in_flight or (2 if is_gpu else 1),
        is_synchronous=not is_gpu,
        num_adapter_units=num_units,
        max_adapters=0 if memory is None else len(memory.arena.host_table) - 1,
        weight_format=find_weight_format(model),
        weight_bytes=model_bytes(model),
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
    preparer = None if memory is None else _make_preparer(model, group, memory, copier)
    report_memory(model, config, memory, num_blocks, step_memory)
    stream = make_stream(device, STEP_PRIORITY)
    counters = [module.counter for module in model.modules() if isinstance(module, SparseMLP)]
    balance = ExpertBalance(counters) if counters else None
    return Worker(capabilities, runner, memory, preparer, balance=balance, can_retry=group.size() == 1, stream=stream)


def _make_preparer(model: PagedCausalLM, group: ProcessGroup, memory: AdapterMemory, copier: Copier | None) -> Preparer:
    host_group = group.make_host_group() if isinstance(group, TorchGroup) else group
    targets, dtype = collect_adapter_targets(model), model.lm_head.linear.weight.dtype
    after_kv = model.find_targets_after_kv()
    packer = None
    if copier is not None and group.size() == 1:
        packer = DevicePacker(memory.arena.buffer.device, copier)
        packer.warm_up(dtype)
    return Preparer(targets, dtype, host_group, max_rank=model.ops.max_lora_rank, after_kv=after_kv, packer=packer)


def uses_graphs(model: PagedCausalLM, config: EngineConfig, group: ProcessGroup) -> bool:
    """Return True if small steps run as CUDA graphs. Raise ConfigError if graphs are requested but not supported."""
    is_gpu = not is_host(model.device)
    if config.cuda_graphs is False or (config.cuda_graphs is None and not is_gpu):
        return False
    if not is_gpu:
        problem = "require a GPU"
    elif group.size() > 1:
        problem = "do not support tensor parallelism"
    elif not model.ops.records_graphs:
        problem = "require kernels that do not support this GPU"
    else:
        return True
    if config.cuda_graphs:
        raise ConfigError(f"CUDA graphs {problem}; remove the cuda_graphs setting or set it to false")
    logger.info("steps run without CUDA graphs: CUDA graphs %s", problem)
    return False


def uses_cpu_graphs(model: PagedCausalLM, group: ProcessGroup) -> bool:
    """Return True if decode steps run as CPU graphs.

    CPU graphs support neither collectives nor the torch ops that read a float8 KV cache.
    """
    has_own_dtype = model.kv_dtype == model.lm_head.linear.weight.dtype
    return is_host(model.device) and model.ops.records_graphs and has_own_dtype and group.size() == 1


def _min_over_ranks(count: int, group: ProcessGroup, device: torch.device) -> int:
    """Return the minimum of `count` over all ranks, because the engine manages the same memory on every rank."""
    return count if group.size() == 1 else int(group.all_gather(torch.tensor([count], device=device), dim=0).min())
