"""Find the checkpoint files in a model folder and load tensors from them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, Self, TypedDict, Unpack
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open

from lorax_server.distributed import ProcessGroup, Shard
from lorax_server.errors import WeightsError
from lorax_server.files.model_files import find_checkpoint, find_truncation, read_index
from lorax_server.kernels import Ops
from lorax_server.kernels.device import is_host
from lorax_server.weights.progress import LoadProgress
from lorax_server.weights.reader import WeightsReader

# Checkpoints saved from the inner model (without LM head) lack these tensor name prefixes.
OPTIONAL_PREFIXES = ("model.", "transformer.", "gpt_neox.")


class Placement(TypedDict):
    """The device, dtype and rank that a model's tensors are loaded for."""

    device: torch.device
    dtype: torch.dtype
    process_group: ProcessGroup
    ops: Ops
    progress: NotRequired[LoadProgress]  # logs the bytes loaded


class Weights:
    """A checkpoint's tensors by name, with the device, dtype and rank that modules are built for."""

    def __init__(
        self,
        tensors: Mapping[str, "torch.Tensor | StoredTensor"],
        *,
        source: str = "tensors in memory",  # shown in error messages for missing tensors
        reader: WeightsReader | None = None,  # closed when the context exits
        **placement: Unpack[Placement],
    ) -> None:
        self._tensors = tensors
        self._source = source
        self._reader = reader
        self.device = placement["device"]
        self.dtype = placement["dtype"]
        self.process_group = placement["process_group"]
        self.ops = placement["ops"]
        self._progress = placement.get("progress")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._reader is not None:
            self._reader.close()

    def _read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        stored = self._tensors[name]
        if self._reader is None or not isinstance(stored, StoredTensor):
            return stored[index]
        return self._reader.read(stored.path, stored.name, stored.shape, index)

    def location(self, name: str) -> str:
        """Return the path of the file that contains a tensor, for error messages."""
        stored = self._tensors.get(name)
        return str(stored.path) if isinstance(stored, StoredTensor) else self._source

    def has(self, name: str) -> bool:
        return any(candidate in self._tensors for candidate in _candidate_names(name))

    def get_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[self._resolve(name)].shape)

    def get_tensor(self, name: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """Return an unsharded tensor in the model's dtype and on its device.

        On CPUs the tensor is copied, because a view would keep the whole mapped file in memory.
        """
        tensor = self._load(self._resolve(name), shape, ())
        return tensor.clone() if is_host(self.device) else tensor

    def get_scalar(self, name: str) -> float:
        """Return the value of a one-element tensor at its stored precision."""
        name = self._resolve(name)
        tensor = self._read(name, ())
        if tensor.numel() != 1:
            raise WeightsError(f"{self.location(name)}: tensor {name!r} has shape {tuple(tensor.shape)}, not a scalar")
        return float(tensor)

    def get_sharded(self, name: str, dim: int, shard: Shard, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """Return this rank's shard along one dimension. `shape` is the expected shape of the whole tensor."""
        name = self._resolve(name)
        if shard.is_whole:
            return self._load(name, shape, ())
        before = (slice(None),) * dim
        pieces = [self._load(name, shape, (*before, slice(start, stop))) for start, stop in shard.ranges]
        return shard.reorder(pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=dim), dim)

    def _load(self, name: str, shape: tuple[int, ...] | None, index: tuple[slice, ...]) -> torch.Tensor:
        stored = tuple(self._tensors[name].shape)
        if shape is not None and stored != shape:
            raise WeightsError(f"{self.location(name)}: tensor {name!r} has shape {stored}, expected {shape}")
        tensor = self._read(name, index)
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            # Float8 tensors would need their scales.
            raise WeightsError(
                f"{self.location(name)}: tensor {name!r} is {tensor.dtype}; only float16 to float64 are supported"
            )
        loaded = tensor.to(device=self.device, dtype=self.dtype)
        if self._progress is not None:
            self._progress.add(loaded.nbytes)
        return loaded

    def _resolve(self, name: str) -> str:
        for candidate in _candidate_names(name):
            if candidate in self._tensors:
                return candidate
        raise WeightsError(f"{self.location(name)}: tensor {name!r} is missing")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file. Indexing reads only the selected elements."""

    file: Any
    name: str
    path: Path

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._slice().get_shape())

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        # safetensors rejects an empty index for scalars and does not support an ellipsis.
        if not self.shape:
            return self.file.get_tensor(self.name)  # type: ignore[no-any-return]
        return self._slice()[index or slice(None)]  # type: ignore[no-any-return]

    def _slice(self) -> Any:
        try:
            return self.file.get_slice(self.name)
        except SafetensorError as error:
            raise WeightsError(f"{self.path}: tensor {self.name!r} cannot be read: {error}") from error


def open_weights(folder: Path, **placement: Unpack[Placement]) -> Weights:
    """Return the weights in a model folder, from safetensors files or, as a fallback, PyTorch files."""
    checkpoint = find_checkpoint(folder)
    is_index = checkpoint.suffix == ".json"
    paths = read_index(checkpoint) if is_index else {}
    tensors: Mapping[str, torch.Tensor | StoredTensor]
    reader = None
    if "safetensors" in checkpoint.name:
        tensors = open_tensors(paths if is_index else dict.fromkeys(_open_safetensors(checkpoint).keys(), checkpoint))
        reader = WeightsReader(placement["device"]) if placement["device"].type == "cuda" else None
    else:
        tensors = _load_pickles(sorted(set(paths.values())) if is_index else [checkpoint])
    return Weights(tensors, source=str(checkpoint), reader=reader, **placement)


def open_tensors(paths: Mapping[str, Path]) -> dict[str, StoredTensor]:
    """Return lazily read tensors by name. `paths` maps tensor names to safetensors files."""
    files = {path: _open_safetensors(path) for path in sorted(set(paths.values()))}
    tensors = {name: StoredTensor(files[path], name, path) for name, path in paths.items()}
    for path, file in files.items():
        names = set(file.keys())
        for name, stored in (file.metadata() or {}).items():  # aliases of shared tensors
            if stored in names and name not in names:
                tensors[name] = StoredTensor(file, stored, path)
    return tensors


def estimate_bytes(folder: Path, dtype: torch.dtype) -> int:
    """Return the total size of all weights in bytes, stored as `dtype`. For PyTorch files, return a lower bound."""
    checkpoint = find_checkpoint(folder)
    paths = set(read_index(checkpoint).values()) if checkpoint.suffix == ".json" else {checkpoint}
    if "safetensors" not in checkpoint.name:
        return sum(path.stat().st_size for path in paths) * dtype.itemsize // torch.float32.itemsize
    count = 0
    for file in map(_open_safetensors, sorted(paths)):
        count += sum(math.prod(file.get_slice(name).get_shape()) for name in list(file.keys()))
    return count * dtype.itemsize


def _candidate_names(name: str) -> tuple[str, ...]:
    short = next((name.removeprefix(prefix) for prefix in OPTIONAL_PREFIXES if name.startswith(prefix)), None)
    return (name,) if short is None else (name, short)


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        reason = find_truncation(path) or f"not a readable safetensors file: {error}"
        raise WeightsError(f"{path}: {reason}") from error


def _load_pickles(paths: list[Path]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in paths:
        try:
            # Files written before torch 1.6 are not zip archives and cannot be mapped.
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
        except Exception as error:  # a damaged or malicious pickle may raise any exception
            raise WeightsError(f"{path}: cannot be loaded as plain tensors: {error}") from error
        if not isinstance(loaded, dict) or not all(_is_dense_tensor(value) for value in loaded.values()):
            raise WeightsError(f"{path}: is not a plain dictionary of tensors")
        tensors |= loaded
    return tensors


def _is_dense_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided
