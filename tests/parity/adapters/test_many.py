"""1,000 adapters, memory for 50, 5,000 uses: memory stays within budget and logits are correct."""

import json
import random
import warnings
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from lorax_server.adapters.host import UNIT_BYTES, HostAdapter, prepare
from lorax_server.distributed import FakeGroup
from lorax_server.engine.adapters.space import AdapterSpace
from lorax_server.files.names import CONFIG_FILE, WEIGHTS_FILE
from lorax_server.layers.targets import collect_adapter_targets
from lorax_server.worker.adapter_memory import AdapterMemory
from tests.paged import PagedDriver
from tests.parity.adapters.cases import Case
from tests.parity.adapters.served import make_model, open_adapter
from tests.parity.oracle import oracle_logits
from tests.parity.variants import make_oracle

BASE = "llama-gqa"
NUM_ADAPTERS, NUM_RESIDENT, NUM_USES, ROWS = 1000, 50, 5000, 16
KINDS = [
    Case("LoRA", BASE, {"r": 4}),
    Case("LoRA", BASE, {"r": 1, "target_modules": ["q_proj"], "layers_to_transform": [1]}),
    Case("all-linear", BASE, {"r": 16, "target_modules": "all-linear", "lora_alpha": 4}),
    Case("DoRA", BASE, {"r": 8, "use_dora": True, "lora_alpha": 4}),
    Case("tokens", BASE, {"r": 3, "trainable_token_indices": [7, 40]}),
    Case("rank_pattern", BASE, {"r": 2, "rank_pattern": {"q_proj": 11}}),
]


def write_many(folder: Path) -> list[Path]:
    """Save one adapter of each method with PEFT. The others are copies with different weights."""
    templates = []
    for number, case in enumerate(KINDS):
        case.write(folder / f"template{number}")
        tensors = load_file(folder / f"template{number}" / WEIGHTS_FILE)
        templates.append((tensors, json.loads((folder / f"template{number}" / CONFIG_FILE).read_text())))
    folders = []
    for number in range(NUM_ADAPTERS):
        tensors, config = templates[number % len(templates)]
        generator = torch.Generator().manual_seed(number)
        place = folder / f"adapter{number:04}"
        place.mkdir()
        varied = {name: x * (0.5 + torch.rand(x.shape, generator=generator)) for name, x in tensors.items()}
        save_file(varied, place / WEIGHTS_FILE, metadata={"format": "pt"})
        (place / CONFIG_FILE).write_text(json.dumps(config))
        folders.append(place)
    return folders


class Residency:
    """An LRU adapter memory with two steps in flight."""

    def __init__(self, memory: AdapterMemory, hosts: list[HostAdapter]) -> None:
        self.memory, self.hosts = memory, hosts
        self.space = AdapterSpace(memory.num_units)
        self.indices: OrderedDict[int, int] = OrderedDict()  # index by adapter, least recently used first
        self.free_indices = list(range(1, len(hosts) + 1))
        self.in_flight: list[int] = []
        self.loads = self.moves = self.most_units = 0

    def use(self, adapters: list[int]) -> dict[int, int]:
        for adapter in adapters:
            if adapter not in self.indices:
                self._load(adapter, keep=set(adapters))
            self.indices.move_to_end(adapter)
        self.step()
        return {adapter: self.indices[adapter] for adapter in adapters}

    def step(self) -> None:
        step, moves = self.space.submit()
        self.in_flight.append(step)
        for move in moves:
            assert isinstance(move.key, int)
            self.memory.move(self.indices[move.key], move.source, move.target)
            self.moves += 1
        if len(self.in_flight) == 2:
            self.space.complete_step(self.in_flight.pop(0))
        resident = sum(self.hosts[adapter].units for adapter in self.indices)
        self.most_units = max(self.most_units, resident)
        assert resident <= self.memory.num_units
        assert resident == self.memory.num_units - self.space.num_free_units

    def _load(self, adapter: int, keep: set[int]) -> None:
        units = self.hosts[adapter].units
        while self.space.num_free_units < units:
            victim = next(old for old in self.indices if old not in keep)
            index = self.indices.pop(victim)
            self.memory.unload(index)
            self.space.free(victim)
            self.free_indices.append(index)
        while (place := self.space.allocate(adapter, units)) is None:
            self.space.compact(units)
            self.step()
        self.indices[adapter] = self.free_indices.pop(0)
        self.memory.load(self.indices[adapter], self.hosts[adapter], place)
        while not self.memory.is_loaded(self.indices[adapter]):
            pass
        self.space.finish_loading(adapter)
        self.loads += 1


@pytest.mark.slow
def test_adapters_match_peft_during_evictions(tmp_path: Path, device: torch.device) -> None:
    folders = write_many(tmp_path)
    model = make_model(BASE, device)
    targets = collect_adapter_targets(model)
    hosts = [prepare(open_adapter(folder, targets), targets, torch.float32, FakeGroup()) for folder in folders]
    budget = sum(host.units for host in hosts) * NUM_RESIDENT // NUM_ADAPTERS
    residency = Residency(AdapterMemory(targets, torch.float32, device, budget, 1 + NUM_ADAPTERS), hosts)
    chooser = random.Random(3)
    prompts = [[chooser.randrange(3, 97) for _ in range(4)] for _ in folders]
    first_seen: dict[int, torch.Tensor] = {}
    worst = 0.0
    for _ in range(-(-NUM_USES // ROWS)):
        # A few popular adapters, and many that are rarely used.
        adapters = [min(int(chooser.paretovariate(0.25)), NUM_ADAPTERS) - 1 for _ in range(ROWS)]
        indices = residency.use(adapters)
        driver = PagedDriver(model)
        feeds = [(driver.add(indices[adapter], 4), prompts[adapter]) for adapter in adapters]
        for adapter, logits in zip(adapters, driver.forward(feeds, residency.memory.arena), strict=True):
            worst = max(worst, float((first_seen.setdefault(adapter, logits) - logits).abs().max()))
    assert worst < 1e-4  # logits must not depend on the batch or on the adapter's units
    assert residency.loads > 1000
    assert residency.moves > 10
    assert residency.most_units <= budget
    assert residency.most_units > 0.95 * budget

    for adapter in chooser.sample(sorted(first_seen), 12):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            oracle = PeftModel.from_pretrained(make_oracle(BASE), folders[adapter]).eval().get_base_model().to(device)
        expected = oracle_logits(oracle, prompts[adapter], 4, {})
        assert (first_seen[adapter] - expected).abs().max() < 1e-4
    assert budget * UNIT_BYTES == residency.memory.arena.buffer.nbytes
