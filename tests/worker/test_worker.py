"""The worker executes plans in order and reports memory and capabilities."""

import multiprocessing
import pickle
import re
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from lorax_server.adapters.host import UNIT_BYTES
from lorax_server.adapters.spec import AdapterSpec
from lorax_server.cli.flags import FLAGS
from lorax_server.config import EngineConfig, ModelConfig
from lorax_server.distributed import FakeGroup
from lorax_server.errors import BusyError, ConfigError, EngineError
from lorax_server.kernels import Ops, reference
from lorax_server.layers.norm import RMSNorm
from lorax_server.layers.rotary import DynamicRotaryEmbedding, RotaryEmbedding
from lorax_server.machine import GRAMMAR_CACHE_BYTES, resident_memory_bytes, total_memory_bytes
from lorax_server.model_types import MODEL_CLASSES
from lorax_server.models.registry import build_model, get_model
from lorax_server.plan import (
    AdapterOp,
    Capabilities,
    DropOp,
    LoadOp,
    MoveOp,
    NewSequence,
    PrepareOp,
    PrepareResult,
    RopeRule,
    StepMasks,
    StepPlan,
    StepResult,
    UnloadOp,
)
from lorax_server.sampling.batch import TokenMasks
from lorax_server.types import SamplingParams, StopParams
from lorax_server.worker import executor, memory
from lorax_server.worker import worker as worker_module
from lorax_server.worker.graphs import GraphSizes
from lorax_server.worker.inputs import SlotTables, count_mask_bytes
from lorax_server.worker.memory import block_bytes, count_blocks, model_bytes
from lorax_server.worker.warm_up import (
    CacheShape,
    count_prompt_blocks,
    make_permissive_masks,
    run_decode,
    run_prompts,
    run_sampling,
)
from lorax_server.worker.worker import Worker, build_paged_worker, build_worker, is_paged, uses_graphs
from tests.models.tiny import SERVED, make_model, make_tokenizer, save
from tests.parity.adapters.served import make_model as make_paged
from tests.parity.variants import VARIANTS, checkpoint, make_oracle, make_weights

CPU = torch.device("cpu")
CONFIG = EngineConfig(
    ModelConfig(Path("in-memory")), max_num_seqs=2, block_size=4, cache_bytes=2**16, adapter_bytes=2**16
)


# --- Plans ------------------------------------------------------------------------------------------------------------


def make_plan(step: int, ops: Sequence[AdapterOp] = (), indices: Sequence[int] = (), **columns: Any) -> StepPlan:
    count = len(indices)
    given: dict[str, Any] = {
        "slots": np.arange(count),
        "starts": np.zeros(count, np.int64),
        "counts": np.ones(count, np.int64),
        "samples": np.ones(count, bool),
        "scores_prompt": np.zeros(count, bool),
        "adapter_indices": np.array(indices, np.int64),
        "new_sequences": (),
        "new_blocks": np.zeros((0, 3), np.int64),
    }
    return StepPlan(step, **given | columns, adapter_ops=tuple(ops))


@dataclass
class CallRecorder:
    """A fake for runner, memory and preparer that records calls."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)
    arrived: set[int] = field(default_factory=set)
    ready: list[PrepareResult] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args: self.calls.append((name, *args))

    def load(self, *args: Any) -> None:
        self.calls.append(("load", *args))

    def get(self, identity: str) -> str:
        return f"host {identity}"

    def is_loaded(self, index: int) -> bool:
        return index in self.arrived

    def submit(self, plan: StepPlan) -> int:
        self.calls.append(("submit", plan.step))
        return plan.step

    def collect(self, ticket: int) -> StepResult:
        return StepResult(ticket, [], [])

    def pop_results(self) -> list[PrepareResult]:
        return self.ready


def test_preparer_resumes_only_while_collect_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The preparer is paused while a step is built and another one is in flight."""
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    record: Any = CallRecorder()
    worker = Worker(Capabilities(97, 2, 8, 2, 4), record, record, record, stream=cast(torch.cuda.Stream, object()))
    worker.submit(make_plan(1))
    worker.submit(make_plan(2))
    worker.collect()
    worker.submit(make_plan(3))
    worker.collect()
    worker.collect()  # no step is in flight afterwards
    turns = ["submit", "submit", "resume", "pause", "submit", "resume", "pause", "resume"]
    assert [name for name, *_ in record.calls if name in turns] == turns


