"""The adapter table: single rules, then the real engine on fake workers that detect invalid use."""

import random
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lorax_server.adapters.config import AdapterConfig
from lorax_server.adapters.spec import AdapterCheckpoint, AdapterSpec
from lorax_server.engine.adapters import device_tier, host_tier, registry, table
from lorax_server.engine.adapters.device_tier import UNUSED_ADAPTER_PROTECTION_S
from lorax_server.engine.adapters.table import MAX_PREPARING, AdapterTable
from lorax_server.errors import AdapterError, InputError, LoraxError, SourceError
from lorax_server.plan import AdapterOp, DropOp, LoadOp, PrepareOp, PrepareResult, UnloadOp
from lorax_server.types import AdapterRef, AdapterStage, Merge
from tests.engine.fake_workers import UNIT_BYTES, VOCAB, EngineSimulation, make_capabilities, make_spec
from tests.grids import slow_except


class TableHarness:
    """A table with workers that finish every operation within the step, unless blocked."""

    def __init__(self, units: int = 10, host: int = 100, max_adapters: int = 2**31 - 1, **options: Any) -> None:
        self.now = 0.0
        self.table = AdapterTable(
            make_capabilities(units, max_adapters=max_adapters),
            host_bytes=host * UNIT_BYTES,
            clock=lambda: self.now,
            **options,
        )
        self.num_steps = 0
        self.preparing: list[AdapterSpec] = []
        self.loading: list[int] = []
        self.ops: list[AdapterOp] = []

    def register(self, **sizes: int) -> None:
        for identity, units in sizes.items():
            self.table.register(make_spec(identity, units), prefetch=False)

    def step(self, prepare: bool = True, load: bool = True) -> list[AdapterOp]:
        self.table.advance()
        on_host = self.on_host
        ops = list(self.table.submit())
        assert all(op.identity in on_host for op in ops if isinstance(op, LoadOp)), "loaded from nowhere"
        self.ops += ops
        self.num_steps += 1
        self.preparing += [op.spec for op in ops if isinstance(op, PrepareOp)]
        self.loading += [op.index for op in ops if isinstance(op, LoadOp) and not op.is_ordered]
        self.table.complete_step(self.num_steps, self.loading if load else ())
        if load:
            self.loading = []
        while prepare and self.preparing:
            self.finish_prepare(self.preparing[0].identity)
        return ops

    def finish_prepare(self, identity: str, error: LoraxError | None = None) -> None:
        spec = next(spec for spec in self.preparing if spec.identity == identity)
        self.preparing.remove(spec)
        units = 0 if error else spec.num_elements
        self.table.process_prepared(PrepareResult(identity, units, units * UNIT_BYTES, VOCAB, error))

    def steps(self, count: int = 6) -> list[str]:
        """Run steps, and return the identities of arrived adapters."""
        for _ in range(count):
            self.step()
        self.table.advance()
        return self.table.pop_loaded()

    def request(self, *identities: str) -> None:
        for identity in identities:
            self.table.add_request(identity)
            if self.table.index_of(identity, has_started=False) is None:
                self.table.ensure_loaded(identity)

    def start(self, *identities: str) -> None:
        for identity in identities:
            assert self.table.index_of(identity, has_started=False) is not None
            self.table.start_request(identity)
            self.table.acquire(identity)

    def end(self, *identities: str) -> None:
        for identity in identities:
            self.table.release(identity)
            self.table.remove_request(identity, has_started=True)

    def use(self, *identities: str) -> None:
        """Run one request per adapter, in order."""
        for identity in identities:
            self.request(identity)
            self.steps()
            self.start(identity)
            self.end(identity)

    def state(self, *identities: str) -> list[AdapterStage | None]:
        return [self.table.state(identity) for identity in identities]

    @property
    def on_device(self) -> set[str]:
        entries = self.table._registry.entries
        return {identity for identity in entries if self.table.state(identity) is AdapterStage.DEVICE}

    @property
    def on_host(self) -> set[str]:
        return set(self.table._host._entries)


# --- Single rules -----------------------------------------------------------------------------------------------------


def test_adapter_moves_from_disk_to_device() -> None:
    harness = TableHarness()
    assert harness.state("a") == [None]
    harness.register(a=3)
    assert harness.state("a") == [AdapterStage.DISK]
    harness.request("a")
    assert [type(op) for op in harness.step(prepare=False)] == [PrepareOp]
    assert harness.state("a") == [AdapterStage.PREPARING]
    assert harness.table.num_preparing == 1
    harness.finish_prepare("a")
    assert harness.state("a") == [AdapterStage.HOST]
    assert harness.step(load=False) == [LoadOp("a", 1, 0)]
    assert harness.state("a") == [AdapterStage.LOADING]
    assert harness.table.is_loading
    assert harness.table.index_of("a", has_started=False) is None
    harness.step()
    assert harness.state("a") == [AdapterStage.DEVICE]
    assert harness.table.index_of("a", has_started=False) == 1
    assert harness.table.vocab_size("a") == VOCAB
    assert harness.table.pop_loaded() == ["a"]
    assert (harness.table.num_on_host, harness.table.num_on_device, harness.table._host.bytes_used) == (
        1,
        1,
        3 * UNIT_BYTES,
    )


def test_base_model_is_always_loaded() -> None:
    table = TableHarness(units=0).table
    table.add_request("")
    assert table.index_of("", has_started=False) == 0
    assert table.vocab_size("") == VOCAB
    table.start_request("")
    table.acquire("")
    table.release("")
    table.remove_request("", has_started=True)
    assert table.submit() == ()
    table.complete_step(1, [])
    assert not table.needs_step


def test_adapters_need_device_memory() -> None:
    with pytest.raises(AdapterError, match="does not support adapters"):
        TableHarness(units=0).register(a=1)


def test_unknown_adapter_is_rejected() -> None:
    table = TableHarness().table
    for call in (table.add_request, lambda identity: table.request_load(identity, pin=True)):
        with pytest.raises(AdapterError, match="resolve its name again"):
            call("nobody")
    table.unload_when_idle("nobody")


def test_device_evicts_least_recently_used() -> None:
    harness = TableHarness(units=10)
    harness.register(a=4, b=4, c=4)
    harness.use("a", "b", "a")
    harness.use("c")
    assert harness.on_device == {"a", "c"}
    assert harness.on_host == {"a", "b", "c"}
    harness.use("b")
    assert harness.on_device == {"b", "c"}
    assert harness.table.counters.adapters_evicted_from_device == 2


