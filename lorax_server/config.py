"""Settings, frozen once they are made. A default is written here and nowhere else."""

import re
from dataclasses import dataclass
from pathlib import Path

from lorax_server.errors import ConfigError

DTYPES = ("float32", "float16", "bfloat16")
QUANTIZE = ("fp8-kv",)


@dataclass(frozen=True)
class ModelConfig:
    """Which model to load, and how."""

    path: Path
    """Folder with `config.json` and the weights."""
    dtype: str | None = None
    """One of `DTYPES`. None: float32 on a CPU, what the checkpoint says on a GPU."""
    device: str = "cpu"
    """`cpu`, `cuda` or `cuda:<index>`."""
    quantize: str | None = None
    """`fp8-kv` stores keys and values as float8."""
    pack_weights: bool | None = None
    """Keep a second, packed copy of each matrix for batches on a CPU: faster, twice the memory.
    None: where both copies fit in half of this machine's memory."""

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype!r} is not supported; use one of {', '.join(DTYPES)}")
        if re.fullmatch(r"cpu|cuda(:\d+)?", self.device) is None:
            raise ConfigError(f"device {self.device!r} is not supported; use cpu, cuda or cuda:<index>")
        if self.quantize is not None and self.quantize not in QUANTIZE:
            raise ConfigError(f"quantize {self.quantize!r} is not supported; use one of {', '.join(QUANTIZE)}")
