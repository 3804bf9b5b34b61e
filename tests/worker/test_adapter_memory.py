import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from lorax_server.adapters.host import UNIT_BYTES, HostAdapter, empty_table, prepare
from lorax_server.adapters.target import AdapterTarget, TargetKind
from lorax_server.adapters.weights import ModuleWeights
from lorax_server.distributed import FakeGroup, make_full_shard
from lorax_server.errors import EngineError
from lorax_server.kernels import NUM_OFFSETS, reference
from lorax_server.worker import adapter_memory
from lorax_server.worker.adapter_memory import AdapterMemory
from lorax_server.worker.copier import Copier, CopyStream
from tests.builders import CPU, adapter_batch
from tests.lora import GivenAdapter
from tests.optional import present
from tests.worker.fake_copy_stream import FakeCopyStream

INPUTS, OUTPUTS, VOCAB = 10, 24, 17
TARGETS = {
    "up": AdapterTarget(
        "up", TargetKind.LINEAR, make_full_shard(INPUTS), make_full_shard(OUTPUTS), slice(0, OUTPUTS), None, None
    ),
    "head": AdapterTarget(
        "head", TargetKind.HEAD, make_full_shard(INPUTS), make_full_shard(VOCAB), slice(0, VOCAB), None, None
    ),
}
DTYPES = [torch.float32, torch.bfloat16]


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_weights(rank: int, seed: int) -> ModuleWeights:
    return ModuleWeights(normal(rank, INPUTS, seed=seed), normal(OUTPUTS, rank, seed=seed + 1), 1 / rank)


def make_host(rank: int, seed: int = 0, dtype: torch.dtype = torch.float32, vocab_size: int = VOCAB) -> HostAdapter:
    modules = {"up": make_weights(rank, seed)} if rank else {}
    return prepare(GivenAdapter(modules, vocab_size), TARGETS, dtype, FakeGroup())


def make_memory(num_units: int, dtype: torch.dtype = torch.float32) -> AdapterMemory:
    """Create an adapter memory whose free units are NaN, so that reading them is detected."""
    memory = AdapterMemory(TARGETS, dtype, CPU, num_units)
    memory.arena.buffer.fill_(math.nan)
    return memory


def check_place(memory: AdapterMemory, index: int, host: HostAdapter, first_unit: int) -> None:
    """Check the adapter's bytes and table entries."""
    arena, start = memory.arena, first_unit * UNIT_BYTES // host.buffer.itemsize
    assert torch.equal(arena.buffer[start : start + host.buffer.numel()], host.buffer)
    expected = host.table.clone()
    for fields in expected:
        for field in range(NUM_OFFSETS):
            fields[field] += start if fields[field] >= 0 else 0
    for table in (arena.table, arena.host_table):
        assert torch.equal(table[index], expected)
    assert torch.equal(arena.scales[index], host.scales)
    assert arena.vocab_sizes[index] == host.vocab_size


def numbers(memory: AdapterMemory) -> int:
    """Return the number of written units."""
    return int((~memory.arena.buffer.isnan()).sum()) * memory.arena.buffer.itemsize // UNIT_BYTES


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("first_unit", [0, 1, 5])
def test_load_copies_adapter_to_units(first_unit: int, dtype: torch.dtype) -> None:
    host = make_host(3, dtype=dtype, vocab_size=VOCAB + 2)
    memory = make_memory(host.units + 5, dtype)
    buffer = memory.arena.buffer
    assert not memory.is_loaded(2)
    memory.load(2, host, first_unit)
    assert memory.is_loaded(2)
    assert not memory.is_loaded(1)
    assert memory.arena.buffer is buffer
    check_place(memory, 2, host, first_unit)
    assert numbers(memory) == host.units
    for other in (0, 1, 3):
        assert torch.equal(memory.arena.table[other], empty_table(2))
        assert memory.arena.vocab_sizes[other] == VOCAB


