"""Adapters made directly in host memory, and an executor that notes the times of steps and loads."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from lorax_server.adapters.host import UNIT_BYTES, HostAdapter, empty_table
from lorax_server.adapters.spec import AdapterSpec
from lorax_server.adapters.target import Kind
from lorax_server.distributed import FakeGroup
from lorax_server.kernels import Field
from lorax_server.layers.targets import adapter_targets
from lorax_server.models.custom_modeling.paged import PagedCausalLM
from lorax_server.plan import Capabilities, Load, Prepared, StepPlan, StepResult
from lorax_server.worker.preparer import Preparer
from lorax_server.worker.worker import Worker


class HostPool(Preparer):
    """A preparer that has many adapters ready, and prepares all others as usual."""

    def __init__(self, model: PagedCausalLM, hosts: Sequence[HostAdapter]) -> None:
        dtype = model.lm_head.linear.weight.dtype
        super().__init__(adapter_targets(model), dtype, FakeGroup(), max_rank=model.ops.max_lora_rank)
        self._made = {name_of(i): host for i, host in enumerate(hosts)}

    def enqueue(self, spec: AdapterSpec) -> None:
        host = self._made.get(spec.identity)
        if host is None:
            return super().enqueue(spec)
        with self._added:
            self._ready[spec.identity] = host
        self._results.append(Prepared(spec.identity, host.units, host.buffer.nbytes, host.vocab_size))
        return self.notify()


def name_of(adapter: int) -> str:
    return f"adapter {adapter}"


def make_hosts(model: PagedCausalLM, count: int, rank: int) -> list[HostAdapter]:
    """Make adapters at all linears, each of numbers that begin elsewhere in one random pool."""
    targets, dtype = adapter_targets(model), model.lm_head.linear.weight.dtype
    table, end, unit = empty_table(len(targets)), 0, UNIT_BYTES // dtype.itemsize
    for index, target in enumerate(targets.values()):
        if target.kind is Kind.LINEAR:
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
    """One step as the worker saw it."""

    rows: int
    has_prompt: bool
    is_loading: bool  # at some time from its submission to its end
    ended_at: float = 0.0
    gap: float = 0.0  # since the end of the step before


@dataclass
class Watch:
    """An executor that notes the times of a worker's steps and loads."""

    worker: Worker
    steps: list[Step] = field(default_factory=list)
    loading: Counter[int] = field(default_factory=Counter)
    num_ended: int = 0

    @property
    def capabilities(self) -> Capabilities:
        return self.worker.capabilities

    def on_news(self, notify: Callable[[], None]) -> None:
        self.worker.on_news(notify)

    def submit(self, plan: StepPlan) -> None:
        self.loading.update(op.index for op in plan.adapter_ops if isinstance(op, Load))
        is_loading = self.loading.total() > 0
        for step in self.steps[self.num_ended :]:
            step.is_loading |= is_loading
        self.steps.append(Step(len(plan.rows), bool((plan.counts > 1).any()), is_loading))
        self.worker.submit(plan)

    def collect(self) -> StepResult:
        result = self.worker.collect()
        now, before = time.perf_counter(), self.steps[self.num_ended - 1] if self.num_ended else None
        step = self.steps[self.num_ended]
        step.ended_at, step.gap = now, now - before.ended_at if before is not None else 0.0
        self.num_ended += 1
        self.loading.subtract(result.loaded)
        return result

    def take_prepared(self) -> list[Prepared]:
        return self.worker.take_prepared()

    def take_loaded(self) -> list[int]:
        loaded = self.worker.take_loaded()
        self.loading.subtract(loaded)
        return loaded

    def close(self) -> None:
        self.worker.close()
