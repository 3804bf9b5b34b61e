"""Finds the checkpoint files in a model folder and loads tensors from them."""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NotRequired, Self, TypedDict, Unpack
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open

from lorax_server.distributed import ProcessGroup, Shard
from lorax_server.errors import ConfigError, WeightsError
from lorax_server.files.model_files import find_checkpoint, find_truncation, read_index
from lorax_server.files.names import GGUF_FILE_LIST, MODEL_CONFIG_FILE
from lorax_server.gguf.architectures import map_tensors
from lorax_server.gguf.container import read_gguf
from lorax_server.gguf.model_folder import read_file_list
from lorax_server.kernels import (
    BlockMatrix,
    Ops,
    QuantizedMatrix,
    ReorderedMatrix,
    quantize_blocks,
    quantize_float8,
)
from lorax_server.kernels.device import is_host
from lorax_server.quantization_config import LOADED_BYTES, QuantizationConfig
from lorax_server.weights.gguf import GGUFTensor
from lorax_server.weights.progress import LoadProgress
from lorax_server.weights.quantized import QuantizedTensor, group_tensors
from lorax_server.weights.quantized.bitsandbytes import ROUNDING_BLOCK, round_to_4_bits
from lorax_server.weights.reader import STORED_DTYPES, WeightsReader

# Checkpoints saved from the inner model (without LM head) lack these tensor name prefixes.
OPTIONAL_PREFIXES = (
    *("model.", "transformer.", "gpt_neox.", "bert.", "roberta.", "distilbert.", "mpnet.", "nomic_bert."),
)
# Parts of module names that transformers 5 renamed, with the names in most published checkpoints.
RENAMED_PARTS = (
    (".mlp.", ".block_sparse_moe."),
    (".block_sparse_moe.experts.gate_up_proj", ".block_sparse_moe.input_linear.weight"),
    (".block_sparse_moe.experts.down_proj", ".block_sparse_moe.output_linear.weight"),
    (".block_sparse_moe.router.weight", ".block_sparse_moe.router.layer.weight"),
)
# NomicBERT's module names in checkpoints, which transformers keeps when it saves a model, and in transformers.
NOMIC_BERT_PARTS = (
    ("encoder.layers.", "layers."),
    ("emb_ln.", "embeddings.LayerNorm."),
    (".attn.out_proj.", ".self_attn.o_proj."),
    (".fc11.", ".up_proj."),
    (".fc12.", ".gate_proj."),
    (".fc2.", ".down_proj."),
    (".norm1.", ".post_attention_layernorm."),
    (".norm2.", ".post_mlp_layernorm."),
)
FUSED_QKV, QKV_NAMES = ".attn.Wqkv.", ("q_proj", "k_proj", "v_proj")

QUANTIZE_CHUNK_ELEMENTS = 2**20  # matrix elements to quantize at a time, to limit temporary memory
QUANTIZATION_BLOCK_SIZE = 32  # inputs per scale in matrices that are quantized here
# Parts of the names of embeddings and LM heads.
VOCABULARY_PARTS = ("embed", "lm_head", "wte.", "wpe.")
LINEAR_BITS = 4  # `min_bits` of linear layers. Only these are rounded to floats of 4 or 8 bits.


class Placement(TypedDict):
    """The device, dtype and rank that a model's tensors are loaded for."""

    device: torch.device
    dtype: torch.dtype
    process_group: ProcessGroup
    ops: Ops
    progress: NotRequired[LoadProgress]  # logs the bytes loaded
    quantize_bits: NotRequired[int | None]  # quantize matrices of float checkpoints to 4 or 8 bits
    rounded_format: NotRequired[str | None]  # a value of `ROUNDED_FORMATS`, for linear layers of float checkpoints


