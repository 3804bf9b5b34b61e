"""Checkpoints: tensors by name, read lazily, each rank only its part."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict, Unpack
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open

from lorax_server.distributed import ProcessGroup, Shard
from lorax_server.errors import WeightsError
from lorax_server.kernels import Ops

# A checkpoint saved from the inner model lacks the first word of its names.
OPTIONAL_PREFIXES = ("model.", "transformer.", "gpt_neox.")
# In the order transformers looks: saving over a sharded checkpoint leaves its index behind.
FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


class Placement(TypedDict):
    """Where and how a model's tensors are to live."""

    device: torch.device
    dtype: torch.dtype
    process_group: ProcessGroup
    ops: Ops
    pack: NotRequired[bool]  # keep packed copies of matrices; False unless given


class Weights(ABC):
    """What a module needs to build itself: its tensors, and where and how they are to live."""

    def __init__(self, **placement: Unpack[Placement]) -> None:
        self.device = placement["device"]
        self.dtype = placement["dtype"]
        self.process_group = placement["process_group"]
        self.ops = placement["ops"]
        self.pack = placement.get("pack", False)

    @abstractmethod
    def _find(self, name: str) -> bool:
        """Whether a tensor of exactly this name is here."""

    @abstractmethod
    def _shape(self, name: str) -> tuple[int, ...]: ...

    @abstractmethod
    def _read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor: ...

    @abstractmethod
    def where(self, name: str) -> str:
        """The file that holds, or should hold, a tensor: for error messages."""

    def has(self, name: str) -> bool:
        return any(self._find(candidate) for candidate in _spellings(name))

    def get_shape(self, name: str) -> tuple[int, ...]:
        return self._shape(self._resolve(name))

    def get_tensor(self, name: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """A whole tensor, in this model's dtype and on its device."""
        return self._load(self._resolve(name), shape, ())

    def get_number(self, name: str) -> float:
        """A tensor of one element, as it is stored: a small scale would not survive a narrow dtype."""
        name = self._resolve(name)
        tensor = self._read(name, ())
        if tensor.numel() != 1:
            raise WeightsError(f"{self.where(name)}: tensor {name!r} has shape {tuple(tensor.shape)}, not one number")
        return float(tensor)

    def get_sharded(self, name: str, dim: int, shard: Shard, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """This rank's part of a tensor along one dimension; `shape` is that of the whole tensor."""
        name = self._resolve(name)
        if shard.is_whole:
            return self._load(name, shape, ())
        before = (slice(None),) * dim
        pieces = [self._load(name, shape, (*before, slice(start, stop))) for start, stop in shard.ranges]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=dim)

    def _load(self, name: str, shape: tuple[int, ...] | None, index: tuple[slice, ...]) -> torch.Tensor:
        found = self._shape(name)
        if shape is not None and found != shape:
            raise WeightsError(f"{self.where(name)}: tensor {name!r} has shape {found}, the config asks for {shape}")
        tensor = self._read(name, index)
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            # A float8 tensor without its scales would load as other numbers.
            raise WeightsError(
                f"{self.where(name)}: tensor {name!r} is {tensor.dtype}; only float16 to 64 is supported"
            )
        return tensor.to(device=self.device, dtype=self.dtype)

    def _resolve(self, name: str) -> str:
        for candidate in _spellings(name):
            if self._find(candidate):
                return candidate
        raise WeightsError(f"{self.where(name)}: tensor {name!r} is missing")


class TensorWeights(Weights):
    """Weights from tensors in memory."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        source: str = "tensors in memory",
        **placement: Unpack[Placement],
    ) -> None:
        super().__init__(**placement)
        self._tensors = tensors
        self._source = source

    def _find(self, name: str) -> bool:
        return name in self._tensors

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def _read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        return self._tensors[name][index] if index else self._tensors[name]

    def where(self, name: str) -> str:  # noqa: ARG002 - all in one place
        return self._source


class SafetensorsWeights(Weights):
    """Weights from one or several safetensors files; only the bytes that are asked for are read."""

    def __init__(self, files: Mapping[str, Path], default: Path, **placement: Unpack[Placement]) -> None:
        """`files` says which file holds a tensor; `default` is named for a tensor that none holds."""
        super().__init__(**placement)
        self._files = files
        self._default = default
        self._open = {path: _open_safetensors(path) for path in sorted(set(files.values()))}
        self._tied = _tied_names(self._open.values())

    def _find(self, name: str) -> bool:
        return self._tied.get(name, name) in self._files

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def _read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        stored = self._slice(name)
        # An empty index would be refused for a scalar, an ellipsis is not understood.
        if not stored.get_shape():
            return self._handle(name).get_tensor(self._tied.get(name, name))  # type: ignore[no-any-return]
        return stored[index or slice(None)]  # type: ignore[no-any-return]

    def where(self, name: str) -> str:
        return str(self._files.get(self._tied.get(name, name), self._default))

    def _handle(self, name: str) -> Any:
        return self._open[self._files[self._tied.get(name, name)]]

    def _slice(self, name: str) -> Any:
        try:
            return self._handle(name).get_slice(self._tied.get(name, name))
        except SafetensorError as error:
            raise WeightsError(f"{self.where(name)}: tensor {name!r} cannot be read: {error}") from error


def open_weights(folder: Path, **placement: Unpack[Placement]) -> Weights:
    """The weights of a model's folder: safetensors, else PyTorch files (of which nothing but tensors is loaded)."""
    found = _find_checkpoint(folder)
    if found.name.endswith(".index.json"):
        files = _read_index(found)
        if "safetensors" in found.name:
            return SafetensorsWeights(files, found, **placement)
        return TensorWeights(_load_pickles(sorted(set(files.values()))), source=str(found), **placement)
    if found.suffix == ".safetensors":
        names = _open_safetensors(found).keys()
        return SafetensorsWeights(dict.fromkeys(names, found), found, **placement)
    return TensorWeights(_load_pickles([found]), source=str(found), **placement)


def weight_bytes(folder: Path) -> int:
    """Size of the files that `open_weights` would read."""
    found = _find_checkpoint(folder)
    files = set(_read_index(found).values()) if found.suffix == ".json" else {found}
    return sum(path.stat().st_size for path in files)


def _find_checkpoint(folder: Path) -> Path:
    for file in FILES:
        if (folder / file).is_file():
            return folder / file
    raise WeightsError(f"{folder}: no weights; looked for {', '.join(FILES)}")


def _spellings(name: str) -> tuple[str, ...]:
    short = next((name.removeprefix(prefix) for prefix in OPTIONAL_PREFIXES if name.startswith(prefix)), None)
    return (name,) if short is None else (name, short)


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path}: not a readable safetensors file: {error}") from error