@pytest.fixture
def record() -> CallRecorder:
    return CallRecorder()


@pytest.fixture
def worker(record: CallRecorder) -> Worker:
    below: Any = record
    return Worker(Capabilities(97, 2, 8, 2, 4), below, below, below)


def test_adapter_ops_run_in_order_before_step(worker: Worker, record: CallRecorder) -> None:
    spec = AdapterSpec("a", "a", (), 1)
    ops: list[AdapterOp] = [MoveOp(1, 7, 2), PrepareOp(spec), UnloadOp(3), DropOp("c"), LoadOp("b", 3, 9)]
    worker.submit(make_plan(5, ops, [0, 0, 2, 3, 3]))
    assert record.calls[:5] == [
        ("move", 1, 7, 2),
        ("enqueue", spec),
        ("unload", 3),
        ("drop", "c"),
        ("load", 3, "host b", 9),
    ]
    assert sorted(record.calls[5:7]) == [("wait_for", 2), ("wait_for", 3)]  # each adapter once, never the base model
    assert record.calls[7:] == [("submit", 5)]


def test_base_model_step_waits_for_no_adapter(worker: Worker, record: CallRecorder) -> None:
    worker.submit(make_plan(0, [], [0, 0]))
    assert record.calls == [("submit", 0)]


def test_load_is_reported_once_after_completion(worker: Worker, record: CallRecorder) -> None:
    worker.submit(make_plan(0, [LoadOp("a", 1, 0), LoadOp("b", 2, 5)]))
    worker.submit(make_plan(1, [LoadOp("c", 3, 7)]))
    assert worker.collect().loaded == []
    record.arrived = {2}
    assert worker.collect() == StepResult(1, [], [], loaded=[2])
    worker.submit(make_plan(2))
    record.arrived = {1, 2, 3}
    assert worker.collect().loaded == [1, 3]
    worker.submit(make_plan(3))
    assert worker.collect().loaded == []
    worker.submit(make_plan(4, [UnloadOp(2), LoadOp("d", 2, 5)]))
    assert worker.collect().loaded == [2]  # the same index again


def test_load_is_reported_without_step(worker: Worker, record: CallRecorder) -> None:
    worker.submit(make_plan(0, [LoadOp("a", 1, 0), LoadOp("b", 2, 5)]))
    assert worker.collect().loaded == []
    assert worker.pop_loaded() == []
    record.arrived = {2}
    assert worker.pop_loaded() == [2]
    record.arrived = {1, 2}
    worker.submit(make_plan(1))
    assert worker.collect().loaded == [1]
    assert worker.pop_loaded() == []


def test_on_event_subscribes_to_memory_and_preparer(worker: Worker, record: CallRecorder) -> None:
    notified: list[str] = []
    worker.on_event(lambda: notified.append("news"))
    record.notify()  # as the preparer does
    (calls,) = record.calls
    assert calls[0] == "on_loaded"
    calls[1]()
    assert notified == ["news", "news"]


def test_failed_load_raises_in_collect(worker: Worker, record: CallRecorder) -> None:
    def fail(index: int) -> bool:
        raise EngineError("copying adapters to the device failed")

    worker.submit(make_plan(0, [LoadOp("a", 1, 0)]))
    record.is_loaded = fail  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="copying adapters"):
        worker.collect()


def test_close_stops_memory_and_preparer_threads(worker: Worker, record: CallRecorder) -> None:
    worker.close()
    assert record.calls == [("close",), ("close",)]


def test_discard_oldest_clears_pending_loads(worker: Worker, record: CallRecorder) -> None:
    for step in range(100):
        worker.submit(make_plan(step, [LoadOp("a", 1, 0)]))
        worker.discard_oldest()
        record.arrived = {1}
    assert worker._loading == []
    assert not worker._tickets