def test_index_is_reused() -> None:
    harness = TableHarness(units=10)
    harness.register(a=4, b=4, c=4)
    harness.use("a", "b", "c")
    assert [op.index for op in harness.ops if isinstance(op, LoadOp)] == [1, 2, 1]
    assert [op for op in harness.ops if isinstance(op, UnloadOp)] == [UnloadOp(1)]


def test_device_evicts_if_indices_run_out() -> None:
    harness = TableHarness(units=1000, max_adapters=3)
    names = [f"adapter-{number}" for number in range(8)]
    harness.register(**dict.fromkeys(names, 2))
    for name in names:
        harness.use(name)
        assert name in harness.on_device
        assert len(harness.on_device) <= 3
    assert harness.on_device == set(names[-3:])
    assert {op.index for op in harness.ops if isinstance(op, LoadOp)} == {1, 2, 3}
    assert harness.table.counters.adapters_evicted_from_device == 5


def test_waiting_adapter_gets_index_of_draining_adapter() -> None:
    harness = TableHarness(units=1000, max_adapters=1, eviction_delay_s=1.0)
    harness.register(a=2, b=2)
    harness.request("a")
    harness.steps()
    harness.start("a")
    harness.request("b")
    harness.now = 2.0
    assert harness.steps() == []
    harness.end("a")
    harness.now = 60.0
    assert harness.steps() == ["b"]


def test_load_fails_if_pinned_adapters_use_all_indices() -> None:
    harness = TableHarness(units=1000, max_adapters=1)
    harness.register(pinned=2, a=2)
    harness.table.request_load("pinned", pin=True)
    harness.steps()
    harness.request("a")
    assert harness.steps() == []
    [(identity, error)] = harness.table.pop_failed()
    assert identity == "a"
    assert "device holds at most 1 adapters, and all are pinned" in str(error)


def test_host_evicts_least_recently_used() -> None:
    harness = TableHarness(units=100, host=10)
    harness.register(a=4, b=4, c=4)
    harness.use("a", "b", "a", "c")
    assert harness.on_host == {"a", "c"}
    assert harness.on_device == {"a", "b", "c"}
    assert harness.table._host.bytes_used == 8 * UNIT_BYTES
    assert [op for op in harness.ops if isinstance(op, DropOp)] == [DropOp("b")]


def test_evicted_adapter_without_host_copy_is_prepared_again() -> None:
    harness = TableHarness(units=8, host=4)
    harness.register(a=4, b=4, c=4)
    harness.use("a", "b", "c", "a")
    assert Counter(op.spec.identity for op in harness.ops if isinstance(op, PrepareOp)) == {"a": 2, "b": 1, "c": 1}


def test_adapter_larger_than_host_memory_is_rejected_before_reading() -> None:
    harness = TableHarness(units=30, host=10)
    with pytest.raises(AdapterError, match="'big': may need 44 bytes"):
        harness.register(big=11)
    assert harness.table.state("big") is None
    harness.register(a=10)
    harness.use("a")
    assert harness.on_device == {"a"}


def test_moved_adapter_is_prepared_from_new_folder() -> None:
    harness = TableHarness()
    harness.register(a=4)
    harness.table.add_request("a")
    harness.table.ensure_loaded("a")
    harness.step(prepare=False)
    part = AdapterCheckpoint(Path("/elsewhere"), AdapterConfig("a", 1, 1.0), (1,))
    harness.table.register(replace(make_spec("a", 4), checkpoints=(part,)))
    harness.finish_prepare("a", AdapterError("changed while it was read"))
    assert harness.table.pop_failed() == []
    assert harness.steps() == ["a"]


def test_adapter_larger_than_estimate_evicts_other_adapters() -> None:
    harness = TableHarness(host=10)
    harness.register(a=5, b=5)
    harness.use("a")
    harness.request("b")
    harness.step(prepare=False)
    harness.table.process_prepared(PrepareResult("b", 6, 6 * UNIT_BYTES, VOCAB))
    assert harness.on_host == {"b"}
    assert harness.table._host.bytes_used == 6 * UNIT_BYTES


def test_pinned_adapter_is_not_evicted() -> None:
    harness = TableHarness(units=10)
    harness.register(pinned=4, a=4, b=4, c=6)
    harness.table.request_load("pinned", pin=True)
    assert harness.steps() == ["pinned"]
    harness.now = 100.0
    harness.use("a", "b", "a", "c")
    assert harness.on_device == {"pinned", "c"}


def test_load_of_loaded_adapter_completes_immediately() -> None:
    harness = TableHarness()
    harness.register(a=4)
    harness.table.request_load("a", pin=False)
    assert harness.steps() == ["a"]
    harness.table.request_load("a", pin=True)
    assert harness.table.has_events
    assert harness.table.pop_loaded() == ["a"]
    assert not harness.table.has_events


def test_unpinned_load_can_be_evicted() -> None:
    harness = TableHarness(units=6)
    harness.register(a=4, b=4)
    harness.table.request_load("a", pin=False)
    harness.steps()
    harness.use("b")
    assert harness.on_device == {"b"}


def test_load_fails_if_pinned_adapters_use_memory() -> None:
    harness = TableHarness(units=10)
    harness.register(pinned=6, a=5, b=4)
    harness.table.request_load("pinned", pin=True)
    harness.steps()
    harness.request("a", "b")
    assert harness.steps() == ["b"]
    [(identity, error)] = harness.table.pop_failed()
    assert identity == "a"
    assert "needs 20 bytes of device memory; the adapter buffer has 40 bytes, 24 of them pinned" in str(error)
    assert harness.state("a") == [AdapterStage.FAILED]
    assert harness.on_host == {"pinned", "b"}
    harness.table.remove_request("a", has_started=False)
    harness.table.unload_when_idle("pinned")
    harness.now = 60.0
    harness.use("a")
    assert "a" in harness.on_device


def test_adapter_larger_than_device_is_rejected() -> None:
    harness = TableHarness(units=10)
    harness.register(big=11)
    harness.table.request_load("big", pin=True)
    assert harness.steps() == []
    [(identity, error)] = harness.table.pop_failed()
    assert identity == "big"
    assert isinstance(error, AdapterError)
    assert harness.table._host.bytes_used == 0


def test_failed_adapter_is_rejected_until_retry() -> None:
    harness = TableHarness(retry_s=10.0)
    harness.register(a=4)
    harness.request("a")
    harness.step(prepare=False)
    harness.finish_prepare("a", SourceError("gone"))
    assert harness.table.pop_failed()[0][0] == "a"
    assert harness.state("a") == [AdapterStage.FAILED]
    assert harness.table._host.bytes_used == 0
    harness.table.remove_request("a", has_started=False)
    harness.now = 4.0
    with pytest.raises(SourceError, match="gone") as refused:
        harness.table.add_request("a")
    assert refused.value.retry_after_s == 6.0
    with pytest.raises(SourceError, match="gone"):
        harness.table.request_load("a", pin=False)
    harness.now = 10.0
    harness.use("a")
    assert harness.on_device == {"a"}


