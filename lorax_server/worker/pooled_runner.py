"""Runs steps of models that do not generate text. Each sequence is computed in a single step, without a KV cache."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from lorax_server.adapters.batch import AdapterBatchData, AdapterBatchMetadata
from lorax_server.adapters.host import UNIT_BYTES
from lorax_server.adapters.target import TargetKind
from lorax_server.config import EngineConfig
from lorax_server.kernels.device import is_host, make_stream, to_device
from lorax_server.layers.attention import SequenceContext
from lorax_server.layers.targets import collect_adapter_targets
from lorax_server.models.pooled_model import PooledModel
from lorax_server.models.registry import get_pooled_model
from lorax_server.plan import Capabilities, NewSequence, StepMasks, StepPlan, StepResult
from lorax_server.pooling import PoolingConfig
from lorax_server.text.tokenizer import load_tokenizer
from lorax_server.types import Pooled
from lorax_server.worker.adapter_memory import AdapterMemory
from lorax_server.worker.copier import Copier, CopyStream
from lorax_server.worker.graphs import STEP_PRIORITY
from lorax_server.worker.memory import adapter_bytes, count_adapter_rows, find_weight_format, model_bytes
from lorax_server.worker.model_info import find_max_length, reserve_rotary
from lorax_server.worker.warm_up import find_linears

CPU_STEP_TOKENS, GPU_STEP_TOKENS = 2048, 16384
MAX_NUM_SEQS = 256


class PooledTicket(NamedTuple):
    """A step in flight with the concatenated results of all sequences. The results are on the host after the `done`
    event.
    """

    step: int
    shapes: list[tuple[int, ...]]
    results: torch.Tensor | None = None
    done_event: torch.cuda.Event | None = None


class PooledRunner:
    """Runs the steps of one model."""

    def __init__(self, model: PooledModel, memory: AdapterMemory | None) -> None:
        self._model = model
        self._memory = memory
        self._sequences: dict[int, NewSequence] = {}  # by slot; a step may be repeated

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> PooledTicket:
        self._sequences.update((new.slot, new) for new in plan.new_sequences)
        device, arena = self._model.device, None if self._memory is None else self._memory.arena
        if not len(plan.slots):  # the event is recorded after the plan's adapter moves
            return PooledTicket(plan.step, [], done_event=_record_event(device))
        sequences = [self._sequences[slot] for slot in plan.slots.tolist()]
        counts, adapters = plan.counts.tolist(), plan.adapter_indices.tolist()
        ids = np.concatenate([np.array(new.token_ids, np.int64) for new in sequences])
        adapter_data = None
        if arena is not None and any(adapters):
            indices = to_device(np.repeat(plan.adapter_indices, plan.counts), device)
            adapter_data = AdapterBatchData(AdapterBatchMetadata.from_indices(indices), arena)
        ctx = make_context(self._model, counts, [new.second_start for new in sequences], adapter_data)
        results = self._model(to_device(ids, device), ctx, adapters, arena)
        shapes, flat = [tuple(result.shape) for result in results], torch.cat([r.flatten() for r in results])
        if not is_host(device):
            flat = torch.empty(flat.shape, pin_memory=True).copy_(flat, non_blocking=True)
        return PooledTicket(plan.step, shapes, flat, _record_event(device))

    def mask(self, ticket: PooledTicket, masks: StepMasks) -> PooledTicket:  # noqa: ARG002
        raise AssertionError("pooled steps have no token masks")

    def collect(self, ticket: PooledTicket) -> StepResult:
        if ticket.done_event is not None:
            ticket.done_event.synchronize()
        if ticket.results is None:
            return StepResult(ticket.step, [], [])
        sizes = [int(np.prod(shape)) for shape in ticket.shapes]
        parts = np.split(ticket.results.numpy(), list(itertools.accumulate(sizes))[:-1])
        logprobs = [0.0 if np.isfinite(part).all() else float("nan") for part in parts]
        pooled = [Pooled(part.tobytes(), shape) for part, shape in zip(parts, ticket.shapes, strict=True)]
        return StepResult(ticket.step, [0] * len(parts), logprobs, pooled=pooled)


def _record_event(device: torch.device) -> torch.cuda.Event | None:
    """Record an event on the current stream of a GPU."""
    return None if is_host(device) else torch.cuda.current_stream(device).record_event()


def make_context(
    model: PooledModel, lengths: list[int], second_starts: Sequence[int], adapter_data: AdapterBatchData | None = None
) -> SequenceContext:
    """Return the context for a batch of sequences. `second_starts` contains the position at which the second text of
    each sequence starts, or 0.
    """
    device, counts = model.device, np.array(lengths, np.int64)
    bounds = np.concatenate([[0], counts.cumsum()])
    positions = np.arange(bounds[-1]) - np.repeat(bounds[:-1], counts)
    starts = np.repeat(np.array(second_starts, np.int64), counts)
    empty = torch.empty(0, dtype=torch.int64, device=device)
    return SequenceContext(
        block_tables=empty,
        slots=empty,
        kv_cache=[],
        ops=model.ops,
        input_lengths=to_device(counts, device),
        cache_lengths=torch.zeros(len(counts), dtype=torch.int64, device=device),
        cu_seqlens=to_device(bounds.astype(np.int32), device),
        position_ids=to_device(positions, device),
        max_position=max(lengths),
        adapter_data=adapter_data,
        lengths=lengths,
        first_tokens=to_device(bounds[:-1].copy(), device),
        token_types=to_device(((starts > 0) & (positions >= starts)).astype(np.int64), device),
    )


def build_pooled_runner(
    config: EngineConfig, pooling: PoolingConfig
) -> tuple[Capabilities, PooledRunner, PooledModel, AdapterMemory | None, torch.cuda.Stream | None]:
    """Load a model for pooling. Return its capabilities and runner, the model, adapter memory and step stream."""
    model = get_pooled_model(config.model, pooling, lambda word: load_tokenizer(config.model.path).token_to_id(word))
    device, targets = model.device, collect_adapter_targets(model)
    is_gpu = not is_host(device)
    num_units = adapter_bytes(config, device) // UNIT_BYTES
    memory = None
    if num_units:
        copier = Copier(CopyStream(device)) if is_gpu else None
        rows = count_adapter_rows(num_units * UNIT_BYTES, len(targets))
        memory = AdapterMemory(targets, model.dtype, device, num_units, rows, copier=copier)
    limits = (config.max_length, pooling.max_tokens, model.max_tokens, find_max_length(model))
    max_tokens = min(limit for limit in limits if limit is not None)
    max_num_seqs = config.max_num_seqs or min(MAX_NUM_SEQS, config.max_step_tokens or MAX_NUM_SEQS)
    step_tokens = max(config.max_step_tokens or (GPU_STEP_TOKENS if is_gpu else CPU_STEP_TOKENS), max_num_seqs)
    if is_gpu:
        reserve_rotary(model, max_tokens)
        model.ops.prepare(find_linears(model), with_lora=memory is not None)
    capabilities = Capabilities(
        vocab_size=model.config.vocab_size,
        max_num_seqs=max_num_seqs,
        max_length=max_tokens + 1,  # the engine counts a generated token at the end of each sequence
        max_step_tokens=step_tokens,
        num_blocks=max_num_seqs,  # one imaginary block per sequence
        block_size=max_tokens + 1,
        max_steps_in_flight=config.max_steps_in_flight or (2 if is_gpu else 1),
        is_synchronous=not is_gpu,
        can_chunk=False,
        can_reuse=False,
        num_adapter_units=num_units,
        adapter_unit_bytes=UNIT_BYTES,
        max_adapters=0 if memory is None else len(memory.arena.host_table) - 1,
        itemsize=model.dtype.itemsize,
        max_inputs=max(target.inputs.full for target in targets.values() if target.kind is TargetKind.LINEAR),
        model_type=model.config.model_type,
        model_class=(getattr(model.config, "architectures", None) or [""])[0],
        dtype=str(model.dtype),
        weight_format=find_weight_format(model),
        weight_bytes=model_bytes(model),
        task=pooling.task,
    )
    return capabilities, PooledRunner(model, memory), model, memory, make_stream(device, STEP_PRIORITY)
