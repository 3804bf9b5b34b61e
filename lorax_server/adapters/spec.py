"""The descriptions of adapters that the engine sends to the workers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lorax_server.adapters.config import AdapterConfig
from lorax_server.files.regular_file import Stamp
from lorax_server.types import Merge

# File timestamps have a coarse resolution, so two changes within this time may have the same stamp.
MIN_STAMP_AGE_NS = 2 * 10**9


def is_settled(stamp: Stamp, now_ns: int) -> bool:
    """Return True if the file stamp is old enough that any later change to the file changes the stamp."""
    return now_ns - stamp[-1] > MIN_STAMP_AGE_NS


@dataclass(eq=False)
class InMemoryWeights:
    """The weights of an adapter that is passed as tensors. Engine modules do not import torch."""

    tensors: Mapping[str, Any]
    packed: Any = None  # the prepared `HostAdapter`, which replaces the tensors; after `Executor.pack` on the device


@dataclass(frozen=True)
class AdapterCheckpoint:
    """An adapter checkpoint in a local folder, with its parsed config."""

    folder: Path
    config: AdapterConfig
    stamp: Stamp  # the weights file's stamp when the identity was computed
    identity: str = ""
    is_settled: bool = True  # if False, the file may have changed without a new stamp
    # Instead of the weights file in `folder`.
    in_memory: InMemoryWeights | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class AdapterSpec:
    """An adapter to load: one checkpoint, or a merge of several checkpoints."""

    identity: str
    name: str
    checkpoints: tuple[AdapterCheckpoint, ...]
    num_elements: int  # upper bound, used to reserve memory
    merge: Merge | None = None

    @property
    def invocation_tokens(self) -> tuple[int, ...]:
        """The invocation tokens if this is an aLoRA adapter. Merges have no invocation tokens, because aLoRA adapters
        cannot be merged.
        """
        return self.checkpoints[0].config.invocation_tokens if len(self.checkpoints) == 1 else ()

    @property
    def is_in_memory(self) -> bool:
        """Return True if the adapter was passed as tensors."""
        return any(part.in_memory is not None for part in self.checkpoints)