def test_failed_load_clears_pin() -> None:
    harness = TableHarness(units=6, retry_s=10.0)
    harness.register(a=4, b=4)
    harness.table.request_load("a", pin=True)
    harness.step(prepare=False)
    harness.finish_prepare("a", AdapterError("damaged"))
    harness.now = 10.0
    harness.use("a", "b")
    assert harness.on_device == {"b"}


def test_resolved_adapter_is_prefetched() -> None:
    harness = TableHarness()
    harness.table.register(make_spec("a", 4))
    assert harness.table.has_events
    harness.step()
    assert harness.state("a") == [AdapterStage.HOST]
    harness.table.register(make_spec("a", 4))
    assert harness.steps() == []
    assert harness.state("a") == [AdapterStage.HOST]
    assert len(harness.ops) == 1


def test_waiting_adapter_is_prepared_before_prefetch() -> None:
    harness = TableHarness()
    harness.table.register(make_spec("named", 4))
    harness.register(**{f"w{i}": 1 for i in range(MAX_PREPARING)})
    harness.request(*(f"w{i}" for i in range(MAX_PREPARING)))
    ops = harness.step()
    assert [op.spec.identity for op in ops if isinstance(op, PrepareOp)] == [f"w{i}" for i in range(MAX_PREPARING)]
    harness.step()
    assert harness.state("named") == [AdapterStage.HOST]


def test_prefetch_evicts_only_if_enough_memory_can_be_freed() -> None:
    harness = TableHarness(units=100, host=10)
    harness.register(idle=5, busy=5)
    harness.use("idle")
    harness.request("busy")
    harness.steps()
    harness.start("busy")
    harness.table.register(make_spec("named", 6))
    harness.now = 100.0
    harness.steps()
    assert harness.on_host == {"idle", "busy"}
    harness.end("busy")
    harness.steps()
    assert harness.on_host == {"named"}


def test_concurrent_preparations_are_limited() -> None:
    harness = TableHarness()
    harness.register(**{f"a{i}": 1 for i in range(MAX_PREPARING + 2)})
    harness.request(*(f"a{i}" for i in range(MAX_PREPARING + 2)))
    harness.step(prepare=False)
    harness.step(prepare=False)
    assert harness.table.num_preparing == len(harness.preparing) == MAX_PREPARING
    harness.finish_prepare("a2")
    harness.step(prepare=False)
    assert [spec.identity for spec in harness.preparing] == ["a0", "a1", "a3", "a4"]


def test_adapters_load_in_arrival_order() -> None:
    harness = TableHarness(units=4, host=100)
    harness.register(a=4, b=4, c=1)
    harness.request("a")
    harness.steps()
    harness.start("a")
    harness.request("b", "c")
    assert harness.steps() == []  # `c` would fit, but the space is reserved for `b`
    harness.end("a")
    assert harness.steps() == ["b"]
    harness.start("b")
    harness.end("b")
    assert harness.steps() == ["c"]


def test_no_step_waits_for_packed_adapter_that_waited_for_space() -> None:
    harness = TableHarness(units=10)
    harness.register(busy=10)
    harness.request("busy")
    harness.steps()
    harness.start("busy")
    harness.table.add_packed(make_spec("new", 10), PrepareResult("new", 10, 10 * UNIT_BYTES, VOCAB, is_on_device=True))
    harness.table.request_load("new")
    packed = [op for op in harness.step(prepare=False) if isinstance(op, PrepareOp)]
    assert [op.is_packed for op in packed] == [True]
    harness.preparing.clear()  # `add_packed` has recorded the result
    assert "new" not in harness.on_device
    harness.end("busy")
    loads = [op for _ in range(4) for op in harness.step() if isinstance(op, LoadOp)]
    assert [(op.identity, op.is_ordered) for op in loads] == [("new", False)]
    assert "new" in harness.on_device


def test_unload_of_idle_adapter_evicts_immediately() -> None:
    harness = TableHarness()
    harness.register(a=4)
    harness.table.request_load("a", pin=True)
    harness.steps()
    harness.table.unload_when_idle("a")
    assert harness.table.needs_step
    assert harness.step() == [UnloadOp(1), DropOp("a")]
    assert harness.state("a") == [AdapterStage.DISK]
    assert harness.table._host.bytes_used == 0


def test_unload_during_requests_evicts_after_them() -> None:
    harness = TableHarness()
    harness.register(a=4)
    harness.request("a", "a")
    harness.steps()
    harness.start("a")
    harness.table.unload_when_idle("a")
    harness.steps()
    assert harness.on_device == {"a"}
    harness.start("a")
    harness.end("a")
    assert harness.on_device == {"a"}
    harness.end("a")
    assert harness.state("a") == [AdapterStage.DISK]


def test_request_after_unload_keeps_adapter() -> None:
    harness = TableHarness()
    harness.register(a=4)
    harness.request("a")
    harness.steps()
    harness.start("a")
    harness.table.unload_when_idle("a")
    harness.request("a")
    harness.start("a")
    harness.end("a", "a")
    assert harness.on_device == {"a"}


def test_resolve_after_unload_keeps_adapter() -> None:
    harness = TableHarness()
    harness.register(a=4)
    harness.table.unload_when_idle("a")
    harness.table.register(make_spec("a", 4))
    harness.steps()
    assert harness.on_host == {"a"}


@pytest.mark.parametrize("steps", [1, 2])
def test_unload_during_load_evicts_after_load(steps: int) -> None:
    harness = TableHarness()
    harness.register(a=4)
    harness.table.request_load("a", pin=True)
    for _ in range(steps):  # still preparing or loading
        harness.step(prepare=steps == 2, load=False)
    harness.table.unload_when_idle("a")
    harness.step()
    assert harness.steps() == []
    assert harness.state("a") == [AdapterStage.DISK]
    assert not harness.table.needs_step
    assert harness.table._host.bytes_used == 0


def test_abort_during_load_does_not_block_next_request() -> None:
    harness = TableHarness()
    harness.register(a=4)
    harness.request("a")
    harness.step()
    harness.step(load=False)
    assert harness.state("a") == [AdapterStage.LOADING]
    harness.table.remove_request("a", has_started=False)
    harness.request("a")
    harness.step(load=False)
    assert harness.steps() == ["a"]
    assert Counter(type(op) for op in harness.ops) == {PrepareOp: 1, LoadOp: 1}