def test_steps_are_collected_in_order(worker: Worker) -> None:
    for step in range(3):
        worker.submit(make_plan(step))
    assert worker.collect().step == 0
    worker.discard_oldest()
    assert worker.collect().step == 2


class FullDevice:
    """A runner that runs out of memory in some attempts."""

    def __init__(self, fails: list[bool]) -> None:
        self.fails = fails
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> StepPlan:
        self.plans.append(plan)
        if len(plan.slots) and self.fails.pop(0):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plan

    def mask(self, ticket: StepPlan, masks: StepMasks) -> StepPlan:
        return ticket

    def collect(self, ticket: StepPlan) -> StepResult:
        return StepResult(ticket.step, [7] * int(ticket.samples.sum()), [0.0] * int(ticket.samples.sum()))


@pytest.mark.parametrize(("fails", "is_done"), [([False], True), ([True, False], True), ([True, True], False)])
def test_out_of_memory_step_is_retried_once(fails: list[bool], is_done: bool, record: CallRecorder) -> None:
    runner, below = FullDevice(fails.copy()), cast(Any, record)
    worker = Worker(Capabilities(97, 2, 8, 2, 4), runner, below, below, can_retry=True)
    new = NewSequence(1, [5, 6], 2, SamplingParams(), StopParams())
    ops: list[AdapterOp] = [LoadOp("b", 3, 9)]
    error = worker.submit(make_plan(5, ops, [0, 3], new_sequences=(new,), new_blocks=np.array([[1, 0, 4]])))
    assert [calls[0] for calls in record.calls] == ["load", "wait_for"]  # once
    assert len(runner.plans) == len(fails) + (not is_done)
    result = worker.collect()
    if is_done:
        assert error is None
        assert result == StepResult(5, [7, 7], [0.0, 0.0])
        return
    assert isinstance(error, BusyError)
    assert (error.status, error.retry_after_s) == (503, 1.0)
    assert result == StepResult(5, [], [])
    left = runner.plans[-1]
    assert (left.new_sequences, left.new_blocks.tolist(), left.adapter_ops, left.num_tokens) == (
        (new,),
        [[1, 0, 4]],
        (),
        0,
    )


def test_out_of_memory_without_retry_raises() -> None:
    worker = Worker(Capabilities(97, 2, 8, 2, 4), FullDevice([True]))
    with pytest.raises(torch.OutOfMemoryError):
        worker.submit(make_plan(5, [], [0]))


def test_pop_prepared_returns_preparer_results(worker: Worker, record: CallRecorder) -> None:
    record.ready = [PrepareResult("a")]
    assert worker.pop_prepared() == [PrepareResult("a")]


def test_worker_without_adapters_rejects_adapter_operations(record: CallRecorder) -> None:
    below: Any = record
    worker = Worker(Capabilities(97, 2, 8, 2, 4), below)
    worker.submit(make_plan(0, [], [0]))
    assert worker.collect().loaded == []
    assert worker.pop_prepared() == []
    with pytest.raises(AssertionError):
        worker.submit(make_plan(1, [DropOp("a")]))
    worker.close()


def test_steps_without_sequences_return_empty_results() -> None:
    worker = build_paged_worker(make_paged("llama-gqa", CPU), CONFIG, FakeGroup())
    worker.submit(make_plan(0))
    assert worker.collect() == StepResult(0, [], [])
    new = NewSequence(0, [5, 6, 7], 3, SamplingParams(), StopParams())
    prompt = {"new_sequences": (new,), "new_blocks": np.array([[0, 0, 1]]), "counts": np.array([3])}
    worker.submit(make_plan(1, [], [0], **prompt))
    worker.submit(make_plan(2))
    first = worker.collect()
    assert (first.step, len(first.token_ids)) == (1, 1)
    assert worker.collect() == StepResult(2, [], [])
    worker.close()