def _tied_names(handles: Any) -> dict[str, str]:
    """safetensors stores a shared tensor once and records the other names in the file's metadata."""
    tied: dict[str, str] = {}
    for handle in handles:
        names = set(handle.keys())
        for name, kept in (handle.metadata() or {}).items():
            if kept in names and name not in names:
                tied[name] = kept
    return tied


def _read_index(path: Path) -> dict[str, Path]:
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        files = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{path}: not a weight index (a JSON object with a `weight_map`): {error}") from error
    for file in sorted(set(files.values())):
        if Path(file).name != file:
            raise WeightsError(f"{path}: shard {file!r} is not a plain file name")
        if not (path.parent / file).is_file():
            raise WeightsError(f"{path}: shard {file!r} is missing from the folder")
    return {name: path.parent / file for name, file in files.items()}


def _load_pickles(paths: list[Path]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in paths:
        try:
            # Files from before torch 1.6 are not archives and cannot be mapped.
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
        except Exception as error:  # whatever a damaged or hostile pickle provokes
            raise WeightsError(f"{path}: refused, it does not load as plain tensors: {error}") from error
        if not isinstance(loaded, dict) or not all(_is_plain(value) for value in loaded.values()):
            raise WeightsError(f"{path}: refused, it is not a plain dictionary of tensors")
        tensors |= loaded
    return tensors


def _is_plain(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided
