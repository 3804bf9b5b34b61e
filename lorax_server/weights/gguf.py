"""Read tensors from GGUF files. Quantized matrices become `BlockMatrix` objects with exactly the same values."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from lorax_server.errors import WeightsError
from lorax_server.gguf.architectures import TensorSource
from lorax_server.gguf.container import TensorEntry
from lorax_server.kernels import BlockMatrix

READ_CHUNK_BYTES = 4 * 2**20  # rows are read and decoded in chunks of this size, to limit temporary memory
FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Approximate size in memory of a GPU, including float32 scales and offsets.
GPU_BYTES_PER_WEIGHT = {
    **{"Q8_0": 1.125, "Q4_0": 0.625, "Q4_1": 0.75, "Q5_0": 1.125, "Q5_1": 1.25, "Q2_K": 1.0, "Q3_K": 0.75},
    **{"Q4_K": 0.75, "Q5_K": 1.25, "Q6_K": 1.25, "IQ4_NL": 1.125, "IQ4_XS": 1.125},
}
# Values of the non-linear 4-bit types IQ4_NL and IQ4_XS.
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor in a GGUF file, with the shape and values that it has in transformers."""

    source: TensorSource

    @property
    def path(self) -> Path:
        return self.source.entry.path

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def format(self) -> str:
        """Return the name of the tensor type."""
        return self.source.entry.type.name

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        """Read and dequantize a slice."""
        if self.source.values is not None:
            return self._join_keys_and_values(self.source.values)[index]
        if len(self.shape) < len(self.source.entry.shape):  # one row of a stored matrix
            return self._read_tensor([(0, 1)]).view(self.shape)[index]
        start, stop, _ = (index[0] if index else slice(None)).indices(self.shape[0])
        return self._read_tensor([(start, stop)]).view(-1, *self.shape[1:])[(slice(None), *index[1:])]

    def read_matrix(self, ranges: Sequence[tuple[int, int]], dtype: torch.dtype) -> torch.Tensor | BlockMatrix:
        """Return ranges of matrix rows. `dtype` is the dtype that a quantized matrix is converted to."""
        assert self.source.values is None
        parts = self._read_rows(ranges)
        if self.format in FLOAT_DTYPES:
            return parts[0].to(dtype)
        values, scales, *offsets = parts
        for part in parts[1:]:
            if not bool(part.isfinite().all()):
                raise WeightsError(f"{self.path}: a {self.format} tensor contains scales that are not finite numbers")
        bits = 8 if values.dtype == torch.int8 else 4
        return BlockMatrix(values, scales, offsets[0] if offsets else None, bits, dtype)

    def estimate_bytes(self, dtype: torch.dtype) -> float:
        """Return the approximate size in memory of a GPU. `dtype` is the dtype of weights that are not quantized."""
        return math.prod(self.shape) * GPU_BYTES_PER_WEIGHT.get(self.format, dtype.itemsize)

    def _read_tensor(self, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
        matrix = self.read_matrix(ranges, torch.float32)
        tensor = matrix.read() if isinstance(matrix, BlockMatrix) else matrix
        return tensor + self.source.offset if self.source.offset else tensor

    def _join_keys_and_values(self, values: TensorEntry) -> torch.Tensor:
        """Return a matrix with the key rows and the value rows of each head."""
        parts = []
        for entry in (self.source.entry, values):
            flat = entry._replace(shape=(math.prod(entry.shape[:-1]), entry.shape[-1]))
            parts.append(GGUFTensor(TensorSource(flat, flat.shape))[()].view(entry.shape))
        return torch.cat([parts[0].transpose(1, 2), parts[1]], dim=1).flatten(0, 1)

    def _read_rows(self, ranges: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        """Read and decode rows: one tensor for floats; values, scales and offsets for quantized types.

        The elements of a vector count as rows.
        """
        entry, total = self.source.entry, sum(stop - start for start, stop in ranges)
        row_bytes = entry.type.num_bytes if len(entry.shape) == 1 else entry.row_bytes
        count, done = max(1, READ_CHUNK_BYTES // row_bytes), 0
        outputs: list[torch.Tensor] = []
        with entry.path.open("rb") as file:
            for chunk in _split_ranges(ranges, count):
                content = torch.empty(len(chunk), row_bytes, dtype=torch.uint8)
                file.seek(entry.start + (self.source.first_row + chunk.start) * row_bytes)
                if file.readinto(content.numpy().data) != content.numel():
                    raise WeightsError(f"{entry.path}: the file changed while it was read; restart the server")
                parts = DECODERS[self.format](content.view(len(chunk), -1, entry.type.num_bytes))
                outputs = outputs or [part.new_empty(total, part.shape[1]) for part in parts]
                for output, part in zip(outputs, parts, strict=True):
                    output[done : done + len(chunk)] = part
                done += len(chunk)
        if self.source.head_dim is None:
            return outputs
        if any(edge % self.source.head_dim for edges in ranges for edge in edges):
            raise ValueError(f"row ranges {ranges} split heads of size {self.source.head_dim}")
        return [_separate_halves(output, self.source.head_dim) for output in outputs]


def _split_ranges(ranges: Sequence[tuple[int, int]], count: int) -> list[range]:
    """Return ranges of at most `count` rows, and at least one range."""
    return [
        range(start, stop)[done : done + count]
        for start, stop in ranges
        for done in range(0, max(1, stop - start), count)
    ]


def _separate_halves(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Undo llama.cpp's order of query and key rows, which interleaves the two halves of each head."""
    return rows.view(-1, head_dim // 2, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


# --- Decoders ---------------------------------------------------------------------------------------------------------
# Decoders take blocks, uint8 [rows, blocks, bytes], and return the fields of `BlockMatrix`: values, scales and, if
# the type has a minimum, offsets. 8-bit values are int8; 4-bit values are packed.


def _decode_q4_0(blocks: torch.Tensor) -> list[torch.Tensor]:
    return [blocks[..., 2:].flatten(1), _halves(blocks, 0)]


def _decode_q4_1(blocks: torch.Tensor) -> list[torch.Tensor]:
    return [blocks[..., 4:].flatten(1), _halves(blocks, 0), _halves(blocks, 2)]


def _decode_q5_0(blocks: torch.Tensor) -> list[torch.Tensor]:
    return [_join_5_bits(blocks[..., 6:], blocks[..., 2:6]) - 16, _halves(blocks, 0)]


def _decode_q5_1(blocks: torch.Tensor) -> list[torch.Tensor]:
    return [_join_5_bits(blocks[..., 8:], blocks[..., 4:8]), _halves(blocks, 0), _halves(blocks, 2)]


def _decode_q8_0(blocks: torch.Tensor) -> list[torch.Tensor]:
    return [blocks[..., 2:].flatten(1).view(torch.int8), _halves(blocks, 0)]


def _decode_q2_k(blocks: torch.Tensor) -> list[torch.Tensor]:
    packed, scales = blocks[..., :16], blocks[..., 16:80]
    values = _shift(scales.unflatten(-1, (2, 32)), (0, 2, 4, 6)) & 3
    factor, minimum = _halves(blocks, 80).float(), _halves(blocks, 82).float()
    return [_pack(values), _scale(factor, packed & 15), -_scale(minimum, packed >> 4)]


def _decode_q3_k(blocks: torch.Tensor) -> list[torch.Tensor]:
    high = _shift(blocks[..., :32], range(8)) & 1
    low = _shift(blocks[..., 32:96].unflatten(-1, (2, 32)), (0, 2, 4, 6)) & 3
    packed = blocks[..., 96:108]
    scales = _shift(packed[..., :8], (0, 4)).flatten(-2) & 15
    scales = scales | ((_shift(packed[..., 8:], (0, 2, 4, 6)).flatten(-2) & 3) << 4)
    values = low.flatten(1) + 4 * high.flatten(1) + 4  # values are -4 to 3, stored with an offset of 8
    return [_pack(values), _scale(_halves(blocks, 108).float(), scales.view(torch.int8) - 32)]


def _decode_q4_k(blocks: torch.Tensor) -> list[torch.Tensor]:
    values = _shift(blocks[..., 16:].unflatten(-1, (4, 32)), (0, 4)) & 15
    return [_pack(values), *_decode_6_bit_scales(blocks)]


def _decode_q5_k(blocks: torch.Tensor) -> list[torch.Tensor]:
    low = _shift(blocks[..., 48:].unflatten(-1, (4, 32)), (0, 4)) & 15
    high = _shift(blocks[..., 16:48], range(8)) & 1
    return [(low.flatten(1) | (high.flatten(1) << 4)).view(torch.int8), *_decode_6_bit_scales(blocks)]


def _decode_q6_k(blocks: torch.Tensor) -> list[torch.Tensor]:
    low = _shift(blocks[..., :128].unflatten(-1, (2, 64)), (0, 4)) & 15
    high = _shift(blocks[..., 128:192].unflatten(-1, (2, 32)), (0, 2, 4, 6)) & 3
    values = (low.flatten(1) | (high.flatten(1) << 4)).view(torch.int8) - 32
    return [values, _scale(_halves(blocks, 208).float(), blocks[..., 192:208].contiguous().view(torch.int8))]


def _decode_iq4_nl(blocks: torch.Tensor) -> list[torch.Tensor]:
    return [_look_up_iq4(blocks[..., 2:]), _halves(blocks, 0)]


def _decode_iq4_xs(blocks: torch.Tensor) -> list[torch.Tensor]:
    low = _shift(blocks[..., 4:8, None], (0, 4)).flatten(-3) & 15
    high = _shift(blocks[..., 2:4, None], (0, 2, 4, 6)).flatten(-3) & 3
    scales = (low | (high << 4)).view(torch.int8) - 32
    return [_look_up_iq4(blocks[..., 8:]), _scale(_halves(blocks, 0).float(), scales)]


def _decode_floats(dtype: torch.dtype, blocks: torch.Tensor) -> list[torch.Tensor]:
    return [blocks.flatten(1).view(dtype)]


def _halves(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Return the float16 value at byte `start` of each block, `[rows, blocks]`."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).squeeze(-1)


def _shift(packed: torch.Tensor, shifts: Sequence[int]) -> torch.Tensor:
    """Shift the bytes right by each number of bits, and stack the results in a new second-to-last dimension."""
    return packed[..., None, :] >> torch.tensor(shifts, dtype=torch.uint8)[:, None]


def _scale(factor: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiply the scales of all sub-blocks, `[rows, blocks, sub-blocks]`, by the block's factor."""
    return (factor[..., None] * scales.float()).flatten(1)


def _pack(values: torch.Tensor) -> torch.Tensor:
    """Pack 4-bit values in the order of `BlockMatrix`."""
    groups: torch.Tensor = values.flatten(1).unflatten(1, (-1, 2, 16))
    return (groups[:, :, 0] | (groups[:, :, 1] << 4)).flatten(1)


def _join_5_bits(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Unpack 5-bit values to int8, from packed 4-bit low bits and 32 high bits per block."""
    nibbles = _shift(low, (0, 4)).flatten(1) & 15
    bits = (high[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return (nibbles | (bits.flatten(1) << 4)).view(torch.int8)


def _look_up_iq4(packed: torch.Tensor) -> torch.Tensor:
    indices = _shift(packed.unflatten(-1, (-1, 16)), (0, 4)) & 15
    return torch.tensor(IQ4_VALUES, dtype=torch.int8)[indices.flatten(1).int()]


def _decode_6_bit_scales(blocks: torch.Tensor) -> list[torch.Tensor]:
    """Return scales and offsets of Q4_K and Q5_K: eight 6-bit scales and minima in 12 bytes."""
    low, minima, both = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat([low & 63, (both & 15) | ((low >> 2) & 48)], dim=-1)
    minima = torch.cat([minima & 63, (both >> 4) | ((minima >> 2) & 48)], dim=-1)
    return [_scale(_halves(blocks, 0).float(), scales), -_scale(_halves(blocks, 2).float(), minima)]


DECODERS: dict[str, Callable[[torch.Tensor], list[torch.Tensor]]] = {
    **{name: partial(_decode_floats, dtype) for name, dtype in FLOAT_DTYPES.items()},
    "IQ4_NL": _decode_iq4_nl,
    "IQ4_XS": _decode_iq4_xs,
    "Q2_K": _decode_q2_k,
    "Q3_K": _decode_q3_k,
    "Q4_0": _decode_q4_0,
    "Q4_1": _decode_q4_1,
    "Q4_K": _decode_q4_k,
    "Q5_0": _decode_q5_0,
    "Q5_1": _decode_q5_1,
    "Q5_K": _decode_q5_k,
    "Q6_K": _decode_q6_k,
    "Q8_0": _decode_q8_0,
}
