"""Adapters that are passed as tensors instead of files."""

import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lorax_server.adapters.config import AdapterConfig, parse_config
from lorax_server.adapters.methods.size import count_elements
from lorax_server.adapters.spec import AdapterCheckpoint, AdapterSpec, InMemoryWeights
from lorax_server.adapters.tensor_reader import describe_tensors
from lorax_server.errors import AdapterError

TRANSFER_BYTES = 64 * 2**20  # from a GPU at a time, because a transfer needs temporary memory on the GPU


def parse_peft_config(config: Any, name: str) -> AdapterConfig:
    """Return the parsed config. `config` is a PEFT config, or a mapping as in `adapter_config.json`."""
    raw = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(raw, Mapping):
        raise AdapterError(f"adapter {name!r}: config must be a PEFT config or a mapping (got {type(raw).__name__})")
    try:
        return parse_config(json.loads(json.dumps(raw, default=list)), name)  # PEFT uses sets
    except (TypeError, ValueError) as error:
        raise AdapterError(f"adapter {name!r}: config cannot be read: {error}") from error


def make_spec(name: str, tensors: Any, config: AdapterConfig, max_inputs: int, copies: bool = True) -> AdapterSpec:
    """Return a spec with a new identity for an adapter's tensors, given by name. The tensors are not hashed.

    `copies` copies the tensors to the CPU. Otherwise, call `release_tensors` before the caller can change the tensors.
    """
    if not isinstance(tensors, Mapping) or not tensors:
        raise AdapterError(f"adapter {name!r}: `tensors` must be a mapping from tensor names to tensors, and not empty")
    given = {key: _to_tensor(key, each, name) for key, each in tensors.items()}
    if copies:  # separate tensors, because a view is pickled with all the memory that it refers to
        given = {key: each.clone() for key, each in _copy_gpu_tensors(given).items()}
    num_elements = count_elements(config, describe_tensors(given, name), max_inputs)
    identity = uuid.uuid4().hex
    checkpoint = AdapterCheckpoint(Path(), config, (), identity, in_memory=InMemoryWeights(given))
    return AdapterSpec(identity, name, (checkpoint,), num_elements)


def _to_tensor(key: Any, value: Any, name: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor) and not value.requires_grad and value.is_contiguous():
        return value  # the calls below take a millisecond for all tensors of an adapter
    try:
        return torch.as_tensor(value).detach().contiguous()
    except (TypeError, ValueError, RuntimeError) as error:
        raise AdapterError(f"adapter {name!r}: {str(key)!r} cannot be read as a tensor: {error}") from error


def release_tensors(spec: AdapterSpec) -> None:
    """Stop using tensors that `make_spec` did not copy. They must have been packed, or the spec must be unloaded."""
    for part in spec.checkpoints:
        if part.in_memory is not None:
            part.in_memory.tensors = {}


def move_to_host(spec: AdapterSpec) -> None:
    """Replace the tensors on a GPU with copies on the CPU."""
    for part in spec.checkpoints:
        if part.in_memory is not None:
            part.in_memory.tensors = _copy_gpu_tensors(part.in_memory.tensors)


def _copy_gpu_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(tensors) | copy_to_host({key: each for key, each in tensors.items() if not each.is_cpu})


def copy_to_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy contiguous tensors to the CPU. Tensors with the same device and dtype share large transfers."""
    groups: dict[tuple[torch.device, torch.dtype, int], list[str]] = {}
    num_bytes = 0
    for key, each in tensors.items():
        num_bytes += each.nbytes
        groups.setdefault((each.device, each.dtype, num_bytes // TRANSFER_BYTES), []).append(key)
    copies: dict[str, torch.Tensor] = {}
    for keys in groups.values():
        sizes = [tensors[key].numel() for key in keys]
        copied = torch.cat([tensors[key].view(-1) for key in keys]).cpu()
        copies |= {key: part.view(tensors[key].shape) for key, part in zip(keys, copied.split(sizes), strict=True)}
    return copies