def test_unloaded_index_is_empty_and_reusable() -> None:
    memory, host, other = make_memory(20), make_host(3, vocab_size=VOCAB - 1), make_host(1, seed=5)
    memory.load(1, host, 2)
    memory.load(2, other, 2 + host.units)
    memory.unload(1)
    assert not memory.is_loaded(1)
    assert torch.equal(memory.arena.table[1], empty_table(2))
    assert torch.equal(memory.arena.host_table[1], empty_table(2))
    assert memory.arena.vocab_sizes[1] == VOCAB
    check_place(memory, 2, other, 2 + host.units)
    memory.load(1, other, 1)
    check_place(memory, 1, other, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("move_units", [1, 3, 65536])
@pytest.mark.parametrize(("source", "target"), [(30, 2), (9, 8), (9, 5), (12, 0)])
def test_move_copies_adapter_and_updates_table(
    source: int, target: int, move_units: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Move an adapter, mostly to overlapping units."""
    monkeypatch.setattr(adapter_memory, "MOVE_UNITS", move_units)
    host, other = make_host(16, dtype=dtype), make_host(2, seed=5, dtype=dtype)
    assert host.units >= 5
    memory = make_memory(60, dtype)
    memory.load(1, host, source)
    memory.load(2, other, source + host.units)
    memory.move(1, source, target)
    check_place(memory, 1, host, target)
    check_place(memory, 2, other, source + host.units)
    assert memory.is_loaded(1)


def test_table_addresses_are_fixed_and_rows_limited() -> None:
    memory = make_memory(200)
    last = len(memory.arena.table) - 1
    hosts = {1: make_host(3), last - 1: make_host(1, seed=5, vocab_size=VOCAB + 1), last: make_host(8, seed=7)}
    places = {1: 0, last - 1: 40, last: 80}
    arena = memory.arena
    for at, host in hosts.items():
        memory.load(at, host, places[at])
    assert memory.arena is arena
    for at, host in hosts.items():
        check_place(memory, at, host, places[at])
    for at in (0, 2):
        assert torch.equal(arena.table[at], empty_table(2))
        assert arena.vocab_sizes[at] == VOCAB
    memory.unload(last)
    assert torch.equal(memory.arena.table[last], empty_table(2))
    with pytest.raises(AssertionError, match="outside the table"):
        memory.load(last + 1, make_host(3), 120)


def test_empty_adapter_takes_one_unit() -> None:
    memory, host = make_memory(4), make_host(0)
    memory.load(1, host, 3)
    check_place(memory, 1, host, 3)
    assert host.units == 1


@pytest.mark.parametrize(("index", "first_unit"), [(0, 0), (1, -1), (1, 5), (1, 100)])
def test_invalid_units_fail_assertions(index: int, first_unit: int) -> None:
    host = make_host(3)
    memory = make_memory(host.units + 4)
    with pytest.raises(AssertionError, match="index 0 is the base model" if index == 0 else "outside the buffer"):
        memory.load(index, host, first_unit)
    assert not memory.is_loaded(index)
    assert numbers(memory) == 0
    memory.load(1, host, 4)
    with pytest.raises(AssertionError, match="only move to lower units"):
        memory.move(1, 4, 4)


@pytest.mark.parametrize("seed", range(4))
def test_outputs_are_correct_after_loads_unloads_and_moves(seed: int) -> None:
    """Load adapters at random units and indices, unload some, and compact the rest."""
    draw = random.Random(seed)
    memory = make_memory(600)
    weights = {index: make_weights(draw.choice([1, 3, 8, 17, 64]), index) for index in draw.sample(range(1, 64), 10)}
    place, places = 0, {}
    for index, given in draw.sample(list(weights.items()), len(weights)):
        host = prepare(GivenAdapter({"up": given}, VOCAB), TARGETS, torch.float32, FakeGroup())
        place += draw.randrange(1, 6)
        memory.load(index, host, place)
        places[index] = (place, host.units)
        place += host.units
    for index in draw.sample(list(weights), 4):
        memory.unload(index)
        del weights[index], places[index]
    check_outputs(memory, weights, draw)
    free = 0
    for index, (start, units) in sorted(places.items(), key=lambda item: item[1]):
        if free < start:
            memory.move(index, start, free)
        free += units
    memory.arena.buffer[free * UNIT_BYTES // 4 :] = math.nan
    check_outputs(memory, weights, draw)


def check_outputs(memory: AdapterMemory, weights: dict[int, ModuleWeights], draw: random.Random) -> None:
    indices = [index for index in draw.choices([0, *weights], k=14) for _ in range(draw.choice([1, 2, 9]))]
    data = adapter_batch(indices, memory.arena)
    x, out = normal(len(indices), INPUTS, seed=1), torch.zeros(len(indices), OUTPUTS)
    reference.add_lora(out, x, data.lora, data.find_targets([TARGETS["up"]]))
    for row, index in enumerate(indices):
        given = weights.get(index)
        delta = torch.zeros(OUTPUTS)
        if given is not None:
            delta = present(given.lora_b) @ (present(given.lora_a) @ x[row]) * given.scale
        torch.testing.assert_close(out[row], delta, rtol=1e-4, atol=1e-4)


# --- Copies during steps ----------------------------------------------------------------------------------------------

BUSY_CYCLES = 2_000_000_000  # cycles, about one second on the step stream
GPU = torch.device("cuda")


@contextmanager
def make_async_memory(
    lane: FakeCopyStream | CopyStream, num_units: int, buffer_bytes: int = 256, is_follower: bool = False
) -> Iterator[AdapterMemory]:
    """Create an adapter memory with a copier and small buffers."""
    device = CPU if isinstance(lane, FakeCopyStream) else GPU
    copier = Copier(lane, 2, buffer_bytes)
    memory = AdapterMemory(TARGETS, torch.float32, device, num_units, is_follower=is_follower, copier=copier)
    yield memory
    memory.close()


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < until


def test_adapter_is_loaded_after_last_chunk() -> None:
    lane, host, notified = FakeCopyStream(is_free=False), make_host(8), threading.Event()
    with make_async_memory(lane, 64) as memory:
        memory.on_loaded(notified.set)
        memory.load(1, host, 4)
        assert not memory.is_loaded(1)
        pieces = -(-host.buffer.nbytes // 256)
        for _ in range(pieces - 1):
            lane.finish(1)
        assert not memory.is_loaded(1)
        assert not notified.is_set()
        lane.finish(1)
        assert notified.wait(60)
        assert memory.is_loaded(1)
        check_place(memory, 1, host, 4)


@pytest.mark.parametrize("is_follower", [False, True])
def test_loads_wait_for_submitted_steps_only_on_follower_ranks(is_follower: bool) -> None:
    lane = FakeCopyStream()
    with make_async_memory(lane, 64, is_follower=is_follower) as memory:
        assert lane.num_follows == 1  # after zeroing
        for index in (1, 2):
            memory.load(index, make_host(3), index * 10)
        wait_until(lambda: memory.is_loaded(2))
        assert lane.num_follows == 1 + 2 * is_follower


@pytest.mark.parametrize("what", ["unload", "move"])
def test_steps_wait_for_load_before_move_or_unload(what: str) -> None:
    lane, host = FakeCopyStream(is_free=False), make_host(1)
    with make_async_memory(lane, 64, buffer_bytes=4096) as memory:
        memory.load(1, host, 9)
        memory.unload(1) if what == "unload" else memory.move(1, 9, 2)
        assert lane.waits == [1]
        lane.finish(1)


def test_failed_load_raises_in_all_queries() -> None:
    lane, notified = FakeCopyStream(fails_at=2), threading.Event()
    with make_async_memory(lane, 64) as memory:
        memory.on_loaded(notified.set)
        memory.load(1, make_host(8), 4)
        assert notified.wait(60)
        for ask in (memory.is_loaded, memory.wait_for, memory.unload, lambda i: memory.load(i + 1, make_host(3), 40)):
            with pytest.raises(EngineError, match="copying adapters to the device failed"):
                ask(1)


def check_bytes(memory: AdapterMemory, host: HostAdapter, first_unit: int) -> None:
    start = first_unit * UNIT_BYTES // 4
    assert torch.equal(memory.arena.buffer[start : start + host.buffer.numel()].cpu(), host.buffer)


@pytest.mark.gpu
def test_adapter_loads_while_step_runs() -> None:
    host = make_host(8, seed=3)
    with make_async_memory(CopyStream(GPU), 64) as memory:
        torch.cuda.synchronize()
        torch.cuda._sleep(BUSY_CYCLES)
        memory.load(1, host, 4)
        wait_until(lambda: memory.is_loaded(1))
        assert not torch.cuda.current_stream().query()  # neither the host nor the copy waited for the step
        torch.cuda.synchronize()
        check_bytes(memory, host, 4)


@pytest.mark.gpu
def test_step_in_flight_sees_old_table() -> None:
    old, new = make_host(8, seed=3), make_host(2, seed=5)
    with make_async_memory(CopyStream(GPU), 64) as memory:
        memory.load(1, old, 4)
        wait_until(lambda: memory.is_loaded(1))
        torch.cuda.synchronize()
        before = memory.arena.table[1].clone(), memory.arena.scales[1].clone()
        torch.cuda._sleep(BUSY_CYCLES)
        seen = memory.arena.table[1].clone(), memory.arena.scales[1].clone()  # a later step
        memory.unload(1)
        memory.load(1, new, 40)
        memory.move(1, 40, 30)
        torch.cuda.synchronize()
        assert all(torch.equal(*pair) for pair in zip(before, seen, strict=True))
        assert not torch.equal(memory.arena.table[1], before[0])
        assert torch.equal(memory.arena.table[1].cpu(), memory.arena.host_table[1])
        check_bytes(memory, new, 30)


@pytest.mark.gpu
def test_index_is_reusable_after_unload_during_load() -> None:
    first, second = make_host(64, seed=3), make_host(64, seed=5)
    with make_async_memory(CopyStream(GPU), 400) as memory:
        for round_ in range(20):
            memory.load(1, first, 4)
            memory.unload(1)
            memory.load(1, second, 4 + round_ % 3)
            wait_until(lambda: memory.is_loaded(1))
            check_bytes(memory, second, 4 + round_ % 3)
            memory.unload(1)


@pytest.mark.gpu
@pytest.mark.parametrize("is_follower", [False, True])
def test_adapters_are_correct_after_many_loads_during_steps(is_follower: bool) -> None:
    hosts = [make_host(1 + 5 * (i % 13), seed=i) for i in range(60)]
    room = max(host.units for host in hosts) + 1
    with make_async_memory(CopyStream(GPU), 60 * room, is_follower=is_follower) as memory:
        x = torch.randn(512, 512, device=GPU)
        for index, host in enumerate(hosts, start=1):
            memory.load(index, host, (index - 1) * room)
            x = (x @ x).clamp(-1, 1)
        for index, host in enumerate(hosts, start=1):
            memory.wait_for(index)
            check_bytes(memory, host, (index - 1) * room)  # on the step stream
            assert torch.equal(memory.arena.table[index].cpu(), memory.arena.host_table[index])
        wait_until(lambda: all(memory.is_loaded(index) for index in range(1, 61)))
