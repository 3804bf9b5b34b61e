"""Adapters created in host memory, and an executor that records the times of steps and adapter loads."""

import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from lorax_server.adapters.host import UNIT_BYTES, HostAdapter, empty_table
from lorax_server.adapters.spec import AdapterSpec
from lorax_server.adapters.target import TargetKind
from lorax_server.distributed import FakeGroup
from lorax_server.kernels import Field
from lorax_server.layers.targets import collect_adapter_targets
from lorax_server.models.custom_modeling.paged import PagedCausalLM
from lorax_server.plan import LoadOp, PrepareResult, StepPlan, StepResult
from lorax_server.worker.preparer import Preparer
from lorax_server.worker.worker import Worker


class HostPool(Preparer):
    """A preparer with many adapters in host memory. Other adapters are prepared as usual."""

    def __init__(self, model: PagedCausalLM, hosts: Sequence[HostAdapter]) -> None:
        dtype = model.lm_head.linear.weight.dtype
        super().__init__(collect_adapter_targets(model), dtype, FakeGroup(), max_rank=model.ops.max_lora_rank)
        self._hosts = {name_of(i): host for i, host in enumerate(hosts)}

    def enqueue(self, spec: AdapterSpec) -> None:
        host = self._hosts.get(spec.identity)
        if host is None:
            return super().enqueue(spec)
        with self._added:
            self._ready[spec.identity] = host
        self._results.append(PrepareResult(spec.identity, host.units, host.buffer.nbytes, host.vocab_size))
        return self.notify()


def name_of(adapter: int) -> str:
    return f"adapter {adapter}"


def make_hosts(model: PagedCausalLM, count: int, rank: int) -> list[HostAdapter]:
    """Create adapters for all linear layers, as slices of one pool of random numbers."""
    targets, dtype = collect_adapter_targets(model), model.lm_head.linear.weight.dtype
    table, end, unit = empty_table(len(targets)), 0, UNIT_BYTES // dtype.itemsize
    for index, target in enumerate(targets.values()):
        if target.kind is TargetKind.LINEAR:
            for place, width in ((Field.A, target.inputs.size), (Field.B, target.outputs.size)):
                table[index, place] = end
                end += -(-rank * width // unit) * unit
            table[index, Field.RANK] = rank
    pool = torch.empty(end + 101 * count, device=model.device).normal_(0, 0.02).to("cpu", dtype)
    scales, vocab_size = torch.ones(len(targets)), model.config.vocab_size

    def make(adapter: int) -> HostAdapter:
        content = pool[101 * adapter : 101 * adapter + end].clone()
        return HostAdapter(content, table, scales, vocab_size, end // unit)

    with ThreadPoolExecutor(16) as threads:
        return list(threads.map(make, range(count)))


@dataclass
class Step:
    """One step of the worker."""

    rows: int
    has_prompt: bool
    is_loading: bool  # at some time between submission and result
    finished_at: float = 0.0
    duration_s: float = 0.0  # since the result of the step before


class StepRecorder:
    """An executor that records the times of steps and adapter loads."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.steps: list[Step] = []
        self.num_finished = 0
        self._loading: Counter[int] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.worker, name)

    def submit(self, plan: StepPlan) -> None:
        self._loading.update(op.index for op in plan.adapter_ops if isinstance(op, LoadOp))
        is_loading = self._loading.total() > 0
        for step in self.steps[self.num_finished :]:
            step.is_loading |= is_loading
        self.steps.append(Step(len(plan.slots), bool((plan.counts > 1).any()), is_loading))
        self.worker.submit(plan)

    def collect(self) -> StepResult:
        result = self.worker.collect()
        now, before = time.perf_counter(), self.steps[self.num_finished - 1] if self.num_finished else None
        step = self.steps[self.num_finished]
        step.finished_at, step.duration_s = now, now - before.finished_at if before is not None else 0.0
        self.num_finished += 1
        self._loading.subtract(result.loaded)
        return result

    def pop_loaded(self) -> list[int]:
        loaded = self.worker.pop_loaded()
        self._loading.subtract(loaded)
        return loaded
