"""Adapters packed with a `LoraLayout` equal adapters from `prepare`, and invalid values are rejected."""

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lorax_server.adapters.config import AdapterConfig, parse_config
from lorax_server.adapters.host import HostAdapter, prepare
from lorax_server.adapters.lora_layout import LoraLayout, ReusedMemory
from lorax_server.adapters.target import AdapterTarget
from lorax_server.adapters.weights import StoredAdapter
from lorax_server.distributed import FakeGroup
from lorax_server.files.names import CONFIG_FILE, WEIGHTS_FILE
from lorax_server.layers.targets import collect_adapter_targets
from tests.parity.adapters.cases import CASES
from tests.parity.adapters.served import make_model

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def targets() -> dict[str, AdapterTarget]:
    return collect_adapter_targets(make_model("llama-gqa", torch.device("cpu")))


def read(folder: Path, name: str) -> tuple[AdapterConfig, Tensors]:
    CASES[name].write(folder / name)
    config = parse_config(json.loads((folder / name / CONFIG_FILE).read_text()), name)
    return config, load_file(folder / name / WEIGHTS_FILE)


def open_adapter(config: AdapterConfig, tensors: Tensors, targets: Mapping[str, AdapterTarget]) -> StoredAdapter:
    return StoredAdapter(Path(), config, targets, tensors=tensors)


def find_layout(
    config: AdapterConfig, tensors: Tensors, targets: Mapping[str, AdapterTarget], dtype: torch.dtype = torch.float32
) -> LoraLayout | None:
    return LoraLayout.find(open_adapter(config, tensors, targets), tensors, targets, dtype)


def pack(layout: LoraLayout, tensors: Tensors, is_parallel: bool) -> HostAdapter | None:
    return layout.pack(tensors, ReusedMemory(), lambda: None, is_parallel)


