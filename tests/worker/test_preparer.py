"""Background adapter preparation on one rank and on several ranks, including changing files."""

import json
import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from lorax_server.adapters.config import parse_config
from lorax_server.adapters.host import HostAdapter, prepare
from lorax_server.adapters.lora_layout import LoraLayout
from lorax_server.adapters.merge import MergedAdapter
from lorax_server.adapters.spec import AdapterCheckpoint, AdapterSpec, InMemoryWeights
from lorax_server.adapters.target import AdapterTarget
from lorax_server.adapters.weights import AdapterWeights, StoredAdapter
from lorax_server.distributed import FakeGroup, HostGroup, TorchGroup
from lorax_server.errors import AdapterError, InputError
from lorax_server.files.names import CONFIG_FILE, WEIGHTS_FILE
from lorax_server.files.regular_file import read_stamp
from lorax_server.kernels import Field
from lorax_server.layers.targets import collect_adapter_targets
from lorax_server.plan import PrepareResult
from lorax_server.types import Merge
from lorax_server.worker import preparer as preparer_module
from lorax_server.worker.copier import Copier
from lorax_server.worker.device_packer import DevicePacker
from lorax_server.worker.preparer import Preparer
from tests.parity.adapters.cases import CASES
from tests.parity.adapters.served import make_model, open_adapter
from tests.ranks import RankPool
from tests.worker.fake_copy_stream import FakeCopyStream

BASE = "llama-gqa"
CPU = torch.device("cpu")
NAMES = ["plain", "dora", "saved-head", "rank-pattern"]  # sharded by inputs: norms are summed
WAIT_S = 60


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for name in NAMES:
        CASES[name].write(root / name)
    return root


@pytest.fixture
def folder(originals: Path, tmp_path: Path) -> Path:
    """Create a copy that tests may modify."""
    shutil.copytree(originals, tmp_path / "adapters")
    return tmp_path / "adapters"


@pytest.fixture(scope="module")
def targets() -> dict[str, AdapterTarget]:
    return collect_adapter_targets(make_model(BASE, CPU))


@pytest.fixture
def preparer(targets: dict[str, AdapterTarget]) -> Iterator[Preparer]:
    preparer = Preparer(targets, torch.float32, FakeGroup())
    yield preparer
    preparer.close()


def stored(folder: Path, targets: dict[str, AdapterTarget]) -> AdapterCheckpoint:
    config = parse_config(json.loads((folder / CONFIG_FILE).read_text()), folder.name)
    opened = StoredAdapter(folder, config, targets)
    return AdapterCheckpoint(folder, config, read_stamp(folder / WEIGHTS_FILE), opened.compute_identity())


def make_spec(folder: Path, targets: dict[str, AdapterTarget]) -> AdapterSpec:
    part = stored(folder, targets)
    return AdapterSpec(part.identity, folder.name, (part,), 1)


def merged_spec(folders: Sequence[Path], targets: dict[str, AdapterTarget], merge: Merge) -> AdapterSpec:
    parts = tuple(stored(folder, targets) for folder in folders)
    return AdapterSpec(merge.identity([part.identity for part in parts]), "merged", parts, 1, merge)


def wait_for_results(preparer: Preparer, count: int) -> list[PrepareResult]:
    taken: list[PrepareResult] = []
    until = time.monotonic() + WAIT_S
    while len(taken) < count and time.monotonic() < until:
        taken += preparer.pop_results()
        time.sleep(0.001)
    assert len(taken) == count
    return taken


def with_settled_files(spec: AdapterSpec, is_old: bool) -> AdapterSpec:
    return replace(spec, checkpoints=tuple(replace(part, is_settled=is_old) for part in spec.checkpoints))


def assert_same(found: HostAdapter, expected: HostAdapter) -> None:
    assert torch.equal(found.buffer, expected.buffer)
    assert torch.equal(found.table, expected.table)
    assert torch.equal(found.scales, expected.scales)
    assert (found.vocab_size, found.units) == (expected.vocab_size, expected.units)


# --- One rank ---------------------------------------------------------------------------------------------------------


