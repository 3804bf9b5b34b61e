"""Adapters that are passed as tensors instead of files."""

import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lorax_server.adapters.config import AdapterConfig, parse_config
from lorax_server.adapters.methods.size import count_elements
from lorax_server.adapters.spec import AdapterCheckpoint, AdapterSpec
from lorax_server.adapters.tensor_reader import describe_tensors
from lorax_server.errors import AdapterError


def parse_peft_config(config: Any, name: str) -> AdapterConfig:
    """Return the parsed config. `config` is a PEFT config, or a mapping as in `adapter_config.json`."""
    raw = config.to_dict() if hasattr(config, "to_dict") else config
    try:
        return parse_config(json.loads(json.dumps(raw, default=list)), name)  # PEFT uses sets
    except (TypeError, ValueError) as error:
        raise AdapterError(f"adapter {name!r}: config cannot be read: {error}") from error


def copy_to_spec(name: str, tensors: Mapping[str, torch.Tensor], config: AdapterConfig, max_inputs: int) -> AdapterSpec:
    """Copy an adapter's tensors to the CPU, and return a spec with a new identity.

    The tensors are copied, because the caller may change them later. The tensors are not hashed, so each copy has
    its own identity.
    """
    if not tensors:
        raise AdapterError(f"adapter {name!r}: `tensors` is empty")
    copies = {key: torch.as_tensor(each).detach().to("cpu", copy=True).contiguous() for key, each in tensors.items()}
    num_elements = count_elements(config, describe_tensors(copies, name), max_inputs)
    identity = uuid.uuid4().hex
    checkpoint = AdapterCheckpoint(Path(), config, (), identity, tensors=copies)
    return AdapterSpec(identity, name, (checkpoint,), num_elements)
