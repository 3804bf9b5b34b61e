"""The instructions to prepare an adapter, as the engine sends them to the workers."""

from dataclasses import dataclass
from pathlib import Path

from lorax_server.adapters.config import AdapterConfig
from lorax_server.files.plain_file import Stamp
from lorax_server.types import Merge

SETTLED_NS = 2 * 10**9


def is_settled(stamp: Stamp, now_ns: int) -> bool:
    """Tell whether every later change of a file shows in its stamp: clocks of file systems tick slowly."""
    return now_ns - stamp[-1] > SETTLED_NS


@dataclass(frozen=True)
class StoredPart:
    """An adapter in a folder of this machine."""

    folder: Path
    config: AdapterConfig
    stamp: Stamp  # of its weights when it was identified
    identity: str = ""
    is_settled: bool = True  # else it may have changed without a new stamp


@dataclass(frozen=True)
class AdapterSpec:
    """One adapter, or several that are merged."""

    identity: str
    name: str
    parts: tuple[StoredPart, ...]
    num_elements: int  # of its tensors; times their size, about the most memory that it takes
    merge: Merge | None = None