def test_preparer_pauses_while_engine_is_busy(
    originals: Path, targets: dict[str, AdapterTarget], preparer: Preparer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparer_module, "MAX_PAUSE_S", WAIT_S)
    ready = threading.Event()
    preparer.notify = ready.set
    preparer.pause()
    preparer.enqueue(make_spec(originals / "plain", targets))
    assert not ready.wait(0.2)
    preparer.resume()
    assert wait_for_results(preparer, 1)[0].error is None


def test_pause_has_maximum_duration(
    originals: Path, targets: dict[str, AdapterTarget], preparer: Preparer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparer_module, "MAX_PAUSE_S", 0.001)
    preparer.pause()
    preparer.enqueue(make_spec(originals / "plain", targets))
    assert wait_for_results(preparer, 1)[0].error is None


@pytest.mark.parametrize("is_old", [False, True])
def test_ready_adapter_equals_direct_preparation(
    is_old: bool, preparer: Preparer, targets: dict[str, AdapterTarget], originals: Path
) -> None:
    """Cover recently modified files, which are read into memory first."""
    specs = [with_settled_files(make_spec(originals / name, targets), is_old) for name in NAMES]
    for spec in specs:
        preparer.enqueue(spec)
    taken = wait_for_results(preparer, len(specs))
    assert [each.identity for each in taken] == [spec.identity for spec in specs]  # in this order
    for name, spec, each in zip(NAMES, specs, taken, strict=True):
        expected = prepare(open_adapter(originals / name, targets), targets, torch.float32, FakeGroup())
        assert_same(preparer.get(spec.identity), expected)
        assert each == PrepareResult(spec.identity, expected.units, expected.buffer.nbytes, expected.vocab_size)
    assert preparer.pop_results() == []


def make_tensor_spec(folder: Path, identity: str, scale: float) -> AdapterSpec:
    """Return an adapter that is passed as tensors: the tensors in a folder, multiplied by `scale`."""
    config = parse_config(json.loads((folder / CONFIG_FILE).read_text()), folder.name)
    tensors = {key: tensor * scale for key, tensor in load_file(folder / WEIGHTS_FILE).items()}
    part = AdapterCheckpoint(Path(), config, (), identity, in_memory=InMemoryWeights(tensors))
    return AdapterSpec(identity, folder.name, (part,), 1)


