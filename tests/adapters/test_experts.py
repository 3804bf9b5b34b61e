"""LoRA on experts: memory layout, true ranks, and rejection of inconsistent files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lorax_server.adapters.host import HostAdapter, prepare
from lorax_server.adapters.merge import MergedAdapter
from lorax_server.adapters.methods.size import count_elements
from lorax_server.distributed import FakeGroup
from lorax_server.errors import AdapterError, InputError
from lorax_server.files.names import CONFIG_FILE, WEIGHTS_FILE
from lorax_server.kernels import Field
from lorax_server.types import Merge
from tests.adapters.test_weights import targets_of
from tests.parity.adapters.cases import BOTH, Case, save_per_expert
from tests.parity.adapters.served import open_adapter

BASE, EXPERTS, HIDDEN, INNER, LAYERS = "qwen3moe", 6, 32, 24, 3
LAYER = "base_model.model.model.layers.1.mlp.experts"
Damage = Callable[[dict[str, torch.Tensor], dict[str, Any]], Any]


def write(folder: Path, *, per_expert: bool = False, damage: Damage | None = None, **settings: Any) -> Path:
    """Write an adapter for experts as PEFT does, then damage its tensors and config."""
    make = save_per_expert if per_expert else None
    parameters = {} if per_expert else {"target_parameters": BOTH}
    Case("", BASE, {"r": 3, "target_modules": ["q_proj"], **parameters, **settings}, make=make).write(folder)
    tensors, config = load_file(folder / WEIGHTS_FILE), json.loads((folder / CONFIG_FILE).read_text())
    if damage is not None:
        damage(tensors, config)
        save_file(tensors, folder / WEIGHTS_FILE)
        (folder / CONFIG_FILE).write_text(json.dumps(config))
    return folder


def convert(folder: Path, rank: int = 0, ranks: int = 1) -> HostAdapter:
    targets = targets_of(BASE, rank, ranks)
    return prepare(open_adapter(folder, targets), targets, torch.float32, FakeGroup(rank, 1))


def expert_fields(host: HostAdapter) -> dict[str, list[int]]:
    names = list(targets_of(BASE))
    return {name: host.table[names.index(name)].tolist() for name in names if ".1.mlp.experts." in name}


def test_gate_and_up_share_lora_a_of_fused_parameter(tmp_path: Path) -> None:
    gate, up, down = expert_fields(convert(write(tmp_path))).values()
    assert gate[Field.A] == up[Field.A] >= 0
    assert len({gate[Field.B], up[Field.B], down[Field.A], down[Field.B]}) == 4
    assert {fields[Field.RANK] for fields in (gate, up, down)} == {3}


@pytest.mark.parametrize("per_expert", [False, True])
def test_memory_use_is_sum_of_factor_sizes(tmp_path: Path, per_expert: bool) -> None:
    folder = write(tmp_path, per_expert=per_expert, target_modules=[])
    host, targets = convert(folder), targets_of(BASE)
    adapter = open_adapter(folder, targets)
    stored = count_elements(adapter.config, adapter.tensors, HIDDEN)
    padding = 64 * len(targets) * 2  # each tensor starts at a multiple of 256 bytes
    assert stored <= host.buffer.numel() <= stored + padding
    factors = EXPERTS * 3 * ((1 + per_expert) * HIDDEN + 2 * INNER + INNER + HIDDEN) * LAYERS
    assert stored - factors == (3 * (HIDDEN + EXPERTS) * LAYERS if per_expert else 0)  # the router


def test_each_matrix_has_its_own_rank(tmp_path: Path) -> None:
    host = convert(write(tmp_path, rank_pattern={"experts.down_proj": 7}))
    assert [fields[Field.RANK] for fields in expert_fields(host).values()] == [3, 3, 7]


def test_each_process_loads_its_shard_of_every_expert(tmp_path: Path) -> None:
    folder = write(tmp_path)
    whole, parts = convert(folder), [convert(folder, rank, 2) for rank in (0, 1)]

    def read(host: HostAdapter, name: str, field: Field, *shape: int) -> torch.Tensor:
        start = expert_fields(host)[f"model.layers.1.mlp.experts.{name}"][field]
        size = torch.Size(shape).numel()
        return host.buffer[start : start + size].view(shape)

    half = INNER // 2
    gate_b = [read(part, "gate_proj", Field.B, EXPERTS, 3, half) for part in parts]
    assert torch.equal(torch.cat(gate_b, -1), read(whole, "gate_proj", Field.B, EXPERTS, 3, INNER))
    down_a = [read(part, "down_proj", Field.A, EXPERTS, 3, half) for part in parts]
    assert torch.equal(torch.cat(down_a, -1), read(whole, "down_proj", Field.A, EXPERTS, 3, INNER))


def test_rslora_scale_of_single_experts_matches_training(tmp_path: Path) -> None:
    folder = write(tmp_path, per_expert=True, use_rslora=True, lora_alpha=6)
    host, names = convert(folder), list(targets_of(BASE))
    scales = [float(host.scales[names.index(name)]) for name in expert_fields(host)]
    assert scales == [pytest.approx(6 / 3**0.5)] * 3


def remove(key: str) -> Damage:
    return lambda tensors, _: tensors.pop(key)


def rename(key: str, new: str) -> Damage:
    return lambda tensors, _: tensors.update({new: tensors.pop(key)})


def configure(**changes: Any) -> Damage:
    return lambda _, config: config.update(changes)


@pytest.mark.parametrize(
    ("per_expert", "damage", "message"),
    [
        (False, remove(f"{LAYER}.lora_A.weight"), "must have LoRA factors for the parameters that target_parameters"),
        (False, configure(target_parameters=BOTH[:1]), r"name, \['gate_up_proj'\] \(got 2 pairs\)"),
        (False, configure(target_parameters=None), r"name, \[\] \(got 2 pairs\)"),
        (False, configure(r=5), "has shape .*, expected"),
        (False, configure(use_dora=True), "use_dora = True is not supported for experts"),
        (
            False,
            rename(f"{LAYER}.lora_A.weight", f"{LAYER}.base_layer.base_layer.lora_A.weight"),
            "must have LoRA factors",
        ),
        (True, remove(f"{LAYER}.4.up_proj.lora_B.weight"), "must have LoRA factors for all 6 experts"),
        (True, configure(rank_pattern={r"experts\.2\.up_proj": 5}), "with the same rank and scale"),
        (
            True,
            configure(target_modules=["gate", "up_proj", "down_proj"]),
            "which target_modules in the config exclude",
        ),
        (
            True,
            rename(f"{LAYER}.5.up_proj.lora_A.weight", f"{LAYER}.6.up_proj.lora_A.weight"),
            "must have LoRA factors for all 6 experts",
        ),
        (
            True,
            lambda tensors, _: tensors.update({f"{LAYER}.6.up_proj.lora_A.weight": torch.ones(3, HIDDEN)}),
            "targets expert 6 and matrix 'up_proj', which the base model does not have",
        ),
        (
            True,
            lambda tensors, _: tensors.update({f"{LAYER}.0.up_proj.lora_magnitude_vector": torch.ones(INNER)}),
            "is DoRA for experts, which is not supported",
        ),
        (
            True,
            lambda tensors, _: tensors.update({f"{LAYER}.0.up_proj.weight": torch.ones(INNER, HIDDEN)}),
            "targets a module that this base model does not have or that does not support adapters",
        ),
    ],
)
def test_inconsistent_experts_are_rejected(tmp_path: Path, per_expert: bool, damage: Damage, message: str) -> None:
    folder = write(tmp_path, per_expert=per_expert, damage=damage)
    with pytest.raises(AdapterError, match=message):
        open_adapter(folder, targets_of(BASE))


def test_merge_of_expert_adapters_is_rejected(tmp_path: Path) -> None:
    adapter = open_adapter(write(tmp_path), targets_of(BASE))
    with pytest.raises(InputError, match="it contains more than LoRA factors"):
        MergedAdapter([adapter, adapter], Merge(weights=(0.5, 0.5), strategy="linear"))