@pytest.mark.parametrize("is_parallel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["plain", "rank-pattern"])
def test_packed_adapter_equals_prepared_adapter(
    name: str, dtype: torch.dtype, is_parallel: bool, targets: dict[str, AdapterTarget], tmp_path: Path
) -> None:
    config, tensors = read(tmp_path, name)
    layout, memory = find_layout(config, tensors, targets, dtype), ReusedMemory()
    assert layout is not None
    for tensor_dtype in (torch.float32, torch.float64, torch.bfloat16):
        changed = {key: torch.randn_like(tensor).to(tensor_dtype) for key, tensor in tensors.items()}
        expected = prepare(open_adapter(config, changed, targets), targets, dtype, FakeGroup())
        found = layout.pack(changed, memory, lambda: None, is_parallel)
        assert found is not None
        assert torch.equal(found.buffer, expected.buffer)
        assert torch.equal(found.table, expected.table)
        assert torch.equal(found.scales, expected.scales)
        assert (found.vocab_size, found.units, found.changes_kv) == (
            expected.vocab_size,
            expected.units,
            expected.changes_kv,
        )


def stage(layout: LoraLayout, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
    return torch.cat([tensor.to(dtype) for tensor in layout.list_staged(tensors)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["plain", "rank-pattern"])
def test_staged_factors_are_packed_with_few_operations(
    name: str, dtype: torch.dtype, targets: dict[str, AdapterTarget], tmp_path: Path
) -> None:
    config, tensors = read(tmp_path, name)
    layout = find_layout(config, tensors, targets, dtype)
    assert layout is not None
    tensors = {key: torch.randn_like(tensor, dtype=torch.float64) for key, tensor in tensors.items()}
    found = layout.pack_staged(stage(layout, tensors, dtype))
    expected = prepare(open_adapter(config, tensors, targets), targets, dtype, FakeGroup())
    assert found is not None
    assert torch.equal(found.buffer, expected.buffer)
    assert torch.equal(found.table, expected.table)
    if name == "plain":
        assert [len(run.factors) for run in layout._runs] == [3] * (len(tensors) // 3)  # the model has three layers


def test_layers_with_other_distances_are_packed_separately(targets: dict[str, AdapterTarget], tmp_path: Path) -> None:
    config, tensors = read(tmp_path, "plain")
    layout = find_layout(config, tensors, targets)
    assert layout is not None
    first = next(factor for factor in layout.factors if "q_proj.lora_A" in factor.key)
    keys = [first.key.replace(".0.", f".{number}.") for number in range(5)]
    numel = first.shape.numel()
    factors = tuple(
        first._replace(key=key, offset=numel * place) for key, place in zip(keys, (0, 2, 4, 5, 8), strict=True)
    )
    layout = replace(layout, factors=factors, num_elements=9 * numel, padding=(slice(0, 1),))
    assert [len(run.factors) for run in layout._runs] == [3, 2]
    values = {key: torch.randn(first.shape) for key in keys}
    packed = layout.pack_staged(stage(layout, values, torch.float32))
    assert packed is not None
    for factor in factors:
        assert torch.equal(packed.buffer[factor.offset :][:numel].view(factor.shape), values[factor.key])
    assert not bool(packed.buffer[numel : 2 * numel].any())


def test_packed_adapter_after_kv_equals_prepared_adapter(targets: dict[str, AdapterTarget], tmp_path: Path) -> None:
    config, tensors = read(tmp_path, "plain")
    adapter = open_adapter(config, tensors, targets)
    for after_kv in (adapter.modules, adapter.modules[1:]):
        layout = LoraLayout.find(adapter, tensors, targets, torch.float32, after_kv)
        expected = prepare(adapter, targets, torch.float32, FakeGroup(), after_kv=after_kv)
        assert layout is not None
        assert layout.packed.changes_kv == expected.changes_kv


@pytest.mark.parametrize("is_parallel", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e6])
def test_values_that_are_not_finite_in_the_model_dtype_are_rejected(
    value: float, is_parallel: bool, targets: dict[str, AdapterTarget], tmp_path: Path
) -> None:
    config, tensors = read(tmp_path, "plain")
    layout = find_layout(config, tensors, targets, torch.float16)
    assert layout is not None
    for key in (next(iter(tensors)), list(tensors)[-1]):
        changed = tensors | {key: tensors[key].clone()}
        changed[key][-1, -1] = value
        assert pack(layout, changed, is_parallel) is None
        assert layout.pack_staged(stage(layout, changed, torch.float16)) is None


def test_other_configs_and_shapes_do_not_fit(targets: dict[str, AdapterTarget], tmp_path: Path) -> None:
    config, tensors = read(tmp_path, "plain")
    layout = find_layout(config, tensors, targets)
    assert layout is not None
    assert layout.fits(replace(config), dict(tensors))
    key = next(iter(tensors))
    others: list[tuple[Any, Tensors]] = [
        (replace(config, alpha=config.alpha + 1), tensors),
        (config, tensors | {key: tensors[key][:-1]}),
        (config, tensors | {key: tensors[key].half()}),
        (config, tensors | {"another": tensors[key]}),
        (config, {other: tensor for other, tensor in tensors.items() if other != key}),
    ]
    assert not any(layout.fits(*other) for other in others)


@pytest.mark.parametrize("name", ["dora", "saved-head"])
def test_other_weights_have_no_layout(name: str, targets: dict[str, AdapterTarget], tmp_path: Path) -> None:
    assert find_layout(*read(tmp_path, name), targets) is None


def test_memory_is_reused_after_the_last_view_is_freed() -> None:
    memory = ReusedMemory()
    tensor = memory.allocate(1000, torch.bfloat16)
    view, address = tensor[10:].view(-1, 2), tensor.data_ptr()
    del tensor
    other = memory.allocate(1000, torch.bfloat16)
    assert other.data_ptr() != address
    del view
    assert len(memory.allocate(501, torch.float32)) == 501  # another size
    del other
    other = memory.allocate(1000, torch.bfloat16)
    address = other.data_ptr()
    del other
    assert memory.allocate(1000, torch.bfloat16).data_ptr() == address


def test_concurrent_allocations_do_not_share_memory() -> None:
    """A second thread allocates between any two lines of the first thread's call."""
    num_lines = 0

    def allocate_at(number: int) -> list[int]:
        nonlocal num_lines
        memory, found, num_lines = ReusedMemory(), list[torch.Tensor](), 0
        memory.allocate(1000, torch.float32)  # freed immediately

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal num_lines
            if frame.f_code is not ReusedMemory.allocate.__code__:
                return None
            if event == "line":
                num_lines += 1
                if num_lines == number:
                    found.append(memory.allocate(1000, torch.float32))  # is not traced
            return trace

        previous = sys.gettrace()
        sys.settrace(trace)
        try:
            found.append(memory.allocate(1000, torch.float32))
        finally:
            sys.settrace(previous)
        return [tensor.data_ptr() for tensor in found]

    assert len(allocate_at(0)) == 1
    for number in range(1, num_lines + 1):
        first, second = allocate_at(number)
        assert first != second
