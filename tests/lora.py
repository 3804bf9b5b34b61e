"""Test adapters: random factors for all target modules, the arena that stores them, and saved PEFT adapters."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lorax_server.adapters.batch import AdapterArena
from lorax_server.adapters.host import prepare
from lorax_server.adapters.target import AdapterTarget, TargetKind
from lorax_server.adapters.weights import AdapterWeights, ModuleWeights
from lorax_server.distributed import FakeGroup, ProcessGroup
from lorax_server.worker.adapter_memory import AdapterMemory

# target: A [rank, in], B [out, rank], as PEFT has them; for experts [experts, rank, in] and [experts, out, rank]
Factors = dict[str, tuple[torch.Tensor, torch.Tensor]]


def random_factors(targets: Mapping[str, AdapterTarget], rank: int, seed: int) -> Factors:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (
            torch.randn(*count, rank, target.inputs.full, generator=generator) * 0.3,
            torch.randn(*count, target.outputs.full, rank, generator=generator) * 0.3,
        )
        for name, target in targets.items()
        for count in [() if target.experts is None else (target.experts.num_experts,)]
        if target.kind in (TargetKind.LINEAR, TargetKind.HEAD, TargetKind.EXPERTS)
    }


def save_adapter(model: Any, folder: Path, **options: Any) -> None:
    """Save an adapter with PEFT. Creates the model card first, because PEFT would compile a template to create it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text("---\nlibrary_name: peft\n---\n")
    model.save_pretrained(str(folder), **options)


class GivenAdapter:
    """An adapter from tensors in memory."""

    def __init__(self, modules: Mapping[str, ModuleWeights], vocab_size: int, name: str = "given") -> None:
        self.name = name
        self.vocab_size = vocab_size
        self._modules = modules

    @property
    def modules(self) -> list[str]:
        return list(self._modules)

    def find_rank(self, module: str) -> int:
        lora_a = self._modules[module].lora_a
        return 0 if lora_a is None else lora_a.shape[-2]

    def load(self, module: str) -> ModuleWeights:
        return self._modules[module]


def make_arena(
    targets: Mapping[str, AdapterTarget],
    adapters: Sequence[tuple[Factors, float]],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> AdapterArena:
    """Create an arena in which the adapter at list index `i` has adapter index `i + 1`."""
    given = [
        GivenAdapter({name: ModuleWeights(a, b, scale) for name, (a, b) in factors.items()}, _vocab_size(targets))
        for factors, scale in adapters
    ]
    return fill_arena(targets, given, device, FakeGroup(), dtype)


def _vocab_size(targets: Mapping[str, AdapterTarget]) -> int:
    return next((target.outputs.full for target in targets.values() if target.kind is TargetKind.HEAD), 0)


def fill_arena(
    targets: Mapping[str, AdapterTarget],
    adapters: Sequence[AdapterWeights],
    device: torch.device,
    group: ProcessGroup,
    dtype: torch.dtype = torch.float32,
) -> AdapterArena:
    """Fill the arena. Adapter `i` gets index `i + 1`, with one free unit between adapters."""
    hosts = [prepare(adapter, targets, dtype, group) for adapter in adapters]
    memory = AdapterMemory(targets, dtype, device, 64 + sum(host.units + 1 for host in hosts), 1 + len(hosts))
    place = 1
    for index, host in enumerate(hosts, start=1):
        memory.load(index, host, place)
        place += host.units + 1
    if device.type == "cuda":
        torch.cuda.synchronize()
    return memory.arena


@torch.no_grad()
def merged(oracle: Any, factors: Factors, scale: float) -> Any:
    """Return the oracle with an adapter merged into its matrices."""
    model = deepcopy(oracle)
    for name, (lora_a, lora_b) in factors.items():
        if lora_a.dim() == 3:
            _merge_experts(model, name, lora_b @ lora_a * scale)
            continue
        module = model.get_submodule(name)
        delta = (lora_b @ lora_a * scale).to(module.weight.device)
        delta = delta.t() if isinstance(module, Conv1D) else delta
        module.weight = nn.Parameter(module.weight + delta)  # a tied head gets a separate matrix
    return model


def _merge_experts(model: Any, name: str, delta: torch.Tensor) -> None:
    parent, _, matrix = name.rpartition(".")
    experts, inner = model.get_submodule(parent), delta.shape[1]
    parameter = experts.down_proj if matrix == "down_proj" else experts.gate_up_proj
    if hasattr(experts, "gate_up_proj_bias"):  # gpt-oss: [experts, inputs, outputs], gate and up interleaved
        columns = slice(None) if matrix == "down_proj" else slice(int(matrix == "up_proj"), None, 2)
        parameter[..., columns] += delta.mT.to(parameter.device)
        return
    start = inner if matrix == "up_proj" else 0
    parameter[:, start : start + inner] += delta.to(parameter.device)