def test_new_adapter_is_protected_until_first_run() -> None:
    harness = TableHarness(units=4, eviction_delay_s=1.0)
    harness.register(a=4, b=4)
    harness.request("a", "b")
    assert harness.steps() == ["a"]
    harness.now = UNUSED_ADAPTER_PROTECTION_S - 0.1
    assert harness.steps() == []
    assert harness.on_device == {"a"}
    harness.start("a")
    harness.end("a")
    assert harness.steps() == ["b"]


def test_protection_of_unused_adapter_expires() -> None:
    """A request that never runs must not block all other adapters."""
    harness = TableHarness(units=4, eviction_delay_s=1.0)
    harness.register(a=4, b=4)
    harness.now = 50.0
    harness.request("a")
    assert harness.steps() == ["a"]
    harness.now += UNUSED_ADAPTER_PROTECTION_S - 0.5
    harness.request("b")
    harness.now += 0.5  # the protection of `a` has expired, but it has a waiting request and `b` is not overdue
    assert harness.steps() == []
    harness.now += 0.5
    assert harness.steps() == ["b"]
    assert harness.on_device == {"b"}
    harness.table.ensure_loaded("a")
    harness.now += UNUSED_ADAPTER_PROTECTION_S - 0.1  # now the same for `b`, and for `a` after loading
    assert harness.steps() == []
    harness.now += 0.1
    assert harness.steps() == ["a"]
    harness.now += UNUSED_ADAPTER_PROTECTION_S - 0.1
    harness.table.ensure_loaded("b")
    assert harness.steps() == []


def test_draining_unused_adapter_is_not_protected() -> None:
    harness = TableHarness(units=4, eviction_delay_s=1.0)
    harness.register(a=4, b=4)
    harness.request("a")
    harness.steps()
    harness.start("a")
    harness.table.release("a")  # preempted
    harness.request("b")
    harness.now = 1.0
    assert harness.steps() == ["b"]
    harness.table.ensure_loaded("a")
    harness.start("b")
    harness.end("b")
    assert harness.steps() == ["a"]  # for a started request, so it is protected
    harness.request("a", "b")
    harness.now = 2.0
    assert harness.steps() == []
    assert harness.table.index_of("a", has_started=False) is None  # it drains for the second adapter
    harness.table.ensure_loaded("a")
    assert harness.steps() == []  # a started request continues
    harness.table.remove_request("a", has_started=True)  # aborted before it runs
    assert harness.steps() == ["b"]


def test_adapter_without_requests_is_not_protected() -> None:
    harness = TableHarness(units=4)
    harness.register(a=4, b=4)
    harness.request("a", "b")
    harness.steps()
    harness.table.remove_request("a", has_started=False)
    assert harness.steps() == ["b"]


def test_adapter_with_requests_is_evicted_only_for_overdue_adapter() -> None:
    harness = TableHarness(units=4, eviction_delay_s=1.0)
    harness.register(a=4, b=4)
    harness.use("a")
    harness.request("a", "b")  # the first request is ready
    harness.now = 0.5
    assert harness.steps() == []
    assert harness.table.deadline_s == 0.5
    harness.now = 1.0
    assert harness.steps() == ["b"]
    assert harness.table.deadline_s is None


def test_overdue_adapter_triggers_advance() -> None:
    harness = TableHarness(units=4, eviction_delay_s=1.0)
    harness.register(a=4, b=4)
    harness.use("a")
    harness.request("a", "b")
    harness.now = 0.9
    assert harness.steps() == []
    harness.now = 1.5
    assert not harness.table.has_events
    assert harness.table.deadline_s == 0.0
    assert harness.steps() == ["b"]
    assert harness.table.deadline_s is None


def test_busy_adapter_drains_for_overdue_adapter() -> None:
    harness = TableHarness(units=8, eviction_delay_s=1.0)
    harness.register(a=4, b=4, c=4)
    harness.request("a", "b", "c")
    harness.steps()
    harness.start("b", "a")  # so `b` was used less recently
    harness.now = 0.9
    harness.steps()
    assert harness.table.index_of("b", has_started=False) is not None
    harness.now = 1.0
    harness.steps()
    assert harness.table.index_of("a", has_started=False) is not None
    assert harness.table.index_of("b", has_started=False) is None
    assert harness.table.index_of("b", has_started=True) is not None  # a started request continues
    harness.request("b")
    harness.now = 50.0
    assert harness.steps() == []
    harness.end("b")
    assert harness.steps() == ["c"]
    assert harness.on_device == {"a", "c"}
    harness.start("c")
    harness.now = 51.0
    assert harness.steps() == []
    harness.end("a")
    assert harness.steps() == ["b"]


def test_draining_stops_if_not_needed() -> None:
    harness = TableHarness(units=4, eviction_delay_s=1.0)
    harness.register(a=4, b=4)
    harness.request("a", "b")
    harness.steps()
    harness.start("a")
    harness.now = 1.0
    harness.steps()
    harness.request("a")
    harness.table.remove_request("b", has_started=False)
    assert harness.steps() == ["a"]
    harness.start("a")


def test_pin_stops_draining() -> None:
    harness = TableHarness(units=8, eviction_delay_s=1.0)
    harness.register(a=4, b=4, c=4)
    harness.request("a", "b", "c")
    harness.steps()
    harness.start("a", "b")
    harness.now = 1.0
    harness.steps()
    assert harness.table.index_of("a", has_started=False) is None
    harness.request("a")
    harness.table.request_load("a", pin=True)
    assert harness.steps() == ["a"]
    assert harness.table.index_of("b", has_started=False) is None
    harness.end("b")
    assert harness.steps() == ["c"]


def test_adapter_without_host_copy_stays_for_started_requests() -> None:
    harness = TableHarness(units=8, host=4, eviction_delay_s=1.0)
    harness.register(a=4, b=4, c=4)
    harness.use("a", "b")  # so `a` has no host copy
    harness.request("a")
    harness.start("a")
    harness.table.release("a")  # preempted
    harness.request("b", "c")
    harness.start("b")
    harness.now = 9.0
    assert harness.steps() == []
    assert harness.table.index_of("a", has_started=True) is not None
    harness.table.remove_request("a", has_started=True)
    assert harness.steps() == ["c"]


def test_drained_adapter_without_host_copy_is_prepared_again() -> None:
    harness = TableHarness(units=4, host=4, eviction_delay_s=1.0)
    harness.register(a=4, b=4)
    harness.use("a")
    harness.table.register(make_spec("b", 4))
    harness.steps()
    assert harness.on_host == {"b"}
    harness.request("a")
    harness.start("a")
    harness.request("b")
    harness.now = 1.0
    harness.steps()
    harness.request("a")
    harness.end("a")
    assert harness.steps() == ["b"]
    harness.start("b")
    harness.end("b")
    harness.now = 2.0
    assert harness.steps() == ["a"]


