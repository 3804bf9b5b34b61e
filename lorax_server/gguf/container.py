"""Parses GGUF headers, which contain the metadata and the location of each tensor.

Files are untrusted. All counts, lengths and offsets are checked against the file size before memory is allocated.
"""

import math
import os
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np

from lorax_server.errors import WeightsError

MAGIC = int.from_bytes(b"GGUF", "little")
READ_CHUNK_BYTES = 2**20
MAX_HEADER_BYTES = 2**27  # metadata with a vocabulary of 256k tokens has 2**24 bytes
MAX_ARRAY_LENGTH = 2**21
MAX_ENTRIES = 2**16  # metadata fields, and tensors
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 1024
MAX_ALIGNMENT = 2**20
MAX_FILES = 1000  # parts of a model that is split into several files
DEFAULT_ALIGNMENT = 32
SUPPORTED_VERSIONS = (2, 3)
ALIGNMENT_KEY = "general.alignment"
SPLIT_COUNT_KEY = "split.count"
SPLIT_NAME_PATTERN = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")

_UINT32, _UINT64 = struct.Struct("<I"), struct.Struct("<Q")
_STRING_TYPE, _ARRAY_TYPE = 8, 9
_SCALAR_DTYPES = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
T = TypeVar("T")


class TensorType(NamedTuple):
    """A tensor type. Rows consist of blocks, which store `block` elements in `num_bytes` bytes."""

    name: str
    block: int
    num_bytes: int


TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    20: TensorType("IQ4_NL", 32, 18),
    23: TensorType("IQ4_XS", 256, 136),
    30: TensorType("BF16", 1, 2),
}


class TensorEntry(NamedTuple):
    """The type, shape (outputs before inputs) and location of a tensor."""

    type: TensorType
    shape: tuple[int, ...]
    path: Path
    start: int  # byte offset in the file

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.type.block * self.type.num_bytes

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True)
class GGUFFile:
    """The header of a GGUF file, or of a model that is split into several files."""

    path: Path  # the first file
    metadata: Mapping[str, Any] = field(repr=False)
    tensors: Mapping[str, TensorEntry] = field(repr=False)

    def get(self, key: str, kind: type[T]) -> T | None:
        """Return a metadata value, or None if the key is missing. Raise WeightsError if the value has another type."""
        value = self.metadata.get(key)
        if kind is float and type(value) is int:
            value = float(value)
        if value is not None and type(value) is not kind:
            raise self.error(f"metadata field {key} = {str(value)[:40]} is not of type {kind.__name__}")
        return value

    def require(self, key: str, kind: type[T]) -> T:
        value = self.get(key, kind)
        if value is None:
            raise self.error(f"metadata field {key} is missing")
        return value

    def get_list(self, key: str, kind: type[T], length: int | None = None) -> list[T]:
        """Return a metadata array, or an empty list if the key is missing."""
        value = self.metadata.get(key)
        if value is None:
            return []
        items = value.tolist() if isinstance(value, np.ndarray) else value
        if not isinstance(items, list) or not all(type(item) is kind for item in items[:1]):
            raise self.error(f"metadata field {key} is not a list of {kind.__name__}")
        if length is not None and len(items) != length:
            raise self.error(f"metadata field {key} has {len(items)} entries, expected {length}")
        return items

    def error(self, reason: str) -> WeightsError:
        return WeightsError(f"{self.path}: {reason}")


def read_gguf(path: Path) -> GGUFFile:
    """Read the header of a GGUF file. For a split model, `path` is any of its files, and all headers are read."""
    paths = find_parts(path)
    parts = [_read_part(part) for part in paths]
    first = parts[0]
    count = first.metadata.get(SPLIT_COUNT_KEY, 1)
    if count != len(parts) and not (count == 0 and len(parts) == 1):
        raise first.error(
            f"the file is part of {count} files, which must be named NAME-00001-of-{count:05}.gguf and so on"
        )
    tensors: dict[str, TensorEntry] = {}
    for part in parts:
        if repeated := tensors.keys() & part.tensors.keys():
            raise part.error(f"tensor {min(repeated)!r} is also in another file of the model")
        tensors |= part.tensors
    return GGUFFile(first.path, first.metadata, tensors)


def find_parts(path: Path) -> list[Path]:
    """Return all files of a split model, given one of them. For other files, return the file itself."""
    match = SPLIT_NAME_PATTERN.fullmatch(path.name)
    if match is None:
        return [path]
    stem, count = match[1], int(match[3])
    if not 1 <= count <= MAX_FILES:
        raise WeightsError(f"{path}: a model may have 1 to {MAX_FILES} files (got {count})")
    paths = [path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    missing = [each for each in paths if not each.is_file()]
    if missing:
        raise WeightsError(f"{missing[0]}: the file is missing; the model consists of {count} files")
    return paths


def _read_part(path: Path) -> GGUFFile:
    try:
        with path.open("rb") as file:
            return _Parser(path, file).parse()
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror}") from error