# --- Model capabilities -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rope", "max_length"),
    [
        ("llama-gqa", RopeRule(), 128),
        ("llama-rope-yarn", RopeRule(), 128),
        ("llama-rope-dynamic-within", RopeRule(128, depends_on_length=True), 512),
        ("llama-rope-dynamic-beyond", RopeRule(16, depends_on_length=True), 64),
        ("llama-rope-longrope-beyond", RopeRule(16), 128),
        ("neox-rope-dynamic-beyond", RopeRule(16, depends_on_length=True), 64),
        ("gpt2", RopeRule(), 128),
    ],
)
def test_length_dependent_models_have_rope_rule(name: str, rope: RopeRule, max_length: int) -> None:
    model = make_paged(name, CPU)
    config = EngineConfig(CONFIG.model, max_num_seqs=2, block_size=4, cache_bytes=2**24, adapter_bytes=0)
    capabilities = build_paged_worker(model, config, FakeGroup()).capabilities
    assert capabilities.rope == rope
    assert capabilities.max_length == max_length
    assert any(isinstance(module, DynamicRotaryEmbedding) for module in model.modules()) == ("dynamic" in name)


def test_rope_variant_depends_on_length() -> None:
    assert {RopeRule().variant(length) for length in (1, 10**6)} == {""}
    assert [RopeRule(16).variant(length) for length in (16, 17, 18)] == ["", "long", "long"]
    assert [RopeRule(16, depends_on_length=True).variant(length) for length in (16, 17, 18)] == ["", "17", "18"]


def capabilities(**settings: Any) -> Capabilities:
    given = {"max_num_seqs": 3, "block_size": 4, "cache_bytes": 2**20, "adapter_bytes": 2**16} | settings
    worker = build_paged_worker(make_paged("llama-gqa", CPU), EngineConfig(CONFIG.model, **given), FakeGroup())
    worker.close()
    return worker.capabilities