def test_host_copy_of_started_adapter_is_evicted_only_if_overdue() -> None:
    harness = TableHarness(units=8, host=4, eviction_delay_s=1.0)
    harness.register(a=4, b=4)
    harness.request("a")
    harness.steps()
    harness.start("a")
    harness.request("b")
    harness.now = 0.9
    assert harness.steps() == []
    assert harness.on_host == {"a"}
    harness.now = 1.0
    assert harness.steps() == ["b"]
    assert harness.on_device == {"a", "b"}


def test_freed_host_memory_is_reserved_for_overdue_adapter() -> None:
    """Two adapters alternate on the device. Without the reservation, a third would starve."""
    harness = TableHarness(units=4, host=6, eviction_delay_s=1.0)
    harness.register(a=3, b=3, c=4)
    harness.request("a")
    harness.steps()
    harness.start("a")
    harness.request("b")
    harness.steps()
    harness.request("c")
    harness.now = 5.0
    harness.steps()
    assert harness.on_host == {"b"}
    harness.request("a")
    harness.end("a")
    assert harness.steps() == ["b"]
    harness.start("b")
    harness.steps()
    assert harness.on_host == {"c"}


def test_only_copy_of_started_adapter_is_kept() -> None:
    harness = TableHarness(units=4, host=8, eviction_delay_s=1.0)
    harness.register(a=4, b=4, c=4)
    harness.request("a")
    harness.steps()
    harness.start("a")
    harness.table.release("a")  # preempted
    harness.request("b")
    harness.now = 1.0
    assert harness.steps()[-1] == "b"
    harness.start("b")
    harness.request("c")
    harness.now = 50.0
    harness.steps()
    assert "a" in harness.on_host


def test_same_content_is_read_from_new_folder() -> None:
    harness = TableHarness(units=100, host=4)
    spec = make_spec("a", 4)
    moved = replace(spec, checkpoints=(AdapterCheckpoint(Path("/elsewhere"), AdapterConfig("a", 1, 1.0), (1,)),))
    harness.table.register(spec)
    harness.steps()
    harness.table.register(moved)  # although it is in host memory
    assert len(harness.ops) == 1
    harness.register(b=4)
    harness.use("b")
    assert harness.on_host == {"b"}
    harness.use("a")
    assert [op.spec for op in harness.ops if isinstance(op, PrepareOp)][-1] is moved


def test_new_folder_clears_failure() -> None:
    harness = TableHarness()
    spec = make_spec("a", 4)
    moved = replace(spec, checkpoints=(AdapterCheckpoint(Path("/elsewhere"), AdapterConfig("a", 1, 1.0), (1,)),))
    harness.table.register(spec)
    harness.step(prepare=False)
    harness.finish_prepare("a", AdapterError("gone"))
    harness.table.register(spec)
    assert harness.state("a") == [AdapterStage.FAILED]
    harness.table.register(moved)
    assert harness.state("a") == [AdapterStage.DISK]
    harness.use("a")
    assert harness.on_device == {"a"}


def test_registry_evicts_least_recently_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MAX_KNOWN_ADAPTERS", 3)
    harness = TableHarness()
    harness.register(a=1, b=1, c=1)
    harness.use("a")
    harness.request("b")
    harness.table.register(make_spec("c", 1))
    harness.register(d=1, e=1, f=1, g=1)
    assert harness.state("a", "b", "c", "d") == [AdapterStage.DEVICE, AdapterStage.DISK, None, None]
    harness.steps()
    assert harness.state("b") == [AdapterStage.DEVICE]
    with pytest.raises(AdapterError, match="resolve its name again"):
        harness.table.add_request("c")


def test_registry_limits_idle_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MAX_MERGES", 2)
    harness = TableHarness()
    merges = [replace(make_spec(f"m{number}", 1), merge=Merge((1.0, 0.5))) for number in range(50)]
    harness.register(x=1, y=1, z=1)
    harness.table.register(merges[0])
    harness.use("m0")
    for spec in merges:
        harness.table.register(spec)
    states = harness.state(*(spec.identity for spec in merges))
    assert (states[0], states[-1]) == (AdapterStage.DEVICE, AdapterStage.DISK)
    assert len(states) - states.count(None) <= 3
    assert harness.state("x", "y", "z") == [AdapterStage.DISK] * 3
    assert [harness.table.is_merged(name) for name in ("m0", "m1", "x", "")] == [True, False, False, False]


def test_list_adapters_returns_requested_adapters() -> None:
    harness = TableHarness()
    harness.register(a=1, b=1, c=1)
    assert [each.identity for each in harness.table.list_adapters(["c", "nobody", "a"])] == ["c", "a"]
    with pytest.raises(InputError, match=r"at most 2000 adapters can be listed per call \(got 2001\)"):
        harness.table.list_adapters(["a"] * 2001)


def test_has_events_until_events_are_popped() -> None:
    harness = TableHarness(units=4)
    harness.register(a=4, b=4)
    has_events = [harness.table.has_events]
    harness.request("a")
    has_events.append(harness.table.has_events)
    harness.table.advance()
    has_events.append(harness.table.has_events)
    assert has_events == [False, True, False]
    harness.steps()
    harness.start("a")
    harness.request("b")
    harness.steps()
    harness.table.advance()
    has_events = [harness.table.has_events]  # it cannot be loaded now
    harness.end("a")
    has_events.append(harness.table.has_events)
    assert has_events == [False, True]
    assert harness.steps() == ["b"]


WAITING_CASES = [
    "to load",
    "to load where nothing leaves",
    "to load where half run",
    "to load where others wait too",
    "to prepare",
    "to be named",
]


