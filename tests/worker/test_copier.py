"""Copies through a ring of pinned buffers: order, waiting and failure with a fake stream; data and overlap on a GPU."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from lorax_server.errors import EngineError
from lorax_server.worker.copier import Copier, CopyStream
from tests.worker.fake_copy_stream import FakeCopyStream

WAIT_S = 60
Make = Callable[..., Copier]


@pytest.fixture
def make() -> Iterator[Make]:
    """Create copiers and close them after the test."""
    made: list[Copier] = []

    def make_one(lane: FakeCopyStream | CopyStream, num_buffers: int, buffer_bytes: int) -> Copier:
        made.append(Copier(lane, num_buffers, buffer_bytes))
        return made[-1]

    yield make_one
    for copier in made:
        copier.close()
        assert not copier._thread.is_alive()


def draw(count: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype)


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.001)


@pytest.mark.parametrize("num_buffers", [1, 3])
@pytest.mark.parametrize(("count", "pieces"), [(1, [2]), (31, [62]), (32, [64]), (33, [64, 2]), (200, [64] * 6 + [16])])
def test_copy_is_chunked_and_complete(count: int, pieces: list[int], num_buffers: int, make: Make) -> None:
    lane = FakeCopyStream()
    copier, notified = make(lane, num_buffers, 64), threading.Event()
    copier.notify = notified.set
    source, target = draw(count, 1), torch.zeros(count + 2, dtype=torch.bfloat16)
    copy_handle = copier.start(target[1:-1], source)
    assert notified.wait(WAIT_S)
    assert copy_handle.is_done
    assert torch.equal(target[1:-1], source)
    assert target[0] == target[-1] == 0
    assert lane.sizes == pieces
    assert lane.num_pinned == 1


@pytest.mark.parametrize("num_buffers", [1, 2, 4])
def test_buffer_is_reused_only_after_its_copy(num_buffers: int, make: Make) -> None:
    lane = FakeCopyStream(is_free=False)
    copier = make(lane, num_buffers, 64)
    source, target = draw(32 * 9, 1), torch.zeros(32 * 9, dtype=torch.bfloat16)
    copy_handle = copier.start(target, source)
    for done in range(9):
        lane.wait_for_started(min(num_buffers + done, 9))
        assert lane.num_begun - lane.num_done <= num_buffers
        assert not copy_handle.is_done
        lane.finish(1)
    wait_until(lambda: copy_handle.is_done)
    assert torch.equal(target, source)


def test_copies_are_ordered_and_notified(make: Make) -> None:
    lane = FakeCopyStream(is_free=False)
    copier, notified = make(lane, 3, 64), threading.Semaphore(0)
    copier.notify = notified.release
    sources = [draw(50 + i, i) for i in range(5)]
    targets = [torch.zeros_like(source) for source in sources]
    copy_handles = [copier.start(*pair) for pair in zip(targets, sources, strict=True)]
    for i, copy_handle in enumerate(copy_handles):
        assert not notified.acquire(blocking=False)
        lane.finish(2)
        assert notified.acquire(timeout=WAIT_S)
        assert [each.is_done for each in copy_handles] == [True] * (i + 1) + [False] * (4 - i)
        assert copy_handle.is_submitted.is_set()
    assert all(map(torch.equal, targets, sources))


def test_wait_for_blocks_host_until_copy_is_submitted(make: Make) -> None:
    """The host waits until the event is recorded, because waiting on an unrecorded event has no effect."""
    lane = FakeCopyStream(is_free=False)
    copier = make(lane, 2, 64)
    copy_handle = copier.start(torch.zeros(96, dtype=torch.bfloat16), draw(96, 1))
    waiter = threading.Thread(target=copier.wait_for, args=(copy_handle,))
    waiter.start()
    lane.wait_for_started(2)
    assert waiter.is_alive()
    assert lane.waits == []
    lane.finish(1)  # the third chunk gets a buffer
    waiter.join(WAIT_S)
    assert lane.waits == [3]
    assert not copy_handle.is_done
    lane.finish(2)
    wait_until(lambda: copy_handle.is_done)
    copier.wait_for(copy_handle)
    assert lane.waits == [3]  # returns immediately


@pytest.mark.parametrize("fails_at", [1, 3])
def test_failure_raises_for_all_waiters(fails_at: int, make: Make) -> None:
    lane = FakeCopyStream(fails_at=fails_at)
    copier, notified = make(lane, 2, 64), threading.Event()
    copier.notify = notified.set
    copy_handle = copier.start(torch.zeros(200, dtype=torch.bfloat16), draw(200, 1))
    assert notified.wait(WAIT_S)
    assert not copy_handle.is_done
    with pytest.raises(EngineError, match="copying adapters to the device failed") as caught:
        copier.wait_for(copy_handle)
    assert "the device is gone" in str(caught.value.__cause__)
    with pytest.raises(EngineError, match="copying adapters to the device failed"):
        copier.start(torch.zeros(1), torch.zeros(1))
    with pytest.raises(EngineError, match="copying adapters to the device failed"):
        copier.check()


def test_closed_copier_skips_pending_copies(make: Make) -> None:
    lane = FakeCopyStream(is_free=False)
    copier = make(lane, 2, 64)
    first, second = (copier.start(torch.zeros(16), draw(16, i, torch.float32)) for i in range(2))
    lane.wait_for_started(1)
    closing = threading.Thread(target=copier.close)
    closing.start()
    wait_until(lambda: copier._is_closed)
    lane.finish(1)
    closing.join(WAIT_S)
    assert first.is_done
    assert not second.is_done
    with pytest.raises(EngineError, match="copier is closed"):
        copier.wait_for(second)


@pytest.mark.parametrize("num_buffers", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_sources_are_cast_and_copied_together(dtype: torch.dtype, num_buffers: int, make: Make) -> None:
    lane = FakeCopyStream()
    copier = make(lane, num_buffers, 64)
    sources = [draw(count, count, dtype) for count in (1, 31, 32, 33, 5, 0, 200)]
    target = torch.zeros(sum(map(len, sources)), dtype=torch.bfloat16)
    copy_handle = copier.start_all(target, sources)
    copier.wait_until_submitted(copy_handle)
    wait_until(lambda: copy_handle.is_done)
    assert torch.equal(target, torch.cat(sources).bfloat16())
    assert lane.sizes == [64] * 9 + [28]


@pytest.mark.parametrize("count", [1, 32, 100])
def test_fetched_tensor_is_complete(count: int, make: Make) -> None:
    copier, done = make(FakeCopyStream(), 2, 64), threading.Event()
    source, target = draw(count, 1), torch.zeros(count, dtype=torch.bfloat16)
    copier.start_fetch(target, source, done.set)
    assert done.wait(WAIT_S)
    assert torch.equal(target, source)


# --- On a GPU ---------------------------------------------------------------------------------------------------------

BUSY_CYCLES = 1_000_000_000  # cycles: about half a second


@pytest.mark.gpu
def test_many_copies_through_small_buffers_are_complete(make: Make) -> None:
    copier = make(CopyStream(torch.device("cuda")), 3, 2**16)
    sources = [draw(1 + 20011 * i, i) for i in range(40)]  # sizes are not multiples of the buffer size
    targets = [torch.zeros(len(source), dtype=torch.bfloat16, device="cuda") for source in sources]
    copier.wait_for_caller_stream()
    copy_handles = [copier.start(*pair) for pair in zip(targets, sources, strict=True)]
    wait_until(lambda: all(copy_handle.is_done for copy_handle in copy_handles))
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target.cpu(), source)


@pytest.mark.gpu
def test_copy_waits_for_caller_stream(make: Make) -> None:
    copier = make(CopyStream(torch.device("cuda")), 2, 2**16)
    source, target = draw(100_000, 1), torch.zeros(100_000, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    seen = target.clone()  # a later step
    copier.wait_for_caller_stream()
    copy_handle = copier.start(target, source)
    assert not copy_handle.is_done
    wait_until(lambda: copy_handle.is_done)
    torch.cuda.synchronize()
    assert not bool(seen.any())
    assert torch.equal(target.cpu(), source)


@pytest.mark.gpu
def test_copies_on_the_device_and_back_are_complete(make: Make) -> None:
    copier, done = make(CopyStream(torch.device("cuda")), 2, 2**16), threading.Event()
    source = draw(1_000_003, 1).cuda()
    target, fetched = torch.zeros_like(source), torch.zeros(len(source), dtype=source.dtype)
    torch.cuda.synchronize()
    copy_handle = copier.start(target, source)
    copier.wait_for(copy_handle)
    assert torch.equal(target.clone().cpu(), source.cpu())
    copier.start_fetch(fetched, source, done.set)
    assert done.wait(WAIT_S)
    assert copy_handle.is_done
    assert torch.equal(fetched, source.cpu())


@pytest.mark.gpu
def test_step_waits_for_required_copy(make: Make) -> None:
    copier = make(CopyStream(torch.device("cuda")), 2, 2**20)
    source, target = draw(40_000_000, 1), torch.zeros(40_000_000, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    copier.wait_for(copier.start(target, source))
    seen = target.clone()
    assert torch.equal(seen.cpu(), source)