def test_capabilities_have_defaults() -> None:
    result = capabilities()
    assert (result.vocab_size, result.max_num_seqs, result.block_size, result.itemsize) == (97, 3, 4, 4)
    assert (result.max_length, result.num_blocks) == (128, 3 * 128 // 4)  # more could never be used
    assert (result.num_adapter_units, result.adapter_unit_bytes) == (2**16 // UNIT_BYTES, UNIT_BYTES)
    assert result.max_adapters == 63
    assert (result.max_steps_in_flight, result.max_step_tokens, result.max_mixed_tokens) == (1, 512, None)
    assert (result.can_chunk, result.can_reuse) == (True, True)
    assert (result.model_type, result.model_class) == ("llama", "")  # its config has no limit


def test_capabilities_follow_configuration() -> None:
    assert capabilities(max_num_seqs=600).max_step_tokens == 600  # one token per sequence
    assert capabilities(max_step_tokens=7).max_step_tokens == 7
    assert capabilities(max_mixed_tokens=5).max_mixed_tokens == 5
    assert capabilities(max_steps_in_flight=3).max_steps_in_flight == 3
    assert capabilities(max_length=50).max_length == 50
    assert capabilities(max_length=5000).max_length == 128  # its original length
    assert capabilities(adapter_bytes=0).num_adapter_units == 0
    assert capabilities(adapter_bytes=UNIT_BYTES - 1).num_adapter_units == 0


def test_small_cache_limits_max_length() -> None:
    size = block_bytes(make_paged("llama-gqa", CPU), 4)
    result = capabilities(cache_bytes=5 * size)
    assert (result.num_blocks, result.max_length) == (5, 20)


class UnevenGroup(FakeGroup):
    """Rank 0 of two ranks. The other rank has memory for three blocks."""

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat([x, torch.full_like(x, 3)], dim)


def test_smallest_rank_determines_num_blocks() -> None:
    model = make_paged("llama-gqa", CPU)
    with closing(build_paged_worker(model, CONFIG, UnevenGroup(0, 2))) as worker:
        assert (worker.capabilities.num_blocks, worker.capabilities.max_length) == (3, 12)


# --- Memory -----------------------------------------------------------------------------------------------------------


def make_config(**settings: Any) -> EngineConfig:
    return EngineConfig(CONFIG.model, **{"block_size": 4} | settings)


@pytest.mark.parametrize("ops", [None, reference])
def test_model_bytes_counts_shared_tensors_once(tmp_path: Path, ops: Ops | None) -> None:
    """The model has a tied head. Its weights are stored in half precision, which represents them exactly."""
    oracle = make_oracle("llama-tied-head").to(torch.bfloat16)
    oracle.save_pretrained(tmp_path)
    model = get_model(ModelConfig(tmp_path, dtype="float32"), ops=ops)
    angles = [module for module in model.modules() if isinstance(module, RotaryEmbedding)]
    tables = sum(x.nbytes for each in angles for x in (each.cos, each.sin, each.inv_freq))
    norms = [module for module in model.modules() if isinstance(module, RMSNorm)]
    small = sum(norm.weight.numel() + 1 for norm in norms) * 4
    matrices = oracle.num_parameters() - sum(norm.weight.numel() for norm in norms)
    if ops is reference:
        assert model_bytes(model) == tables + small + 4 * matrices
    else:  # some panels are padded
        assert 2 * matrices <= model_bytes(model) - tables - small < 2.5 * matrices


def test_block_bytes_match_allocated_cache() -> None:
    model = make_paged("llama-gqa", CPU)
    assert block_bytes(model, 4) == 2 * 3 * 2 * 8 * 4 * 4  # keys and values, layers, heads, size, tokens, float32
    cache = model.allocate_kv_cache(10, 4)
    assert sum(tensor.nbytes for layer in cache for tensor in layer) == 10 * block_bytes(model, 4)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_count_blocks_within_cache_bytes(block_size: int) -> None:
    model = make_paged("llama-gqa", CPU)
    size = block_bytes(model, block_size)
    for extra in (0, 1, size - 1):
        config = make_config(block_size=block_size, cache_bytes=7 * size + extra)
        assert count_blocks(model, config, 64, 10**6) == 7
    assert count_blocks(model, make_config(block_size=block_size, cache_bytes=7 * size), 1, block_size + 1) == 2
    for too_few in (1, size - 1):
        with pytest.raises(
            ConfigError, match=rf"{too_few} bytes for the KV cache are less than one block \({size} bytes\)"
        ):
            count_blocks(model, make_config(block_size=block_size, cache_bytes=too_few), 64, 10**6)


def test_cpu_cache_uses_quarter_of_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_paged("llama-gqa", CPU)
    monkeypatch.setattr(memory, "free_memory_bytes", lambda: GRAMMAR_CACHE_BYTES + 40 * block_bytes(model, 4))
    assert count_blocks(model, make_config(), 64, 10**6) == 10
    monkeypatch.setattr(memory, "free_memory_bytes", lambda: GRAMMAR_CACHE_BYTES + 3 * block_bytes(model, 4))
    with pytest.raises(ConfigError, match="raise cache_bytes, or lower adapter_bytes"):
        count_blocks(model, make_config(), 64, 10**6)


class FakeGpu:
    """A fake GPU with given free and total memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int, total: int) -> None:
        self.free, self.total_memory = free, total
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (self.free, self.total_memory))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: self)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def test_gpu_cache_uses_memory_left_by_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = make_paged("llama-gqa", CPU)
    model.device = torch.device("cuda")
    size = block_bytes(model, 4)
    FakeGpu(monkeypatch, free=100 * size, total=200 * size)
    needs = memory.StepMemory(step=5 * size, graphs=3 * size, tables=2 * size)
    assert count_blocks(model, make_config(gpu_memory_fraction=0.9), 64, 10**6, needs) == 100 - 20 - 10
    assert count_blocks(model, make_config(gpu_memory_fraction=0.9), 1, 64, needs) == 16  # more could never be used
    assert count_blocks(model, make_config(cache_bytes=90 * size), 64, 10**6, needs) == 90
    with pytest.raises(ConfigError, match=f"cache_bytes = {91 * size} does not fit: {100 * size} bytes of GPU memory"):
        count_blocks(model, make_config(cache_bytes=91 * size), 64, 10**6, needs)
    with pytest.raises(ConfigError, match=f"adapter_bytes.*weights take {model_bytes(model)} bytes, steps {80 * size}"):
        count_blocks(model, make_config(gpu_memory_fraction=0.9), 64, 10**6, memory.StepMemory(step=80 * size))


def test_gpu_adapters_use_quarter_of_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, cuda = FakeGpu(monkeypatch, free=120 * 10**9, total=140 * 10**9), torch.device("cuda")
    assert memory.adapter_bytes(make_config(gpu_memory_fraction=0.9), cuda) == pytest.approx((120 - 14) * 10**9 / 4)
    assert memory.adapter_bytes(make_config(adapter_bytes=7), cuda) == 7
    gpu.free = 10**9
    assert memory.adapter_bytes(make_config(), cuda) == 2**28


@pytest.mark.parametrize(("device", "total", "rows"), [("cpu", 0, 64), ("cuda", 24, 64), ("cuda", 42, 256)])
def test_max_num_seqs_depends_on_device(device: str, total: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGpu(monkeypatch, free=0, total=total * 10**9)
    assert memory.find_max_num_seqs(make_config(), torch.device(device)) == rows
    assert memory.find_max_num_seqs(make_config(max_step_tokens=10), torch.device(device)) == 10
    assert memory.find_max_num_seqs(make_config(max_num_seqs=7), torch.device(device)) == 7


def test_gpu_memory_report_adds_up(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    model: Any = make_paged("llama-gqa", CPU)
    model.device = torch.device("cuda")
    FakeGpu(monkeypatch, free=80 * 10**9, total=100 * 10**9)
    blocks = 10**10 // block_bytes(model, 4)
    needs = memory.StepMemory(step=4 * 10**9, graphs=3 * 10**9, tables=10**9)
    with caplog.at_level("INFO", logger=memory.logger.name):
        rows = memory.report_memory(model, make_config(), None, blocks, needs)
    in_use = {row.name: row.used_bytes for row in rows}
    assert in_use[f"KV cache for {4 * blocks} tokens"] == blocks * block_bytes(model, 4)
    assert (in_use["step"], in_use["graphs"], in_use["tables"]) == needs
    assert in_use["left free"] == 76 * 10**9  # the largest step allocates and frees its memory
    assert caplog.records[-1].message.endswith("76000 MB of up to 100000 MB")


def test_cpu_memory_report_adds_up_to_rss() -> None:
    model = make_paged("llama-gqa", CPU)
    *rows, total = memory.report_memory(
        model, make_config(adapter_host_bytes=5 * 10**9), None, 1000, memory.StepMemory()
    )
    assert total.used_bytes == sum(row.used_bytes for row in rows) == pytest.approx(resident_memory_bytes(), rel=0.05)
    limits = {row.name: row.limit for row in rows}
    assert limits["KV cache for 4000 tokens"] == 1000 * block_bytes(model, 4)
    assert limits["adapters in host memory"] == 5 * 10**9


def test_memory_report_names_flag_for_each_limit(caplog: pytest.LogCaptureFixture) -> None:
    model, flags = make_paged("llama-gqa", CPU), {flag.name for flag in FLAGS}
    with caplog.at_level("INFO", logger=memory.logger.name):
        rows = memory.report_memory(model, make_config(), None, 1000, memory.StepMemory())
    named = {row.name: row.flag for row in rows if row.flag}
    assert named == {
        "adapters": "--adapter-bytes",
        "KV cache for 4000 tokens": "--cache-bytes",
        "adapters in host memory": "--adapter-host-bytes",
    }
    assert set(named.values()) <= flags
    (line,) = [record.message for record in caplog.records if "KV cache" in record.message]
    assert line.endswith("MB (--cache-bytes)")


@pytest.mark.parametrize(("num_blocks", "is_small"), [(249, True), (250, False)])
def test_warning_for_small_cache_names_sufficient_bytes(
    num_blocks: int, is_small: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, max_length = make_paged("llama-gqa", CPU), 999
    memory.warn_if_cache_is_small(model, make_config(), num_blocks, max_length)
    assert bool(caplog.records) == is_small
    if is_small:
        message = caplog.records[0].message
        assert message.startswith("the KV cache holds 996 tokens, so requests are limited to 996 instead of 999 tokens")
        num_bytes = int(re.search(r"--cache-bytes (\d+)", message)[1])  # type: ignore[index]
        assert count_blocks(model, make_config(cache_bytes=num_bytes), 64, max_length) * 4 >= max_length
        assert count_blocks(model, make_config(cache_bytes=num_bytes - 1), 64, max_length) * 4 < max_length


def test_insufficient_memory_error_contains_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGpu(monkeypatch, free=123, total=456)

    def fail(*args: Any, **settings: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(worker_module, "PagedRunner", fail)
    with pytest.raises(ConfigError, match=r"memory of 456 bytes is not sufficient: weights take \d+.*123 are free"):
        capabilities()


def test_run_sampling_uses_most_demanding_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows have masks."""
    model, applied = make_paged("llama-gqa", CPU), list[tuple[int, ...]]()
    allowed = TokenMasks.allowed

    def note(self: TokenMasks, vocab_size: int) -> torch.Tensor:
        flags = allowed(self, vocab_size)
        assert flags.all()
        applied.append(tuple(flags.shape))
        return flags

    monkeypatch.setattr(TokenMasks, "allowed", note)
    run_sampling(model, 3, 128, make_permissive_masks(model, 3))
    assert applied == [(3, model.lm_head.vocab_size)]


@pytest.mark.parametrize(
    ("rows", "vocab_size", "num_mib"), [(1, 32, 40), (64, 128_256, 40), (512, 262_144, 40), (1024, 262_144, 80)]
)
def test_mask_bytes_round_up_to_segments(rows: int, vocab_size: int, num_mib: int) -> None:
    """Two steps are in flight. Masks for 512 rows and 262,144 tokens take 16 MiB per step."""
    assert count_mask_bytes(rows, vocab_size) == num_mib * 2**20


def test_step_memory_includes_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = make_paged("llama-gqa", CPU)
    sizes, shape, measured = GraphSizes(), CacheShape(16, 4), list[Any]()
    masks = make_permissive_masks(model, 7)
    tables = SlotTables(7, 16, 4, CPU)
    monkeypatch.setattr(model, "device", torch.device("cuda"))
    monkeypatch.setattr(memory, "make_permissive_masks", lambda _, num_seqs: masks if num_seqs == 7 else None)
    monkeypatch.setattr(memory, "SlotTables", lambda *_: tables)
    monkeypatch.setattr(memory, "measure_graphs", lambda *_: 3)
    monkeypatch.setattr(memory, "run_prompts", lambda *_: None)
    monkeypatch.setattr(memory, "run_sampling", lambda *arguments: measured.append(arguments))

    def measure(_: Any, run: Any) -> int:
        run()
        return 10**6

    monkeypatch.setattr(memory, "_measure_peak", measure)
    needs = memory.measure_step_memory(model, None, sizes, 7, 16, shape)
    assert measured == [(model, 7, 16, masks)]
    of_rows = tables.token_ids.nbytes + 3 * tables.blocks.nbytes
    assert needs.tables == of_rows + count_mask_bytes(7, model.lm_head.vocab_size)


def test_prompt_blocks_are_counted() -> None:
    assert count_prompt_blocks(300, CacheShape(128, 16)) == 8 + 8 + 3
    assert count_prompt_blocks(5, CacheShape(128, 16)) == 1


def test_adapter_tables_are_small_fraction_of_memory() -> None:
    rows = memory.count_adapter_rows(2**30, 300)
    assert 0.99 * 2**30 / 64 < rows * 300 * 84 <= 2**30 / 64
    assert memory.count_adapter_rows(0, 300) == memory.count_adapter_rows(2**20, 300) == 64


@pytest.mark.parametrize("requested", [None, False])
def test_cuda_graphs_are_rejected_on_cpu(requested: bool | None) -> None:
    assert capabilities(cuda_graphs=requested).num_blocks > 0
    with pytest.raises(ConfigError, match="CUDA graphs require a GPU; remove the cuda_graphs setting"):
        capabilities(cuda_graphs=True)


def test_requested_but_unsupported_graphs_are_rejected() -> None:
    model: Any = SimpleNamespace(device=torch.device("cuda"), ops=reference)
    two: Any = SimpleNamespace(size=lambda: 2)
    for group, problem in ((two, "do not support tensor parallelism"), (FakeGroup(), "require kernels")):
        assert not uses_graphs(model, make_config(), group)
        with pytest.raises(ConfigError, match=f"CUDA graphs {problem}"):
            uses_graphs(model, make_config(cuda_graphs=True), group)


def test_adapter_memory_has_default_sizes() -> None:
    assert memory.adapter_bytes(make_config(), CPU) == 2**30
    assert memory.adapter_bytes(make_config(adapter_bytes=0), CPU) == 0
    assert memory.adapter_host_bytes(make_config()) == total_memory_bytes() // 4
    assert memory.adapter_host_bytes(make_config(adapter_host_bytes=7)) == 7


# --- Model selection --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["", "[]", "{", '{"model_type": []}'])
def test_invalid_config_is_reported_at_load(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    assert is_paged(EngineConfig(ModelConfig(tmp_path)))
    with pytest.raises(ConfigError):
        build_worker(EngineConfig(ModelConfig(tmp_path)))


@pytest.fixture(scope="module")
def codegen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = SERVED["codegen"]()
    assert config.model_type not in MODEL_CLASSES
    return save(tmp_path_factory.mktemp("codegen"), make_model(config), make_tokenizer())


def test_unknown_model_type_runs_padded(codegen: Path) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = EngineConfig(ModelConfig(codegen, device=device), max_num_seqs=3, max_length=40)
    assert not is_paged(config)
    worker = build_worker(config)
    result = worker.capabilities
    assert (result.max_num_seqs, result.max_length, result.num_adapter_units, result.can_chunk) == (3, 40, 0, False)
    worker.close()


def test_unsupported_options_of_padded_models_are_rejected(codegen: Path) -> None:
    with pytest.raises(ConfigError, match="does not support tensor parallelism"):
        build_worker(EngineConfig(ModelConfig(codegen), tensor_parallel=2))
    with pytest.raises(ConfigError, match="does not support quantize = fp8-kv"):
        build_worker(EngineConfig(ModelConfig(codegen, quantize="fp8-kv")))
    other = "cpu" if torch.cuda.is_available() else "cuda"
    with pytest.raises(ConfigError, match=f"runs on the GPU if one is available, not on {other}"):
        build_worker(EngineConfig(ModelConfig(codegen, device=other)))


@pytest.mark.parametrize("name", ["gpt2", "opt-pre-norm", "llama-gqa"])
@pytest.mark.parametrize(("step_tokens", "block_size"), [(5, 16), (128, 8), (300, 16)])
def test_largest_warm_up_step_runs(name: str, step_tokens: int, block_size: int) -> None:
    """Cover steps with more tokens than positions, and decode steps with maximum-length block tables."""
    model = build_model(VARIANTS[name].config(), make_weights(checkpoint(name, make_oracle(name)), CPU))
    counted: list[int] = []
    model.register_forward_pre_hook(lambda _, arguments: counted.append(len(arguments[0])))
    run_prompts(model, step_tokens, CacheShape(128, block_size))
    run_decode(model, 3, CacheShape(128, block_size))
    run_decode(model, 1, CacheShape(1, block_size))
    assert counted == [step_tokens, 3, 1]


def test_idle_rank_trims_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[None] = []
    monkeypatch.setattr(executor, "IDLE_BEFORE_TRIM_S", 0.0)

    def give_back() -> None:
        given_back.append(None)
        there.send_bytes(pickle.dumps("plan"))

    monkeypatch.setattr(executor, "trim_malloc", give_back)
    here, there = multiprocessing.Pipe()
    with here, there:
        plan: Any = executor.receive_plan(here)
        assert plan == "plan"
        assert len(given_back) == 1
        there.send_bytes(pickle.dumps("another"))
        plan = executor.receive_plan(here)
        assert plan == "another"
    assert len(given_back) == 1, "a rank that is busy keeps what it has"