@pytest.mark.parametrize(
    ("kind", "limit"),
    [
        *((kind, "units") for kind in WAITING_CASES),
        *(pytest.param(kind, "indices", marks=pytest.mark.slow) for kind in WAITING_CASES[:4]),
    ],
)
def test_advance_scales_linearly_with_waiting_adapters(kind: str, limit: str) -> None:
    """Count the lines that `advance` executes: about ten times more for ten times more adapters."""

    def count(number: int) -> int:
        host = number if kind in ("to prepare", "to be named") else 3 * number
        if limit == "units":
            harness = TableHarness(units=number, host=host)
        else:
            harness = TableHarness(units=3 * number, host=host, max_adapters=number)
        for i in range(number):
            harness.register(**{f"old{i}": 1, f"new{i}": 1})
        olds, news = [f"old{i}" for i in range(number)], [f"new{i}" for i in range(number)]
        harness.request(*olds)
        while len(harness.on_device) < number:
            harness.steps(number // MAX_PREPARING + 2)
        for i, old in enumerate(olds if kind != "to load where others wait too" else ()):
            harness.start(old)
            if kind != "to load where nothing leaves" and not (kind == "to load where half run" and i < number // 2):
                harness.end(old)
        if kind.startswith("to load"):
            for i in range(number):
                harness.table.register(make_spec(f"new{i}", 1))
            while len(harness.on_host) < 2 * number:
                harness.step()
        if kind == "to be named":
            for new in news:
                harness.table.register(make_spec(new, 1))
        else:
            harness.request(*news)
        harness.now = 100.0
        return count_lines(harness.table.advance)

    few, many = count(200), count(2000)
    assert many < 15 * few, (few, many)
    assert many < 200 * 2000


def count_lines(call: Callable[[], object]) -> int:
    num_lines = 0
    files = {module.__file__ for module in (table, registry, device_tier, host_tier)}

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        nonlocal num_lines
        num_lines += 1
        return trace if frame.f_code.co_filename in files else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return num_lines


# --- With the engine --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_idle_engine_loads_adapter(max_steps_in_flight: int) -> None:
    simulation = EngineSimulation(10, 10, max_steps_in_flight=max_steps_in_flight)
    for name in "abcd":
        simulation.put(name, 1, 4)
        submitted = simulation.submit(name, [1, 2, 3])
        simulation.finish(100)
        assert submitted.failure is None
    simulation.check_all_memory_is_released()


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_no_empty_steps_during_load(max_steps_in_flight: int) -> None:
    simulation = EngineSimulation(10, 10, max_steps_in_flight=max_steps_in_flight, most_turns=0)
    simulation.put("a", 1, 4)
    load = simulation.workers._load

    def load_slowly(*op: Any) -> None:
        load(*op)
        simulation.workers._loads[op[1]].turns_left = 50

    simulation.workers._load = load_slowly  # type: ignore[assignment, method-assign]
    submitted = simulation.submit("a", [1, 2, 3], num_tokens=3)
    simulation.finish(100)
    assert simulation.num_advances > 50
    assert submitted.failure is None
    steps = simulation.engine.status().steps
    assert steps <= 2 + 3 + max_steps_in_flight, "one to prepare it, one to load it, and its own"
    simulation.check_all_memory_is_released()


def test_resolve_needs_no_step() -> None:
    simulation = EngineSimulation(10, 10)
    simulation.put("a", 1, 4)
    finish_prepare = simulation.engine.resolve([AdapterRef("local", "a")])
    assert finish_prepare.done()
    assert simulation.engine.status().steps == 0
    simulation.submit("a", [1, 2, 3])
    simulation._add_resolved()  # before any step
    assert simulation.engine.has_work
    simulation.finish(100)
    simulation.check_all_memory_is_released()


def test_resolve_starts_prefetch() -> None:
    simulation = EngineSimulation(10, 10)
    simulation.put("a", 1, 4)
    simulation.engine.resolve([AdapterRef("local", "a")])
    simulation.run_until_idle()
    assert simulation.table.state("a@1") is AdapterStage.HOST


@pytest.mark.parametrize("method", ["load", "unload", "list_adapters"])
def test_resolved_adapter_is_usable_before_next_step(method: str) -> None:
    simulation = EngineSimulation(10, 10)
    simulation.put("a", 1, 4)
    identity = simulation.engine.resolve([AdapterRef("local", "a")]).result().identity
    result = getattr(simulation.engine, method)([identity] if method == "list_adapters" else identity)
    assert simulation.table.state(identity) is AdapterStage.DISK
    if method == "list_adapters":
        assert [state.identity for state in result] == [identity]
    if method == "load":
        simulation.run_until_idle()
        assert result.done()
        assert result.exception() is None


def test_resolve_rejects_adapter_larger_than_host_memory() -> None:
    simulation = EngineSimulation(10, 10)
    simulation.put("a", 1, 11)
    error = simulation.engine.resolve([AdapterRef("local", "a")]).exception()
    assert isinstance(error, AdapterError)
    assert "adapter_host_bytes" in str(error)
    assert simulation.engine.list_adapters(["a@1"]) == []


def tier_of(simulation: EngineSimulation, *names: str) -> str:
    refs = [AdapterRef("local", name) for name in names]
    return simulation.engine.resolve(refs, Merge((1.0,) * len(names)) if len(names) > 1 else None).result().tier


def test_resolve_reports_tier() -> None:
    simulation = EngineSimulation(10, 10, most_turns=0)
    for name in "ab":
        simulation.put(name, 1, 4)
    assert tier_of(simulation, "a") == "disk"
    simulation.run_until_idle()
    assert tier_of(simulation, "a") == "host"
    simulation.engine.load("a@1")
    simulation.run_until_idle()
    assert tier_of(simulation, "a") == "device"
    assert tier_of(simulation, "b") == "disk"
    simulation.names.is_new = True
    assert tier_of(simulation, "a") == "fetched"
    simulation.names.is_new = False
    simulation.workers.failing["b@1"] = 1
    simulation.run_until_idle()
    assert simulation.table.state("b@1") is AdapterStage.FAILED
    assert tier_of(simulation, "b") == "disk"


def test_resolve_reports_slowest_tier_of_merge() -> None:
    simulation = EngineSimulation(30, 30, most_turns=0)
    for name in "abc":
        simulation.put(name, 1, 4)
    for name in "ab":
        simulation.engine.resolve([AdapterRef("local", name)])
    simulation.engine.load("a@1")
    simulation.run_until_idle()
    assert tier_of(simulation, "a", "a") == "device"
    assert tier_of(simulation, "a", "b") == "host"
    assert tier_of(simulation, "b", "c", "a") == "disk"
    simulation.run_until_idle()
    assert tier_of(simulation, "b", "c", "a") == "host", "it is there itself by now, though one of its parts is not"


def test_idle_engine_compacts_for_load() -> None:
    for max_steps_in_flight in (1, 2):
        simulation = EngineSimulation(10, 30, max_steps_in_flight=max_steps_in_flight, most_turns=0)
        for name, units in (("a", 2), ("b", 3), ("c", 2), ("d", 3), ("e", 4)):
            simulation.put(name, 1, units)
        for name in "abcd":
            simulation.submit(name, [1])
            simulation.finish(100)
        pins = [simulation.engine.load(f"{name}@1", pin=True) for name in "bd"]
        simulation.run_until_idle()
        simulation.submit("e", [1])
        simulation.finish(100)
        assert all(pin.result(0) is None for pin in pins)
        assert simulation.table.counters.adapter_moves == 1


def test_unload_fails_pending_load() -> None:
    simulation = EngineSimulation(10, 10)
    simulation.put("a", 1, 4)
    simulation.submit("a", [1])
    simulation.finish(100)
    simulation.engine.unload("a@1")
    simulation.run_until_idle()
    loading = simulation.engine.load("a@1")
    simulation.advance()
    simulation.engine.unload("a@1")
    with pytest.raises(AdapterError, match="was unloaded"):
        loading.result(0)
    simulation.check_all_memory_is_released()


def test_load_future_completes() -> None:
    simulation = EngineSimulation(10, 20)
    simulation.put("a", 1, 4)
    simulation.put("big", 1, 11)
    refused = simulation.engine.load("a@1")
    with pytest.raises(AdapterError, match="resolve its name again"):
        refused.result(0)
    for name in ("a", "big"):
        simulation.engine.resolve([AdapterRef("local", name)])
    simulation.run_until_idle()
    well, badly = simulation.engine.load("a@1", pin=True), simulation.engine.load("big@1")
    simulation.run_until_idle()
    assert well.result(0) is None
    with pytest.raises(AdapterError, match="needs 44 bytes"):
        badly.result(0)
    assert simulation.engine.status().adapters_on_device == 1


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
@pytest.mark.parametrize("host_units", slow_except([6], [3, 6, 30]))
@pytest.mark.parametrize("cold", ["c", "cde"])
def test_cold_adapters_are_served_under_load(max_steps_in_flight: int, host_units: int, cold: str) -> None:
    """Serve each cold adapter within a bounded number of steps, repeatedly."""
    for seed in range(4):
        slots = 3 + 4 * (seed % 2)  # few slots cause preemptions; many let all sequences run
        simulation = EngineSimulation(
            6, host_units, max_steps_in_flight=max_steps_in_flight, seed=seed, num_blocks=8 * slots, max_num_seqs=slots
        )
        for name in "ab" + cold:
            simulation.put(name, 1, 3)
        rng = random.Random(seed)
        waiting: dict[int, tuple[Any, int]] = {}
        served: Counter[str] = Counter()
        for turn in range(400):
            for name in "ab":
                if sum(submitted.identity == f"{name}@1" for submitted in simulation.open.values()) < 4:
                    simulation.submit(name, [rng.randrange(VOCAB) for _ in range(5)], rng.randint(2, 9))
            for place, name in enumerate(cold):
                if place not in waiting:
                    waiting[place] = simulation.submit(name, [1, 2, 3], 3), turn
                elif waiting[place][0].is_done:
                    assert waiting.pop(place)[0].failure is None
                    served[name] += 1
                else:
                    assert turn - waiting[place][1] < 60 + 40 * len(cold), f"{name} is not served"
            simulation.advance()
        assert min(served[name] for name in cold) >= 3
        assert sum(submitted.is_done for submitted in simulation.submitted.values()) > 40
        simulation.finish(500)
        simulation.check_all_memory_is_released()


# --- Load -------------------------------------------------------------------------------------------------------------


def is_expected_failure(simulation: EngineSimulation, spec: AdapterSpec, failure: str, was_pinned: bool) -> bool:
    """Return True if a request may fail for this reason."""
    if "is damaged" in failure:
        return spec.identity in simulation.workers.failing
    if "bytes of host memory" in failure:
        return spec.num_elements * UNIT_BYTES > simulation.host_bytes
    assert "bytes of device memory" in failure, failure
    return was_pinned or spec.num_elements > simulation.workers.capabilities.num_adapter_units


def run_random_replacements(
    seed: int, num_actions: int, move_rate: float = 0.0
) -> tuple[EngineSimulation, Counter[str]]:
    """Replace adapters at random while requesting them, with space for a few adapters.

    `move_rate` is the fraction of replacements that move unfinished requests to the new content.
    """
    rng = random.Random(seed)
    num_units = rng.choice([6, 10, 16])
    simulation = EngineSimulation(
        num_units,
        host_units=rng.choice([5, 10, 24]),
        max_steps_in_flight=rng.choice([1, 2]),
        seed=seed,
        eviction_delay_s=rng.choice([0.0, 0.5, 2.0]),
        most_turns=rng.choice([0, 1, 3]),
        num_blocks=rng.choice([10, 14]),
        max_step_tokens=rng.choice([5, 12]),
        limits={"max_prefill_chunk_tokens": rng.choice([None, 3])},
    )
    names = "abcdefgh"[: rng.choice([3, 5, 8])]
    versions = dict.fromkeys(names, 0)
    beginnings = [[rng.randrange(VOCAB) for _ in range(rng.choice([1, 4, 8, 12]))] for _ in range(3)]

    def reload(name: str) -> None:
        versions[name] += 1
        units = num_units + 1 if rng.random() < 0.02 else rng.randint(1, num_units // 2 + 1)
        spec = simulation.put(name, versions[name], units)
        if rng.random() < 0.03:
            simulation.workers.failing[spec.identity] = 1

    for name in names:
        reload(name)
    for _ in range(num_actions):
        if rng.random() < 0.3:
            reload(name := rng.choice(names))
            if move_rate and rng.random() < move_rate:
                simulation.move(name)
        else:
            prompt = [*rng.choice(beginnings), *(rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 3])))]
            name = rng.choice([*names, None]) if rng.random() < 0.6 else names[0]
            options = {"tenant": rng.choice("ab")}
            simulation.submit(name, prompt, rng.randint(1, 24 if move_rate else 12), **options)
        if rng.random() < 0.05 and simulation.open:
            simulation.abort(rng.choice(list(simulation.open.values())))
        for _ in range(rng.choice([0, 0, 1, 2, 4]) if len(simulation.open) < 12 else 6):
            simulation.advance()
    simulation.finish(300 + 200 * len(simulation.open))
    done: Counter[str] = Counter()
    for submitted in simulation.submitted.values():
        if submitted.failure is not None:
            assert submitted.spec is not None
            assert is_expected_failure(simulation, submitted.spec, submitted.failure, was_pinned=False)
            done["failed"] += 1
        done["finished"] += not submitted.is_aborted and submitted.failure is None
    simulation.check_all_memory_is_released()
    scheduled, moved = simulation.scheduler.counters, simulation.table.counters
    done["preemptions"] = scheduled.preemptions
    done["chunks"] = scheduled.chunks
    done["prefix_tokens"] = scheduled.prefix_tokens
    done["evicted_from_device"] = moved.adapters_evicted_from_device
    done["evicted_from_host"] = moved.adapters_evicted_from_host
    done["moves"] = moved.adapter_moves
    done["steps"] = scheduled.steps
    done["moved_requests"] = simulation.num_moved
    return simulation, done


