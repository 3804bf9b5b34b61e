"""Adapters packed with a `LoraLayout` equal adapters from `prepare`, and invalid values are rejected."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
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
