"""Base class for quantized matrices in checkpoints, and the conversion of integers to `BlockMatrix`."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from lorax_server.errors import WeightsError
from lorax_server.kernels import BlockMatrix, QuantizedMatrix, ReorderedMatrix
from lorax_server.kernels.device import is_host
from lorax_server.kernels.quantized import MIN_BLOCK, PACKED_INPUTS, pack_4_bits
from lorax_server.quantization_config import QuantizationConfig

MAX_GPU_BLOCK = 128  # inputs per stored scale on a GPU
DECODE_CHUNK_ELEMENTS = 2**22  # matrix elements to decode at a time, to limit temporary memory
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e8m0fnu)
INDEX_DTYPES = (torch.int32, torch.int64)
NUM_4_BIT_LEVELS = 16
SCALE_BYTES = 4  # upper bound of a scale's size in a `BlockMatrix`

StoredPart = Any  # a `StoredTensor`, or a tensor in memory
ReadTensor = Callable[[StoredPart], torch.Tensor]  # reads a whole stored tensor


@dataclass(frozen=True)
class QuantizedTensor(ABC):
    """A quantized matrix `[outputs, inputs]` that is stored as several tensors."""

    main_part: ClassVar[str]  # suffix of the stored tensor that contains the values
    other_parts: ClassVar[Collection[str]]  # suffixes of stored tensors that are read too, if they exist
    ignored_parts: ClassVar[Collection[str]] = ()  # suffixes of stored tensors that do not change the weights

    parts: Mapping[str, StoredPart]  # stored tensors by suffix
    prefix: str  # module name with a trailing dot, for error messages
    config: QuantizationConfig
    read: ReadTensor

    @classmethod
    def is_main_part(cls, name: str, tensors: Mapping[str, StoredPart]) -> bool:  # noqa: ARG003 - used by subclasses
        """Return True if the name is that of the values of a quantized matrix in this format."""
        return name.endswith(f".{cls.main_part}")

    @property
    def main_shape(self) -> tuple[int, int]:
        """Return the shape of the values as they are stored."""
        shape = tuple(self.parts[self.main_part].shape)
        if len(shape) != 2 or min(shape) < 1:
            raise WeightsError(
                f"{self.path}: tensor {self.prefix + self.main_part!r} has shape {shape}, expected two positive numbers"
            )
        return int(shape[0]), int(shape[1])

    @classmethod
    def find_parts(cls, prefix: str, tensors: Mapping[str, StoredPart]) -> Sequence[str]:
        """Return the suffixes of all stored tensors of a matrix."""
        suffixes = (cls.main_part, *cls.other_parts, *cls.ignored_parts)
        return [suffix for suffix in suffixes if f"{prefix}{suffix}" in tensors]

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Return the shape of the matrix, `[outputs, inputs]`, which is also its shape in transformers."""

    @property
    @abstractmethod
    def format(self) -> str:
        """Return the name of the format for logs, such as `gptq-int4`."""

    @property
    def path(self) -> Path | str:
        return getattr(self.parts[self.main_part], "path", "tensors in memory")

    @property
    @abstractmethod
    def bits(self) -> int:
        """Return the number of bits of a value."""

    @property
    @abstractmethod
    def num_groups(self) -> int:
        """Return the number of scales per row, or 0 if the scales have a wrong shape or groups have different sizes."""

    @property
    def has_levels(self) -> bool:
        """Return True if the values are not integers."""
        return False

    @property
    def has_zeros(self) -> bool:
        """Return True if the integers have zero points other than 0."""
        return False

    def estimate_bytes(self, dtype: torch.dtype, device: torch.device) -> float:
        """Return the approximate size of the matrix in memory. `dtype` is the dtype of weights that are not quantized
        in memory.
        """
        count, block = math.prod(self.shape), find_block_size(self.shape[1], self.num_groups)
        if block is None or (self.has_levels and is_host(device)):
            return count * dtype.itemsize
        block = min(block, PACKED_INPUTS if is_host(device) else MAX_GPU_BLOCK)
        return count * (self.bits / 8 + SCALE_BYTES * (1 + self.has_zeros) / block)

    @abstractmethod
    def decode(self, parts: Mapping[str, torch.Tensor], rows: slice, dtype: torch.dtype) -> torch.Tensor | BlockMatrix:
        """Return matrix rows in `dtype`. `parts` contains the stored and the prepared tensors. If there is a prepared
        tensor `order`, the inputs are returned in this order.
        """

    def read_matrix(self, ranges: Sequence[tuple[int, int]], dtype: torch.dtype) -> torch.Tensor | QuantizedMatrix:
        """Return ranges of matrix rows. `dtype` is the dtype that the weights are converted to."""
        count = max(1, DECODE_CHUNK_ELEMENTS // self.shape[1])
        chunks = [slice(i, min(i + count, stop)) for start, stop in ranges for i in range(start, stop, count)]
        names = (self.main_part, *self.other_parts)
        parts = {name: self.read(self.parts[name]) for name in names if name in self.parts}
        self.check_parts(parts)
        parts |= self.prepare(parts)
        matrices = [self.decode(parts, rows, dtype) for rows in chunks or [slice(0, 0)]]
        blocks = [each for each in matrices if isinstance(each, BlockMatrix)]
        if len(blocks) == len(matrices):
            joined = BlockMatrix.concat(blocks)
            return ReorderedMatrix(joined, parts["order"]) if "order" in parts else joined
        return torch.cat([each.read() if isinstance(each, BlockMatrix) else each for each in matrices])

    @abstractmethod
    def check_parts(self, parts: Mapping[str, torch.Tensor]) -> None:
        """Raise `WeightsError` if a stored tensor has a wrong shape or dtype, or if a scale is not finite."""

    def prepare(self, parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:  # noqa: ARG002
        """Return tensors that `decode` needs for all rows, in addition to the stored tensors."""
        return {}

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        """Read and dequantize a slice."""
        rows, *others = index or (slice(None),)
        start, stop, _ = rows.indices(self.shape[0])
        matrix = self.read_matrix([(start, stop)], torch.float32)
        return (matrix.read() if isinstance(matrix, QuantizedMatrix) else matrix)[(slice(None), *others)]

    def is_converted(self, groups: Mapping[str, torch.Tensor]) -> bool:
        """Return True if a matrix with this result of `find_groups` is converted to floating point on one rank."""
        return "groups" in groups or ("order" in groups and ".experts." in self.prefix)

    def require_part(self, name: str) -> StoredPart:
        if name not in self.parts:
            raise WeightsError(f"{self.path}: tensor {self.prefix + name!r} is missing, but the matrix is quantized")
        return self.parts[name]

    def check_part(
        self, parts: Mapping[str, torch.Tensor], name: str, shape: Sequence[int], dtypes: Collection[torch.dtype]
    ) -> None:
        tensor = parts[name]
        if tuple(tensor.shape) != tuple(shape) or tensor.dtype not in dtypes:
            raise WeightsError(
                f"{self.path}: tensor {self.prefix + name!r} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}, "
                f"expected {tuple(shape)} and {' or '.join(map(str, dtypes))}"
            )

    def check_groups(self) -> None:
        """Raise `WeightsError` if the inputs cannot be divided into groups of the same size."""
        if not self.num_groups or self.shape[1] % self.num_groups:
            raise WeightsError(
                f"{self.path}: tensor {self.prefix + self.main_part!r} has {self.shape[1]} inputs, which cannot be "
                f"divided into {self.num_groups} groups"
            )

    def check_scales(self, parts: Mapping[str, torch.Tensor], name: str, shape: Sequence[int]) -> None:
        """Check the shape of scales, and that they are finite."""
        self.check_part(parts, name, shape, SCALE_DTYPES)
        if not bool(parts[name].float().isfinite().all()):
            raise WeightsError(
                f"{self.path}: tensor {self.prefix + name!r} contains scales that are not finite numbers"
            )


def find_block_size(inputs: int, num_groups: int) -> int | None:
    """Return the largest block size of `BlockMatrix` that divides all groups, or None."""
    if inputs % PACKED_INPUTS or not num_groups or inputs % num_groups:
        return None
    group = inputs // num_groups
    return group if group % PACKED_INPUTS == 0 else None if group % MIN_BLOCK else MIN_BLOCK


def find_groups(groups: torch.Tensor, inputs: int, num_groups: int) -> dict[str, torch.Tensor]:
    """Return `{"order": order}` with an order of the inputs in which groups are consecutive blocks of the same size, or
    `{"groups": groups}` if there is no such order. `groups` contains the group of each input. If groups are already
    consecutive, return an empty dictionary.
    """
    consecutive = torch.arange(inputs, device=groups.device) * num_groups // inputs
    if torch.equal(groups.long(), consecutive):
        return {}
    if groups.shape == (inputs,) and find_block_size(inputs, num_groups) is not None:
        order = groups.argsort(stable=True)
        if torch.equal(groups[order].long(), consecutive):
            return {"order": order}
    return {"groups": groups}


def make_integer_matrix(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bits: int, dtype: torch.dtype
) -> torch.Tensor | BlockMatrix:
    """Return the matrix `(values - zeros) * scales`. It is a tensor if the groups do not consist of whole blocks.

    `values` is int8 `[outputs, inputs]`, from -8 to 7 for 4 bits. `scales` and `zeros` (int8) are `[outputs, groups]`.
    """
    inputs, num_groups = values.shape[1], scales.shape[1]
    block = find_block_size(inputs, num_groups)
    if block is None:
        return dequantize_groups(values, scales, zeros, torch.arange(inputs) * num_groups // inputs).to(dtype)
    repeats = inputs // num_groups // block
    offsets = None
    if zeros is not None:
        steps = zeros.float() + (8 if bits == 4 else 0)  # `BlockMatrix` counts 4-bit values with offsets from 0
        offsets = (-steps * scales.float()).repeat_interleave(repeats, dim=1)
    scales = scales if scales.dtype == torch.float16 else scales.float()
    packed = _copy(values) if bits == 8 else pack_4_bits((values + 8).view(torch.uint8))
    return BlockMatrix(packed, scales.repeat_interleave(repeats, dim=1), offsets, bits, dtype)


def make_level_matrix(
    indices: torch.Tensor, scales: torch.Tensor, levels: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor | BlockMatrix:
    """Return the matrix `levels[indices] * scales`. It is a tensor if the groups do not consist of whole blocks.

    `indices` is uint8 `[outputs, inputs]`, `scales` is float32 `[outputs, groups]`, and `levels` has 16 or 256 numbers.
    """
    inputs, num_groups = indices.shape[1], scales.shape[1]
    block = find_block_size(inputs, num_groups)
    if block is None:
        groups = torch.arange(inputs) * num_groups // inputs
        return dequantize_groups(levels[indices.int()], scales, None, groups).to(dtype)
    bits = 4 if len(levels) == NUM_4_BIT_LEVELS else 8
    packed = _copy(indices) if bits == 8 else pack_4_bits(indices)
    repeats = inputs // num_groups // block
    return BlockMatrix(packed, scales.repeat_interleave(repeats, dim=1), None, bits, dtype, levels)


def dequantize_groups(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, groups: torch.Tensor
) -> torch.Tensor:
    """Return `(values - zeros) * scales` in float32. `groups` contains the group of each input."""
    groups = groups.to(values.device, torch.int64)
    whole = values.float() if zeros is None else values.float() - zeros.float()[:, groups]
    return whole * scales.float()[:, groups]


def _copy(values: torch.Tensor) -> torch.Tensor:
    """Return a copy, because a view would keep the whole stored tensor in memory."""
    return values.clone(memory_format=torch.contiguous_format)


def keep_nonzero(zeros: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return `{"zeros": zeros}`, or an empty dictionary if all zero points are 0."""
    return {"zeros": zeros} if bool(zeros.any()) else {}


def select_rows(tensor: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
    return None if tensor is None else tensor[rows]


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack int32 words `[rows, n]` to unsigned integers, uint8 `[rows, n * 32 / bits]`, the lowest bits first."""
    packed = words.contiguous().view(torch.uint8)
    if bits == 8:
        return packed
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)


def to_signed(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Convert unsigned integers (uint8) to int8 by subtracting half of their range."""
    return (values ^ 128).view(torch.int8) if bits == 8 else values.view(torch.int8) - 8