class _Parser:
    """Parses one file's header."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        self._header = b""  # the part of the header that was read
        self._position = 0

    def parse(self) -> GGUFFile:
        if self._size < 4 or self._read_number(_UINT32) != MAGIC:
            raise self._error("not a GGUF file")
        version = self._read_number(_UINT32)
        if version not in SUPPORTED_VERSIONS:
            is_big_endian = version & 0xFFFF == 0
            raise self._error(
                f"has GGUF version {version}{' (big-endian)' * is_big_endian}; only versions 2 and 3 are supported"
            )
        num_tensors, num_fields = self._read_number(_UINT64), self._read_number(_UINT64)
        if max(num_tensors, num_fields) > MAX_ENTRIES:
            raise self._error(
                f"has {num_tensors} tensors and {num_fields} metadata fields; at most {MAX_ENTRIES} are allowed"
            )
        metadata = self._read_table("metadata field", num_fields, lambda: self._read_value(self._read_number(_UINT32)))
        entries = self._read_table("tensor", num_tensors, self._read_tensor)
        alignment = metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment % 8:
            raise self._error(f"{ALIGNMENT_KEY} = {str(alignment)[:40]} is not a multiple of 8 up to {MAX_ALIGNMENT}")
        start = -(-self._position // alignment) * alignment
        tensors = {name: entry._replace(start=start + entry.start) for name, entry in entries.items()}
        self._check_layout(tensors, start, alignment)
        return GGUFFile(self._path, metadata, tensors)

    def _read_table(self, label: str, count: int, read: Callable[[], T]) -> dict[str, T]:
        table: dict[str, T] = {}
        for _ in range(count):
            name = self._read_string(MAX_NAME_BYTES)
            if not name.isprintable():
                raise self._error(f"{label} {name[:40]!r} has an invalid name")
            if name in table:
                raise self._error(f"{label} {name!r} is duplicated")
            table[name] = read()
        return table

    def _read_tensor(self) -> TensorEntry:
        """Read a tensor entry. Its offset is relative to the tensor data."""
        count = self._read_number(_UINT32)
        if not 1 <= count <= MAX_DIMENSIONS:
            raise self._error(f"a tensor has {count} dimensions; 1 to {MAX_DIMENSIONS} are allowed")
        shape = tuple(self._read_number(_UINT64) for _ in range(count))[::-1]
        number, start = self._read_number(_UINT32), self._read_number(_UINT64)
        if number not in TENSOR_TYPES:
            names = ", ".join(each.name for each in TENSOR_TYPES.values())
            raise self._error(f"a tensor has type {number}, which is not supported; supported types are {names}")
        kind = TENSOR_TYPES[number]
        if not all(0 < size <= 2**40 for size in shape) or shape[-1] % kind.block:
            raise self._error(
                f"a {kind.name} tensor has shape {shape}, but its rows must consist of whole blocks of {kind.block}"
            )
        return TensorEntry(kind, shape, self._path, start)

    def _check_layout(self, tensors: Mapping[str, TensorEntry], start: int, alignment: int) -> None:
        """Reject tensors that are misaligned, overlap, or extend beyond the end of the file."""
        end = start
        for name, entry in sorted(tensors.items(), key=lambda item: item[1].start):
            if (entry.start - start) % alignment:
                raise self._error(f"tensor {name!r} is not aligned to {alignment} bytes")
            if entry.start < end:
                raise self._error(f"tensor {name!r} overlaps another tensor")
            end = entry.start + entry.num_bytes
            if end > self._size:
                raise self._error(
                    f"tensor {name!r} ends at byte {end}, but the file has only {self._size} bytes; it may be truncated"
                )

    def _read_value(self, kind: int) -> Any:
        if kind == _STRING_TYPE:
            return self._read_string()
        if kind == _ARRAY_TYPE:
            return self._read_array()
        return self._read_scalars(kind, 1).item()

    def _read_array(self) -> Any:
        """Read an array: a list of strings, or a NumPy array of numbers."""
        kind, count = self._read_number(_UINT32), self._read_number(_UINT64)
        if count > MAX_ARRAY_LENGTH:
            raise self._error(f"a metadata array has {count} entries; at most {MAX_ARRAY_LENGTH} are allowed")
        if kind == _STRING_TYPE:
            return [self._read_string() for _ in range(count)]
        return self._read_scalars(kind, count)

    def _read_scalars(self, kind: int, count: int) -> Any:
        if kind not in _SCALAR_DTYPES:
            raise self._error(f"a metadata value has type {kind}, which is not supported")
        dtype = np.dtype(_SCALAR_DTYPES[kind])
        start = self._advance(count * dtype.itemsize)
        return np.frombuffer(self._header, dtype, count, start)

    def _read_string(self, limit: int = MAX_HEADER_BYTES) -> str:
        length = self._read_number(_UINT64)
        if length > limit:
            raise self._error(f"a text in the header has {length} bytes; at most {limit} are allowed")
        start = self._advance(length)
        try:
            return self._header[start : self._position].decode()
        except UnicodeDecodeError as error:
            raise self._error("a text in the header is not UTF-8") from error

    def _read_number(self, layout: struct.Struct) -> int:
        start = self._advance(layout.size)
        number: int = layout.unpack_from(self._header, start)[0]
        return number

    def _advance(self, count: int) -> int:
        """Move the position forward by `count` bytes, which are read if necessary. Return the previous position."""
        start, self._position = self._position, self._position + count
        if self._position > len(self._header):
            self._read_chunk()
        return start

    def _read_chunk(self) -> None:
        if self._position > self._size:
            raise self._error(f"the file is truncated: its header needs more than {self._size} bytes")
        if self._position > MAX_HEADER_BYTES:
            raise self._error(f"the header has more than {MAX_HEADER_BYTES} bytes")
        self._header += self._file.read(max(self._position, READ_CHUNK_BYTES))  # doubles the header, so copies are rare
        if self._position > len(self._header):
            raise self._error("the file changed while it was read")

    def _error(self, reason: str) -> WeightsError:
        return WeightsError(f"{self._path}: {reason}")