@pytest.mark.slow
def test_reloads_never_produce_stale_tokens() -> None:
    done: Counter[str] = Counter()
    for seed in range(50):
        done += run_random_replacements(seed, 200)[1]
    assert done["finished"] > 5000
    for what in ("preemptions", "chunks", "prefix_tokens", "evicted_from_device", "evicted_from_host", "moves"):
        assert done[what] > 100, done
    assert done["failed"] > 0


def test_moved_requests_use_new_weights_and_share_no_blocks() -> None:
    done: Counter[str] = Counter()
    for seed in range(12):
        done += run_random_replacements(seed, 60, move_rate=0.7)[1]
    assert done["moved_requests"] > 10, done
    assert done["finished"] > 100


@pytest.mark.slow
def test_many_moves_never_produce_stale_tokens() -> None:
    done: Counter[str] = Counter()
    for seed in range(50):
        done += run_random_replacements(seed, 200, move_rate=0.7)[1]
    assert done["moved_requests"] > 300, done
    for what in ("preemptions", "chunks", "prefix_tokens", "evicted_from_device", "evicted_from_host", "moves"):
        assert done[what] > 100, done


# --- Random operations ------------------------------------------------------------------------------------------------


class TableStateMachine(RuleBasedStateMachine):
    @initialize(
        num_units=st.integers(3, 10),
        host_units=st.integers(2, 12),
        max_steps_in_flight=st.integers(1, 2),
        seed=st.integers(0, 1000),
        patience=st.sampled_from([0.0, 0.4, 2.0]),
        blocks=st.integers(6, 12),
        most_turns=st.integers(0, 3),
        sizes=st.lists(st.integers(1, 5), min_size=4, max_size=4),
    )
    def start(
        self,
        num_units: int,
        host_units: int,
        max_steps_in_flight: int,
        seed: int,
        patience: float,
        blocks: int,
        most_turns: int,
        sizes: list[int],
    ) -> None:
        self.simulation = EngineSimulation(
            num_units,
            host_units,
            max_steps_in_flight=max_steps_in_flight,
            seed=seed,
            eviction_delay_s=patience,
            most_turns=most_turns,
            num_blocks=blocks,
            max_length=24,
        )
        self.was_pinned = False
        self.loads: list[Future[None]] = []
        self.versions: Counter[str] = Counter()
        for name, units in zip("abcd", sizes, strict=True):
            self.replace(name, units, fails=False)

    @rule(name=st.sampled_from("abcd"), units=st.sampled_from([1, 1, 2, 2, 3, 4, 5, 11]), fails=st.booleans())
    def replace(self, name: str, units: int, fails: bool) -> None:
        self.versions[name] += 1
        spec = self.simulation.put(name, self.versions[name], units)
        if fails and units % 2:
            self.simulation.workers.failing[spec.identity] = 1

    @rule(name=st.sampled_from("abcd"), units=st.sampled_from([1, 1, 2, 2, 3, 4, 5, 11]))
    def update(self, name: str, units: int) -> None:
        self.versions[name] += 1
        with suppress(AdapterError):  # larger than host memory
            self.loads.append(self.simulation.update(name, self.versions[name], units))

    @rule(
        name=st.sampled_from(["a", "a", "b", "c", "d", None]),
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=10),
        num_tokens=st.integers(1, 9),
        tenant=st.sampled_from("ab"),
    )
    def submit(self, name: str | None, prompt: list[int], num_tokens: int, tenant: str) -> None:
        self.simulation.submit(name, prompt, num_tokens, tenant=tenant)

    @rule(count=st.integers(1, 6))
    def advance(self, count: int) -> None:
        for _ in range(count):
            self.simulation.advance()

    @rule(passes_s=st.sampled_from([0.5, 3.0, 10.0]))
    def time_passes(self, passes_s: float) -> None:
        self.simulation.advance(passes_s)

    @rule(which=st.integers(0, 59))
    def abort(self, which: int) -> None:
        if self.simulation.open:
            self.simulation.abort(list(self.simulation.open.values())[which % len(self.simulation.open)])

    @rule(which=st.integers(0, 59), pin=st.booleans())
    def load(self, which: int, pin: bool) -> None:
        identity = self.pick(which)
        if identity:
            self.loads.append(self.simulation.engine.load(identity, pin))
            self.was_pinned = self.was_pinned or pin

    @rule(which=st.integers(0, 59))
    def unload(self, which: int) -> None:
        identity = self.pick(which)
        if identity:
            self.simulation.engine.unload(identity)

    def pick(self, which: int) -> str | None:
        identities = sorted({submitted.identity for submitted in self.simulation.submitted.values()} - {""})
        return identities[which % len(identities)] if identities else None

    @invariant()
    def memory_is_accounted_for(self) -> None:
        if not hasattr(self, "simulation"):
            return
        simulation = self.simulation
        simulation.check_tokens_so_far()
        for sequence in simulation.scheduler._running:
            if sequence.request.adapter_identity:
                resident = simulation.workers.residents[sequence.adapter_index]
                assert resident.identity == sequence.request.adapter_identity
        held = [block for sequence in simulation.scheduler._running for block in sequence.blocks]
        assert simulation.pool.num_free == simulation.pool.num_blocks - len(set(held))
        device = simulation.table._device
        space, on_device = device._space, device._entries.values()
        assert space.num_free_units == space.num_units - sum(each.units for each in on_device)
        known = simulation.table._registry.entries.values()
        assert simulation.table._host.bytes_used == sum(each.num_bytes for each in known)
        for entry in known:
            of = [
                each for each in simulation.scheduler._by_id.values() if each.request.adapter_identity == entry.identity
            ]
            assert entry.num_requests == len(of)
            assert entry.num_started == sum(each.has_started for each in of)
            assert entry.num_running == sum(each.slot is not None for each in of)
        assert device._num_pinned_units == sum(each.units for each in on_device if each.is_pinned)

    def teardown(self) -> None:
        if not hasattr(self, "simulation"):
            return
        simulation = self.simulation
        simulation.finish(100 + 100 * len(simulation.open))  # remaining requests
        for submitted in simulation.submitted.values():
            if submitted.failure is not None:
                assert submitted.spec is not None
                assert is_expected_failure(simulation, submitted.spec, submitted.failure, self.was_pinned)
        simulation.run_until_idle()
        assert all(load.done() for load in self.loads)
        simulation.check_all_memory_is_released()
        assert simulation.table._device._num_pinned_units == 0


TestMachine = TableStateMachine.TestCase
TestMachine.settings = settings(max_examples=75, stateful_step_count=40, derandomize=True, deadline=None, database=None)
