"""A base model with adapters loaded from folders."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from lorax_server.adapters.batch import AdapterArena
from lorax_server.adapters.config import parse_config
from lorax_server.adapters.target import AdapterTarget
from lorax_server.adapters.weights import StoredAdapter
from lorax_server.distributed import FakeGroup, ProcessGroup
from lorax_server.files.names import CONFIG_FILE
from lorax_server.layers.targets import collect_adapter_targets
from lorax_server.models.custom_modeling.paged import PagedCausalLM
from lorax_server.models.registry import build_model
from tests.lora import fill_arena
from tests.parity.variants import VARIANTS, checkpoint, make_oracle, make_weights


def make_model(
    base: str, device: torch.device, group: ProcessGroup | None = None, spread: float = 0.3
) -> PagedCausalLM:
    tensors = checkpoint(base, make_oracle(base, spread))
    return build_model(VARIANTS[base].config(), make_weights(tensors, device, group))


def open_adapter(folder: Path, targets: dict[str, AdapterTarget], name: str = "tested") -> StoredAdapter:
    config = parse_config(json.loads((folder / CONFIG_FILE).read_text()), name)
    return StoredAdapter(folder, config, targets)


def load_adapters(
    model: PagedCausalLM, folders: Sequence[Path], device: torch.device, group: ProcessGroup | None = None
) -> AdapterArena:
    """Load the adapters; the one in folder `i` gets index `i + 1`."""
    targets = collect_adapter_targets(model)
    adapters = [open_adapter(folder, targets, folder.name) for folder in folders]
    return fill_arena(targets, adapters, device, group or FakeGroup())
