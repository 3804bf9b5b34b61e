"""New weights in an earlier layout: equal to a complete preparation, and rejected if the layout or a value differs."""

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
from lorax_server.adapters.repacking import Repacking
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


def prepare_from(
    config: AdapterConfig, tensors: Tensors, targets: Mapping[str, AdapterTarget], dtype: torch.dtype
) -> tuple[HostAdapter, Repacking | None]:
    adapter = StoredAdapter(Path(), config, targets, tensors=tensors)
    packed = prepare(adapter, targets, dtype, FakeGroup())
    return packed, Repacking.find(adapter, tensors, targets, packed)


@pytest.mark.parametrize("fill", ["_fill_on_host", "_fill_on_device"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["plain", "rank-pattern"])
def test_repacked_adapter_equals_prepared_adapter(
    name: str,
    dtype: torch.dtype,
    fill: str,
    targets: dict[str, AdapterTarget],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, tensors = read(tmp_path, name)
    _, repacking = prepare_from(config, tensors, targets, dtype)
    assert repacking is not None
    monkeypatch.setattr(Repacking, "_fill_on_host", getattr(Repacking, fill))
    for file_dtype in (torch.float32, torch.float64, torch.bfloat16):
        changed = {key: torch.randn_like(tensor).to(file_dtype) for key, tensor in tensors.items()}
        expected, _ = prepare_from(config, changed, targets, dtype)
        found = repacking.pack(changed, lambda: None)
        assert found is not None
        assert torch.equal(found.buffer, expected.buffer)
        assert torch.equal(found.table, expected.table)
        assert torch.equal(found.scales, expected.scales)
        assert (found.vocab_size, found.units, found.changes_kv) == (
            expected.vocab_size,
            expected.units,
            expected.changes_kv,
        )


@pytest.mark.parametrize("fill", ["_fill_on_host", "_fill_on_device"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e6])
def test_values_that_are_not_finite_in_the_model_dtype_are_rejected(
    value: float, fill: str, targets: dict[str, AdapterTarget], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, tensors = read(tmp_path, "plain")
    _, repacking = prepare_from(config, tensors, targets, torch.float16)
    assert repacking is not None
    monkeypatch.setattr(Repacking, "_fill_on_host", getattr(Repacking, fill))
    for key in (next(iter(tensors)), list(tensors)[-1]):
        changed = tensors | {key: tensors[key].clone().fill_(value)}
        assert repacking.pack(changed, lambda: None) is None


def test_other_configs_and_shapes_do_not_fit(targets: dict[str, AdapterTarget], tmp_path: Path) -> None:
    config, tensors = read(tmp_path, "plain")
    _, repacking = prepare_from(config, tensors, targets, torch.float32)
    assert repacking is not None
    assert repacking.fits(replace(config), dict(tensors))
    key = next(iter(tensors))
    others: list[tuple[Any, Tensors]] = [
        (replace(config, alpha=config.alpha + 1), tensors),
        (config, tensors | {key: tensors[key][:-1]}),
        (config, tensors | {key: tensors[key].half()}),
        (config, tensors | {"another": tensors[key]}),
        (config, {other: tensor for other, tensor in tensors.items() if other != key}),
    ]
    assert not any(repacking.fits(*other) for other in others)


@pytest.mark.parametrize("name", ["dora", "saved-head"])
def test_other_weights_have_no_repacking(name: str, targets: dict[str, AdapterTarget], tmp_path: Path) -> None:
    assert prepare_from(*read(tmp_path, name), targets, torch.float32)[1] is None