def test_tensors_are_packed_in_the_layout_of_the_previous_version(
    preparer: Preparer, targets: dict[str, AdapterTarget], originals: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = list[str]()
    read = Preparer._read

    def record(self: Preparer, spec: AdapterSpec) -> AdapterWeights:
        opened.append(spec.name)
        return read(self, spec)

    monkeypatch.setattr(Preparer, "_read", record)
    specs = [make_tensor_spec(originals / name, f"{name} {i}", 1.0 + i) for i in range(3) for name in NAMES]
    for spec in specs:
        preparer.enqueue(spec)
    assert [each.error for each in wait_for_results(preparer, len(specs))] == [None] * len(specs)
    assert opened == [*NAMES, "dora", "saved-head", "dora", "saved-head"]
    for spec in specs:
        part = spec.checkpoints[0]
        assert part.in_memory is not None
        adapter = StoredAdapter(Path(), part.config, targets, tensors=part.in_memory.tensors)
        assert_same(preparer.get(spec.identity), prepare(adapter, targets, torch.float32, FakeGroup()))


def test_packed_tensors_are_not_read_again(preparer: Preparer, originals: Path) -> None:
    spec = make_tensor_spec(originals / "plain", "first", 1.0)
    preparer.enqueue(spec)
    (first,) = wait_for_results(preparer, 1)
    packed = preparer.get(spec.identity)
    weights = spec.checkpoints[0].in_memory
    assert weights is not None
    weights.tensors = {}
    preparer.drop(spec.identity)
    preparer.enqueue(spec)
    assert wait_for_results(preparer, 1) == [first]
    assert preparer.get(spec.identity) is packed


def make_packer(device: str, copier: Copier) -> DevicePacker:
    return DevicePacker(torch.device(device), copier)


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_packer_warms_up(device: str, copier: Copier, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = list[HostAdapter | None]()
    pack = LoraLayout.pack_staged

    def record(self: LoraLayout, staged: torch.Tensor) -> HostAdapter | None:
        packed.append(pack(self, staged))
        return packed[-1]

    monkeypatch.setattr(LoraLayout, "pack_staged", record)
    make_packer(device, copier).warm_up(torch.bfloat16)
    assert [None if each is None else each.buffer.shape for each in packed] == [(4096,)] * 2


@pytest.fixture
def copier() -> Iterator[Copier]:
    copier = Copier(FakeCopyStream(), 2, 4096)
    yield copier
    copier.close()


# Another device than the tensors': they are uploaded.
@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
@pytest.mark.parametrize("name", NAMES)
def test_adapter_packed_on_the_device_equals_direct_preparation(
    name: str, device: str, targets: dict[str, AdapterTarget], originals: Path, copier: Copier
) -> None:
    with closing(Preparer(targets, torch.float32, FakeGroup(), packer=make_packer(device, copier))) as preparer:
        for number in range(3):
            spec = make_tensor_spec(originals / name, f"version {number}", 1.0 + number)
            weights = spec.checkpoints[0].in_memory
            assert weights is not None
            result = preparer.pack(spec)
            if name in ("dora", "saved-head"):
                assert result is None
                continue
            adapter = StoredAdapter(Path(), spec.checkpoints[0].config, targets, tensors=weights.tensors)
            expected = prepare(adapter, targets, torch.float32, FakeGroup())
            assert result is not None
            assert result.is_on_device
            assert (result.units, result.num_bytes) == (expected.units, expected.buffer.nbytes)
            assert_same(weights.packed, expected)
            preparer.add_packed(spec)
            assert preparer.get(spec.identity) is weights.packed
        assert preparer.pop_results() == []


def test_packed_adapter_moves_to_host_memory(
    targets: dict[str, AdapterTarget], originals: Path, copier: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparer_module, "is_host", lambda _: False)
    with closing(Preparer(targets, torch.float32, FakeGroup(), packer=make_packer("cpu", copier))) as preparer:
        specs = [make_tensor_spec(originals / "plain", f"version {number}", 1.0 + number) for number in range(2)]
        all_weights = [spec.checkpoints[0].in_memory for spec in specs]
        packed = []
        for spec, weights in zip(specs, all_weights, strict=True):
            assert weights is not None
            assert preparer.pack(spec) is not None
            packed.append(weights.packed)
        for spec in specs:
            preparer.add_packed(spec)
        preparer.drop(specs[1].identity)
        for weights, before in zip(all_weights, packed, strict=True):
            assert weights is not None
            until = time.monotonic() + WAIT_S
            while weights.packed is before and time.monotonic() < until:
                time.sleep(0.001)
            assert weights.packed is not before
            assert_same(weights.packed, before)
        assert list(preparer._ready) == [specs[0].identity]  # the dropped adapter is not added again
        assert preparer.get(specs[0].identity) is all_weights[0].packed  # type: ignore[union-attr]


def test_lack_of_device_memory_is_logged(
    targets: dict[str, AdapterTarget],
    originals: Path,
    copier: Copier,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(LoraLayout, "pack_staged", fail)
    with (
        closing(Preparer(targets, torch.float32, FakeGroup(), packer=make_packer("cpu", copier))) as preparer,
        caplog.at_level("INFO"),
    ):
        assert preparer.pack(make_tensor_spec(originals / "plain", "first", 1.0)) is None
    assert "'plain' is packed in host memory" in caplog.text


def test_invalid_next_version_of_tensors_is_rejected(preparer: Preparer, originals: Path) -> None:
    preparer.enqueue(make_tensor_spec(originals / "plain", "first", 1.0))
    preparer.enqueue(make_tensor_spec(originals / "plain", "second", float("nan")))
    first, second = wait_for_results(preparer, 2)
    assert first.error is None
    assert "non-finite" in str(second.error)


@pytest.mark.parametrize(
    "merge", [Merge((0.7, -0.4)), Merge((1.0, 0.5), "ties", 0.6), Merge((1.0, 2.0), "dare_ties", 0.5)]
)
def test_prepared_merge_equals_direct_merge(
    merge: Merge, preparer: Preparer, targets: dict[str, AdapterTarget], originals: Path
) -> None:
    folders = [originals / "plain", originals / "rank-pattern"]
    if merge.strategy != "linear":
        folders[1] = originals / "plain"
    preparer.enqueue(merged_spec(folders, targets, merge))
    (taken,) = wait_for_results(preparer, 1)
    merged = MergedAdapter([open_adapter(folder, targets) for folder in folders], merge)
    assert_same(preparer.get(taken.identity), prepare(merged, targets, torch.float32, FakeGroup()))


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize(
    ("names", "message"),
    [(("plain", "rank-pattern"), "requires equal ranks"), (("plain", "dora"), "cannot be merged")],
)
def test_invalid_merges_are_rejected(
    names: Sequence[str],
    message: str,
    is_old: bool,
    preparer: Preparer,
    targets: dict[str, AdapterTarget],
    originals: Path,
) -> None:
    spec = merged_spec([originals / name for name in names], targets, Merge((1.0, 1.0), "ties", 0.5))
    preparer.enqueue(with_settled_files(spec, is_old))
    (taken,) = wait_for_results(preparer, 1)
    assert isinstance(taken.error, InputError)
    assert message in str(taken.error)


def test_notify_is_called_for_each_result(preparer: Preparer, targets: Any, originals: Path) -> None:
    notified = threading.Semaphore(0)
    preparer.notify = notified.release
    for name in ("plain", "dora"):
        preparer.enqueue(make_spec(originals / name, targets))
        assert notified.acquire(timeout=WAIT_S)
        assert len(preparer.pop_results()) == 1


def test_dropped_adapter_can_be_prepared_again(preparer: Preparer, targets: Any, originals: Path) -> None:
    spec = make_spec(originals / "plain", targets)
    for _ in range(2):
        preparer.enqueue(spec)
        wait_for_results(preparer, 1)
        preparer.drop(spec.identity)
        assert not preparer._ready
    with mock.patch("lorax_server.worker.preparer.RANK_READY_TIMEOUT_S", 0.01), pytest.raises(KeyError):
        preparer.get(spec.identity)


def test_dropped_adapter_is_freed_on_background_thread(preparer: Preparer, targets: Any, originals: Path) -> None:
    """Freeing memory is slow and must not block steps."""
    spec, freed = make_spec(originals / "plain", targets), threading.Event()
    freed_by: list[str] = []

    def note() -> None:
        freed_by.append(threading.current_thread().name)
        freed.set()

    preparer.enqueue(spec)
    wait_for_results(preparer, 1)
    weakref.finalize(preparer.get(spec.identity), note)
    preparer.drop(spec.identity)
    assert freed.wait(WAIT_S)
    assert freed_by == ["prepare adapters"]


def test_get_waits_for_late_rank(preparer: Preparer, targets: Any, originals: Path) -> None:
    """The engine follows rank 0, so its next plan may reach a rank that is not ready yet."""
    spec, resume = make_spec(originals / "plain", targets), threading.Event()
    result: list[Any] = []

    def late(*args: Any) -> HostAdapter:
        resume.wait(WAIT_S)
        return prepare(*args)

    def load() -> None:
        try:
            result.append(preparer.get(spec.identity))
        except KeyError as error:
            result.append(error)

    with mock.patch("lorax_server.worker.preparer.prepare", late):
        preparer.enqueue(spec)
        reader = threading.Thread(target=load)
        reader.start()
        reader.join(0.1)  # long enough to detect an early return
        resume.set()
        reader.join()
    assert isinstance(result[0], HostAdapter)


def test_close_skips_queued_adapters(targets: Any, originals: Path) -> None:
    preparer = Preparer(targets, torch.float32, FakeGroup())
    begun, resume, done = threading.Event(), threading.Event(), []

    def slow(*args: Any) -> HostAdapter:
        begun.set()
        resume.wait(WAIT_S)
        done.append(args)
        return prepare(*args)

    with mock.patch("lorax_server.worker.preparer.prepare", slow):
        for name in NAMES:
            preparer.enqueue(make_spec(originals / name, targets))
        begun.wait(WAIT_S)
        closing = threading.Thread(target=preparer.close)
        closing.start()
        while not preparer._is_closed:
            time.sleep(0.001)
        resume.set()
        closing.join()
        preparer.close()  # again
    assert not preparer._thread.is_alive()
    assert len(done) == 1


# --- Failures ---------------------------------------------------------------------------------------------------------


def delete_weights(folder: Path) -> None:
    (folder / WEIGHTS_FILE).unlink()


def change(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS_FILE)
    save_file({key: tensor * 2 for key, tensor in tensors.items()}, folder / WEIGHTS_FILE)


def cut(folder: Path) -> None:
    os.truncate(folder / WEIGHTS_FILE, (folder / WEIGHTS_FILE).stat().st_size - 8)


BREAKS: list[tuple[Callable[[Path], None], str]] = [
    (delete_weights, "was removed from this machine"),
    (change, "changed after it was resolved"),
    (cut, "changed after it was resolved"),
]


@pytest.mark.parametrize(("spoil", "message"), BREAKS)
def test_missing_changed_or_truncated_files_fail(
    spoil: Callable[[Path], None], message: str, preparer: Preparer, targets: dict[str, AdapterTarget], folder: Path
) -> None:
    spec, other = (make_spec(folder / name, targets) for name in ("plain", "dora"))
    spoil(folder / "plain")
    preparer.enqueue(spec)
    preparer.enqueue(other)
    failed, fine = wait_for_results(preparer, 2)
    assert failed.identity == spec.identity
    assert isinstance(failed.error, AdapterError)
    assert message in str(failed.error)
    assert (failed.units, failed.num_bytes) == (0, 0)
    assert failed.error.__traceback__ is None  # a traceback would keep the tensors alive
    assert fine.error is None
    assert list(preparer._ready) == [other.identity]


@pytest.mark.parametrize("is_merged", [False, True])
def test_file_change_without_new_timestamp_is_detected(
    is_merged: bool, preparer: Preparer, targets: dict[str, AdapterTarget], folder: Path
) -> None:
    """Change a file twice within one timestamp tick. Recently modified files are read again."""
    plain, stamp = folder / "plain", (1, 2, 3, 4)
    with (
        mock.patch("lorax_server.adapters.weights.read_stamp", return_value=stamp),
        mock.patch("lorax_server.files.regular_file.read_stamp", return_value=stamp),
    ):
        spec = make_spec(plain, targets)
        if is_merged:
            spec = merged_spec([folder / "rank-pattern", plain], targets, Merge((1.0, 1.0)))
        spec = with_settled_files(
            replace(spec, checkpoints=tuple(replace(part, stamp=stamp) for part in spec.checkpoints)), is_old=False
        )
        preparer.enqueue(spec)
        (before,) = wait_for_results(preparer, 1)
        assert before.error is None
        with (plain / WEIGHTS_FILE).open("r+b") as file:  # same size
            file.seek(-4, os.SEEK_END)
            file.write(bytes(4))
        preparer.enqueue(spec)
        (after,) = wait_for_results(preparer, 1)
    assert "files changed during loading" in str(after.error)


def test_non_finite_weights_are_rejected(preparer: Preparer, targets: dict[str, AdapterTarget], folder: Path) -> None:
    tensors = load_file(folder / "plain" / WEIGHTS_FILE)
    next(iter(tensors.values()))[0, 0] = float("inf")
    save_file(tensors, folder / "plain" / WEIGHTS_FILE)
    preparer.enqueue(make_spec(folder / "plain", targets))
    assert "non-finite" in str(wait_for_results(preparer, 1)[0].error)


def test_weights_that_overflow_dtype_are_rejected(targets: dict[str, AdapterTarget], folder: Path) -> None:
    tensors = load_file(folder / "plain" / WEIGHTS_FILE)
    next(iter(tensors.values()))[0, 0] = 1e6
    save_file(tensors, folder / "plain" / WEIGHTS_FILE)
    half = Preparer(targets, torch.float16, FakeGroup())
    half.enqueue(make_spec(folder / "plain", targets))
    assert "overflow torch.float16" in str(wait_for_results(half, 1)[0].error)
    half.close()


def test_rank_above_kernel_limit_is_rejected(targets: dict[str, AdapterTarget], folder: Path) -> None:
    limited = Preparer(targets, torch.float32, FakeGroup(), max_rank=7)
    limited.enqueue(make_spec(folder / "plain", targets))
    error = wait_for_results(limited, 1)[0].error
    assert isinstance(error, AdapterError)
    assert "has rank 8, but the kernels for this device support at most 7" in str(error)
    limited.close()


@pytest.mark.parametrize("is_old", [True, False])
def test_unsupported_rank_is_rejected_before_reading_weights(
    is_old: bool, targets: dict[str, AdapterTarget], folder: Path
) -> None:
    tensors = load_file(folder / "plain" / WEIGHTS_FILE)
    save_file(
        {key: torch.full_like(tensor, torch.nan) for key, tensor in tensors.items()}, folder / "plain" / WEIGHTS_FILE
    )
    for max_rank, message in ((7, "has rank 8"), (8, "non-finite values")):
        limited = Preparer(targets, torch.float32, FakeGroup(), max_rank=max_rank)
        limited.enqueue(with_settled_files(make_spec(folder / "plain", targets), is_old))
        assert message in str(wait_for_results(limited, 1)[0].error)
        limited.close()


def test_merged_rank_is_sum_of_ranks(targets: dict[str, AdapterTarget], folder: Path) -> None:
    limited = Preparer(targets, torch.float32, FakeGroup(), max_rank=15)
    for strategy in ("linear", "ties"):
        merge = Merge((1.0, 1.0), strategy, density=0.5)
        limited.enqueue(merged_spec([folder / "plain", folder / "plain"], targets, merge))
    of_sum, of_ties = wait_for_results(limited, 2)
    assert "has rank 16, but the kernels for this device support at most 15" in str(of_sum.error)
    assert of_ties.error is None
    limited.close()


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (ZeroDivisionError, "ZeroDivisionError"),
        (MemoryError, "out of memory; retry"),
        (torch.OutOfMemoryError, "out of memory on the GPU; retry"),
    ],
)
@pytest.mark.parametrize("where", ["StoredAdapter", "prepare"])
def test_unexpected_errors_do_not_affect_other_adapters(
    where: str,
    problem: type[Exception],
    said: str,
    preparer: Preparer,
    targets: dict[str, AdapterTarget],
    originals: Path,
) -> None:
    spec = make_spec(originals / "plain", targets)
    with mock.patch(f"lorax_server.worker.preparer.{where}", side_effect=problem):
        preparer.enqueue(spec)
        (failed,) = wait_for_results(preparer, 1)
    assert str(failed.error).startswith(f"adapter 'plain': cannot be prepared: {said}")
    preparer.enqueue(spec)
    assert wait_for_results(preparer, 1)[0].error is None


# --- Several ranks ----------------------------------------------------------------------------------------------------


def make_subgroup(group: TorchGroup, size: int) -> HostGroup | None:
    """Create a second process group. All ranks must call this."""
    if size == group.size():
        return group.make_host_group()
    made = dist.new_group(list(range(size)), backend="gloo")
    return HostGroup(made) if group.rank() < size else None


def prepare_on_rank(group: TorchGroup, size: int, folder: Path, spoilt: str = "") -> Any:
    """Prepare adapters on this rank. If `spoilt`, the first one fails on the last rank."""
    second = make_subgroup(group, size)
    if second is None:
        return None
    preparer = Preparer(collect_adapter_targets(make_model(BASE, CPU, second)), torch.float32, second)
    specs = make_specs(folder)
    try:
        taken = []
        if spoilt:
            is_last = second.rank() == size - 1
            with failing_reader(spoilt if is_last else ""):
                preparer.enqueue(make_unreadable(specs[-1], folder, spoilt) if is_last else specs[-1])
                taken = wait_for_results(preparer, 1)
        for spec in specs[:-1]:
            preparer.enqueue(spec)
        if size == group.size():  # steps use the other group concurrently
            assert all(int(group.all_reduce(torch.ones(1))) == size for _ in range(200))
        taken += wait_for_results(preparer, len(specs) - 1)
        return taken, [preparer.get(spec.identity) for spec in specs[:-1]]
    finally:
        preparer.close()


def make_specs(folder: Path) -> list[AdapterSpec]:
    alone = collect_adapter_targets(make_model(BASE, CPU))
    merged = merged_spec([folder / "plain", folder / "rank-pattern"], alone, Merge((0.5, 2.0)))
    return [*(make_spec(folder / name, alone) for name in NAMES[1:]), merged, make_spec(folder / NAMES[0], alone)]


def make_unreadable(spec: AdapterSpec, folder: Path, how: str) -> AdapterSpec:
    """Return the adapter's spec with a folder that cannot be read."""
    (part,) = spec.checkpoints
    parts = {
        "vanished": replace(part, folder=folder / "nowhere"),
        "stamp": replace(part, stamp=(0, 0, 0, 0)),
        "values": replace(part, folder=folder / "spoilt", stamp=read_stamp(folder / "spoilt" / WEIGHTS_FILE)),
    }
    return replace(spec, checkpoints=(parts.get(how, part),))


def failing_reader(how: str) -> Any:
    opened: Any = MemoryError if how == "memory" else StoredAdapter
    return mock.patch("lorax_server.worker.preparer.StoredAdapter", side_effect=opened)


def expected_on(group: TorchGroup, size: int, folder: Path) -> list[HostAdapter] | None:
    """Prepare the same adapters synchronously."""
    second = make_subgroup(group, size)
    if second is None:
        return None
    targets = collect_adapter_targets(make_model(BASE, CPU, second))
    plain, *adapters = (open_adapter(folder / name, targets) for name in NAMES)
    merged = MergedAdapter([plain, adapters[-1]], Merge((0.5, 2.0)))
    prepared: list[AdapterWeights] = [*adapters, merged]
    return [prepare(adapter, targets, torch.float32, second) for adapter in prepared]


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_prepare_consistently(
    size: int, ranks: RankPool, originals: Path, targets: dict[str, AdapterTarget]
) -> None:
    actual = ranks.run(4, prepare_on_rank, size, originals)[:size]
    expected = ranks.run(4, expected_on, size, originals)[:size]
    for (taken, hosts), wanted in zip(actual, expected, strict=True):
        assert [each.error for each in taken] == [None] * len(taken)
        for host, each, direct in zip(hosts, taken, wanted, strict=True):
            assert_same(host, direct)
            assert each.units == direct.units
    # A matrix sharded by inputs has the norms of the full matrix.
    whole = prepare(open_adapter(originals / "dora", targets), targets, torch.float32, FakeGroup())
    index = list(targets).index("model.layers.1.self_attn.o_proj")
    factors = [_factor(host, index) for host in (whole, *[hosts[0] for _, hosts in actual])]
    for factor in factors[1:]:
        torch.testing.assert_close(factor, factors[0])


def _factor(host: HostAdapter, index: int) -> torch.Tensor:
    start = int(host.table[index, Field.OUTPUT_SCALE])
    assert start >= 0
    return host.buffer[start : start + 32]


@pytest.mark.parametrize("spoilt", ["vanished", "stamp", "values", "memory"])
def test_failure_on_one_rank_fails_on_all_ranks(spoilt: str, ranks: RankPool, folder: Path) -> None:
    shutil.copytree(folder / "plain", folder / "spoilt")
    tensors = load_file(folder / "spoilt" / WEIGHTS_FILE)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, folder / "spoilt" / WEIGHTS_FILE)
    result = ranks.run(4, prepare_on_rank, 2, folder, spoilt)[:2]
    for rank, (taken, hosts) in enumerate(result):
        assert isinstance(taken[0].error, AdapterError)
        assert ("another tensor-parallel rank" in str(taken[0].error)) == (rank == 0)
        assert [each.error for each in taken[1:]] == [None] * len(hosts)
    assert [each.units for each in result[0][0]] == [each.units for each in result[1][0]]