class Weights:
    """Provides a checkpoint's tensors by name, in the modules' dtype, on their device, and sharded for their rank."""

    def __init__(
        self,
        tensors: Mapping[str, "torch.Tensor | StoredTensor | TensorRows | GGUFTensor | QuantizedTensor"],
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
        self._quantize_bits = placement.get("quantize_bits")
        self._rounded_format = placement.get("rounded_format")
        self._used: set[str] = set()  # names of the tensors that modules requested
        self._quantized_bytes: Counter[str] = Counter()  # bytes of matrices by format in memory and in the checkpoint

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._reader is not None:
            self._reader.close()

    def _read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        stored = self._tensors[name]
        if self._reader is None or not isinstance(stored, StoredTensor):
            return stored[index]
        return stored.read(self._reader, index)

    def location(self, name: str) -> str:
        """Return the path of the file that contains a tensor, for error messages."""
        stored = self._tensors.get(name)
        stored = stored.stored if isinstance(stored, TensorRows) else stored
        return str(stored.path) if isinstance(stored, StoredTensor | GGUFTensor | QuantizedTensor) else self._source

    def has(self, name: str) -> bool:
        return any(candidate in self._tensors for candidate in _candidate_names(name))

    def get_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[self._resolve(name)].shape)

    def get_tensor(
        self, name: str, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return an unsharded tensor in `dtype` (default: the model's dtype) and on the model's device.

        On CPUs the tensor is copied, because a view would keep the whole mapped file in memory.
        """
        tensor = self.convert(self._load(self._resolve(name), shape, ()), dtype)
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
        return self.convert(self._load_sharded(self._resolve(name), dim, shard, shape))

    def get_matrix(
        self,
        name: str,
        outputs: Shard,
        inputs: Shard,
        *,
        fan_in_fan_out: bool = False,
        min_bits: int = 4,
        can_reorder: bool = False,
    ) -> torch.Tensor | QuantizedMatrix:
        """Return this rank's shard of a matrix `[outputs, inputs]`. At most one dimension is sharded.

        Quantized matrices stay quantized if the ops have kernels for them. With `fan_in_fan_out`, float checkpoints
        contain `[inputs, outputs]`.
        `min_bits` is the lowest precision if the matrix is quantized here. With `can_reorder`, the result can be a
        `ReorderedMatrix`. Otherwise, such matrices are converted to tensors.
        """
        name = self._resolve(name)
        stored, bits = self._tensors[name], self._quantize_bits
        matrix: torch.Tensor | QuantizedMatrix
        if isinstance(stored, GGUFTensor | QuantizedTensor):
            self._check_shape(name, (outputs.full, inputs.full))
            matrix = _shard_matrix(name, stored.read_matrix(outputs.ranges, self.dtype), outputs, inputs)
            if isinstance(matrix, ReorderedMatrix) and not can_reorder:
                matrix = matrix.read()
        else:
            shape = (inputs.full, outputs.full) if fan_in_fan_out else (outputs.full, inputs.full)
            dim, shard = (0, outputs) if inputs.is_whole else (1, inputs)
            matrix = self._load_sharded(name, 1 - dim if fan_in_fan_out else dim, shard, shape)
            matrix = matrix.t() if fan_in_fan_out else matrix
            if self._rounded_format is not None and min_bits <= LINEAR_BITS:
                _check_rounding_blocks(name, outputs, inputs)
        if isinstance(matrix, QuantizedMatrix) or isinstance(stored, QuantizedTensor):
            assert isinstance(stored, GGUFTensor | QuantizedTensor)
            if bits is not None or self._rounded_format is not None:
                method = self._rounded_format or f"int{bits}"
                raise ConfigError(
                    f"the weights cannot be quantized to {method}: tensor {name!r} is stored as {stored.format}; "
                    "omit `quantize`"
                )
            return self._place_matrix(matrix, stored.format)
        return self.convert_matrix(matrix, min_bits)

    def get_expert_matrix(
        self, name: str, expert: int, count: int, outputs: Shard, inputs: Shard
    ) -> torch.Tensor | QuantizedMatrix:
        """Return this rank's shard of one expert's matrix from a tensor `[count, outputs, inputs]`."""
        name = self._resolve(name)
        shape, dim = (count, outputs.full, inputs.full), 1 if inputs.is_whole else 2
        if self._rounded_format is not None:
            _check_rounding_blocks(name, outputs, inputs)
        before = (slice(expert, expert + 1), *(slice(None),) * (dim - 1))
        ranges = (outputs if inputs.is_whole else inputs).ranges
        pieces = [self._load(name, shape, (*before, slice(start, stop))) for start, stop in ranges]
        return self.convert_matrix((pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=dim))[0])

    def get_expert(self, name: str, expert: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Return one expert's part of a tensor `[experts, *shape]`, unsharded and in its stored dtype."""
        name = self._resolve(name)
        self._check_shape(name, (self._tensors[name].shape[0], *shape))
        return self._read(name, (slice(expert, expert + 1),))[0]

    @property
    def quantized_format(self) -> str:
        """Return the formats of the matrices that are quantized in memory or in the checkpoint, starting with the
        format that uses the most bytes, or an empty string.
        """
        return ", ".join(name for name, _ in self._quantized_bytes.most_common())

    def check_all_used(self) -> None:
        """Raise WeightsError if a GGUF file has a tensor that the model did not use, because results may be wrong."""
        for name, stored in self._tensors.items():
            if isinstance(stored, GGUFTensor) and name not in self._used:
                raise WeightsError(f"{stored.path}: the model does not support tensor {name!r}")

    def _load_sharded(self, name: str, dim: int, shard: Shard, shape: tuple[int, ...] | None) -> torch.Tensor:
        if shard.is_whole:
            return self._load(name, shape, ())
        before = (slice(None),) * dim
        pieces = [self._load(name, shape, (*before, slice(start, stop))) for start, stop in shard.ranges]
        return shard.reorder(pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=dim), dim)

    def _load(self, name: str, shape: tuple[int, ...] | None, index: tuple[slice, ...]) -> torch.Tensor:
        """Return a tensor in its stored dtype."""
        self._check_shape(name, shape)
        tensor = self._read(name, index)
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            # Float8 tensors would need their scales.
            raise WeightsError(
                f"{self.location(name)}: tensor {name!r} is {tensor.dtype}; only float16 to float64 are supported"
            )
        return tensor

    def _check_shape(self, name: str, shape: tuple[int, ...] | None) -> None:
        stored = tuple(self._tensors[name].shape)
        if shape is not None and stored != shape:
            raise WeightsError(f"{self.location(name)}: tensor {name!r} has shape {stored}, expected {shape}")

    def convert(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a tensor in the model's dtype (or `dtype`) and on its device."""
        converted = tensor.to(device=self.device, dtype=dtype or self.dtype)
        if self._progress is not None:
            self._progress.add(converted.nbytes)
        return converted

    def convert_matrix(self, matrix: torch.Tensor, min_bits: int = 4) -> torch.Tensor | QuantizedMatrix:
        """Return a loaded matrix in the model's dtype or, if the model is quantized, in blocks."""
        if self._rounded_format is not None and min_bits <= LINEAR_BITS:
            return self._place_matrix(self._round(matrix, self._rounded_format), self._rounded_format)
        if self._quantize_bits is None or matrix.shape[1] % QUANTIZATION_BLOCK_SIZE:
            return self.convert(matrix)
        bits = max(self._quantize_bits, min_bits)
        return self._place_matrix(self._quantize(matrix, bits), f"int{bits}")

    def _place_matrix(self, matrix: torch.Tensor | QuantizedMatrix, label: str) -> torch.Tensor | QuantizedMatrix:
        """Return a matrix on the model's device. It is converted to a tensor if the ops have no kernels for it."""
        if isinstance(matrix, torch.Tensor) or not self.ops.keeps_quantized(matrix):
            weight = self.convert(matrix if isinstance(matrix, torch.Tensor) else matrix.read())
            self._quantized_bytes[f"{str(self.dtype).removeprefix('torch.')} from {label}"] += weight.nbytes
            return weight
        matrix = matrix.to(self.device)
        num_bytes = sum(tensor.nbytes for tensor in matrix.tensors)
        self._quantized_bytes[label] += num_bytes
        if self._progress is not None:
            self._progress.add(num_bytes)
        return matrix

    def _quantize(self, matrix: torch.Tensor, bits: int) -> BlockMatrix:
        return self._convert_chunks(matrix, lambda rows: quantize_blocks(rows, bits, QUANTIZATION_BLOCK_SIZE))

    def _round(self, matrix: torch.Tensor, rounded_format: str) -> torch.Tensor | BlockMatrix:
        is_dynamic = rounded_format == "fp8-dynamic"
        if rounded_format != "fp8" and not is_dynamic:
            return round_to_4_bits(matrix, rounded_format, self.dtype)
        if matrix.shape[1] % ROUNDING_BLOCK:
            raise ConfigError(
                f"the weights cannot be rounded to {rounded_format}: a matrix has {matrix.shape[1]} inputs, which is "
                f"not a multiple of {ROUNDING_BLOCK}"
            )
        block = matrix.shape[1] if is_dynamic else ROUNDING_BLOCK
        rounded = self._convert_chunks(matrix, lambda rows: quantize_float8(rows, block))
        return replace(rounded, rounds_inputs=is_dynamic)

    def _convert_chunks(self, matrix: torch.Tensor, convert: Callable[[torch.Tensor], BlockMatrix]) -> BlockMatrix:
        """Convert a matrix to a format without offsets, in chunks of rows to limit temporary memory."""
        count, whole = max(1, QUANTIZE_CHUNK_ELEMENTS // matrix.shape[1]), None
        for start in range(0, max(1, len(matrix)), count):
            chunk = convert(matrix[start : start + count].to(self.dtype).contiguous())
            if whole is None:
                values, scales = (each.new_empty(len(matrix), each.shape[1]) for each in (chunk.values, chunk.scales))
                whole = replace(chunk, values=values, scales=scales)
            whole.values[start : start + count] = chunk.values
            whole.scales[start : start + count] = chunk.scales
        assert whole is not None
        return whole

    def _resolve(self, name: str) -> str:
        for candidate in _candidate_names(name):
            if candidate in self._tensors:
                self._used.add(candidate)
                return candidate
        raise WeightsError(f"{self.location(name)}: tensor {name!r} is missing")


def _shard_matrix(
    name: str, matrix: torch.Tensor | QuantizedMatrix, outputs: Shard, inputs: Shard
) -> torch.Tensor | QuantizedMatrix:
    """Return a rank's shard of a matrix, given the rows in `outputs.ranges`."""
    if outputs.interleaved is not None:
        order = outputs.reorder(torch.arange(outputs.size), dim=0)
        matrix = matrix[order] if isinstance(matrix, torch.Tensor) else matrix.select_rows(order)
    if inputs.is_whole:
        return matrix
    ((start, stop),) = inputs.ranges
    if isinstance(matrix, ReorderedMatrix):
        matrix = matrix.read()  # this rank's inputs are parts of all groups
    if isinstance(matrix, torch.Tensor):
        return matrix[:, start:stop]
    try:
        return matrix.select_inputs(start, stop)
    except ValueError as error:
        raise ConfigError(f"tensor {name!r} cannot be split over several ranks: {error}; use fewer ranks") from error


def _check_rounding_blocks(name: str, outputs: Shard, inputs: Shard) -> None:
    """Raise an error if a shard boundary splits a block, because all ranks must round in the same way."""
    is_split = not inputs.is_whole and any(edge % ROUNDING_BLOCK for edges in inputs.ranges for edge in edges)
    if is_split or (not outputs.is_whole and inputs.full % ROUNDING_BLOCK):
        raise ConfigError(
            f"tensor {name!r} cannot be rounded on several ranks, because a shard boundary splits a block of "
            f"{ROUNDING_BLOCK} weights; use fewer ranks"
        )


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file. Indexing reads only the selected elements."""

    file: Any
    name: str
    path: Path

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._slice().get_shape())

    @property
    def dtype(self) -> torch.dtype | None:
        """Return the stored dtype, or None for dtypes that torch does not have."""
        return STORED_DTYPES.get(self._slice().get_dtype())

    def read(self, reader: WeightsReader, index: tuple[slice, ...]) -> torch.Tensor:
        """Read the selected elements to the reader's device."""
        return reader.read(self.path, self.name, self.shape, index)

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


@dataclass(frozen=True)
class TensorRows:
    """Consecutive rows of a stored tensor, for a model that loads parts of a fused matrix separately."""

    stored: torch.Tensor | StoredTensor
    start: int
    count: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.count, *self.stored.shape[1:])

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        rows, *others = index or (slice(None),)
        start, stop, _ = rows.indices(self.count)
        return self.stored[slice(self.start + start, self.start + stop), *others]


def open_weights(
    folder: Path, quantization: QuantizationConfig | None = None, **placement: Unpack[Placement]
) -> Weights:
    """Return the weights in a model folder, from GGUF files, safetensors files or, as a fallback, PyTorch files.

    `quantization` describes the quantized matrices in safetensors and PyTorch files.
    """
    checkpoint = find_checkpoint(folder)
    if checkpoint.name == GGUF_FILE_LIST:
        return Weights(_open_gguf(folder), source=str(checkpoint), **placement)
    is_index = checkpoint.suffix == ".json"
    paths = read_index(checkpoint) if is_index else {}
    tensors: Mapping[str, torch.Tensor | StoredTensor]
    reader = None
    if "safetensors" in checkpoint.name:
        tensors = open_tensors(paths) if is_index else open_file(checkpoint)
        reader = WeightsReader(placement["device"]) if placement["device"].type == "cuda" else None
    else:
        tensors = _load_pickles(sorted(set(paths.values())) if is_index else [checkpoint])
    if quantization is not None:
        grouped = group_tensors(tensors, quantization, partial(_read_part, reader))
        return Weights(grouped, source=str(checkpoint), reader=reader, **placement)
    return Weights(_rename_nomic_bert(tensors), source=str(checkpoint), reader=reader, **placement)


def _read_part(reader: WeightsReader | None, stored: torch.Tensor | StoredTensor) -> torch.Tensor:
    """Read a whole tensor in its stored dtype."""
    return stored[()] if reader is None or isinstance(stored, torch.Tensor) else stored.read(reader, ())


def _rename_nomic_bert(
    tensors: Mapping[str, torch.Tensor | StoredTensor],
) -> dict[str, torch.Tensor | StoredTensor | TensorRows]:
    """Return the tensors with transformers' names if they belong to NomicBERT, with separate Q, K and V matrices."""
    if not any(name.endswith("emb_ln.weight") for name in tensors):
        return dict(tensors)
    renamed: dict[str, torch.Tensor | StoredTensor | TensorRows] = {}
    for old_name, stored in tensors.items():
        name = old_name
        for old, new in NOMIC_BERT_PARTS:
            name = name.replace(old, new)
        if FUSED_QKV not in name:
            renamed[name] = stored
            continue
        count = stored.shape[0] // len(QKV_NAMES)
        for i, part in enumerate(QKV_NAMES):
            renamed[name.replace(FUSED_QKV, f".self_attn.{part}.")] = TensorRows(stored, i * count, count)
    return renamed


def _open_gguf(folder: Path) -> dict[str, GGUFTensor]:
    config = json.loads((folder / MODEL_CONFIG_FILE).read_text())
    sources = map_tensors(read_gguf(read_file_list(folder)[0]), config)
    return {name: GGUFTensor(source) for name, source in sources.items()}


def open_file(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors in a safetensors file. They are read lazily."""
    return open_tensors(dict.fromkeys(_open_safetensors(path).keys(), path))


def open_tensors(paths: Mapping[str, Path]) -> dict[str, StoredTensor]:
    """Return a map from tensor name to a lazily read tensor. `paths` maps tensor names to safetensors files."""
    files = {path: _open_safetensors(path) for path in sorted(set(paths.values()))}
    tensors = {name: StoredTensor(files[path], name, path) for name, path in paths.items()}
    for path, file in files.items():
        names = set(file.keys())
        for name, stored in (file.metadata() or {}).items():  # aliases of shared tensors
            if stored in names and name not in names:
                tensors[name] = StoredTensor(file, stored, path)
    return tensors


def estimate_bytes(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    quantize: str | None = None,
    quantization: QuantizationConfig | None = None,
) -> int:
    """Return the approximate size of all weights in bytes, on a device. For PyTorch files, return a lower bound.

    `quantize` is the format that linear layers are quantized to while loading, and `quantization` the format of a
    quantized checkpoint.
    """
    checkpoint = find_checkpoint(folder)
    if checkpoint.name == GGUF_FILE_LIST:
        if is_host(device):
            return sum(path.stat().st_size for path in read_file_list(folder))
        return int(sum(stored.estimate_bytes(dtype) for stored in _open_gguf(folder).values()))
    paths = read_index(checkpoint) if checkpoint.suffix == ".json" else {}
    if "safetensors" not in checkpoint.name:
        num_bytes = sum(path.stat().st_size for path in set(paths.values()) or {checkpoint})
        return num_bytes if quantization else num_bytes // torch.float32.itemsize * dtype.itemsize
    tensors: Mapping[str, StoredTensor | QuantizedTensor]
    tensors = open_tensors(paths) if paths else open_file(checkpoint)
    if quantization is not None:
        tensors = group_tensors(tensors, quantization, partial(_read_part, None))
    is_kept = quantize in ("int8", "int4") or not is_host(device)  # CPUs store the other formats in floating point
    linear_bytes = LOADED_BYTES[quantize] if quantize is not None and is_kept else dtype.itemsize
    vocab_bytes = LOADED_BYTES["int8"] if quantize in ("int8", "int4") else dtype.itemsize
    total = 0.0
    for name, stored in tensors.items():
        if isinstance(stored, QuantizedTensor):
            total += stored.estimate_bytes(dtype, device)
        elif len(stored.shape) < 2:
            total += math.prod(stored.shape) * dtype.itemsize
        else:
            is_vocab = any(part in name for part in VOCABULARY_PARTS)
            total += math.prod(stored.shape) * (vocab_bytes if is_vocab else linear_bytes)
    return int(total)


def _candidate_names(name: str) -> tuple[str, ...]:
    names = (name, *(name.replace(new, old) for new, old in RENAMED_PARTS if new in name))
    short = (one.removeprefix(prefix) for one in names for prefix in OPTIONAL_PREFIXES if one.startswith(prefix))
    return (*names, *short)


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
