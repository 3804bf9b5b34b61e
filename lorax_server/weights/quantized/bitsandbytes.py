"""bitsandbytes: 4-bit table indices (nf4, fp4) with one scale per block, and 8-bit integers with one scale per row."""

import json
import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F

from lorax_server.errors import WeightsError
from lorax_server.kernels import BlockMatrix
from lorax_server.weights.quantized.tensor import (
    DECODE_CHUNK_ELEMENTS,
    QuantizedTensor,
    StoredPart,
    make_integer_matrix,
    make_level_matrix,
)

STATE_PARTS = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
MAX_STATE_BYTES = 10_000  # of the JSON object with the quantization state; real ones have about 200 bytes
INT8_RANGE = 127
ROUNDING_BLOCK = 64  # weights per scale in `round_to_4_bits`, the default of bitsandbytes
# The values that the indices 0 to 15 stand for. The values of nf4 are quantiles of a normal distribution.
LEVELS = {
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "fp4": tuple(sign * value / 12 for sign in (1, -1) for value in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)),
}
NUM_LEVELS = 16
MIN_SCALE = 1e-38  # prevents division by zero


class Packed4BitTensor(QuantizedTensor):
    """A weight is `quant_map[index] * absmax`, with one `absmax` per block of the flattened matrix.

    `weight` has two indices per byte, the higher four bits first. Its dtype does not matter. With double quantization,
    `absmax` contains indices into `nested_quant_map`, with one `nested_absmax` per block and one offset for all.
    """

    main_part = "weight"
    other_parts = ("weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map")
    ignored_parts = STATE_PARTS
    bits = 4
    has_levels = True

    @classmethod
    def is_main_part(cls, name: str, tensors: Mapping[str, StoredPart]) -> bool:
        prefix = name.removesuffix(cls.main_part)
        return name.endswith(".weight") and any(f"{prefix}{state}" in tensors for state in STATE_PARTS)

    @cached_property
    def _state(self) -> Mapping[str, Any]:
        stored = self.parts[self._state_name]
        try:
            if math.prod(stored.shape) > MAX_STATE_BYTES:
                raise ValueError(f"it has {math.prod(stored.shape)} bytes")
            state = json.loads(bytes(self.read(stored).to(torch.uint8).flatten().tolist()))
            outputs, inputs = (int(size) for size in state["shape"])
            if min(outputs, inputs, int(state["blocksize"])) < 1:
                raise ValueError("shape and blocksize must be positive")
            state = dict(state) | {"shape": (outputs, inputs)}
            if "weight.nested_absmax" in self.parts:
                state["nested_offset"] = float(state["nested_offset"])
                state["nested_blocksize"] = int(state["nested_blocksize"])
                if not math.isfinite(state["nested_offset"]) or state["nested_blocksize"] < 1:
                    raise ValueError("nested_offset must be finite, and nested_blocksize positive")
            state["blocksize"] = min(int(state["blocksize"]), outputs * inputs)
        except (ValueError, TypeError, KeyError, ArithmeticError, RecursionError) as error:
            raise WeightsError(
                f"{self.path}: tensor {self.prefix + self._state_name!r} cannot be read: {error}"
            ) from error
        return state

    @property
    def _state_name(self) -> str:
        return next(name for name in STATE_PARTS if name in self.parts)

    @property
    def shape(self) -> tuple[int, int]:
        shape: tuple[int, int] = self._state["shape"]
        return shape

    @property
    def format(self) -> str:
        return "bitsandbytes-" + self._state_name.rpartition("_")[2]

    @property
    def num_groups(self) -> int:
        inputs, block = self.shape[1], int(self._state["blocksize"])
        return 0 if inputs % block else inputs // block  # 0: blocks continue in the next row

    def check_parts(self, parts: Mapping[str, torch.Tensor]) -> None:
        for name in ("weight.absmax", "weight.quant_map"):
            self.require_part(name)
        count, block = math.prod(self.shape), int(self._state["blocksize"])
        num_blocks, is_nested = -(-count // block), "weight.nested_absmax" in parts
        num_bytes = -(-count // 2)
        if parts["weight"].nbytes != num_bytes:
            raise WeightsError(
                f"{self.path}: tensor '{self.prefix}weight' has {parts['weight'].nbytes} bytes, expected {num_bytes}"
            )
        self.check_scales(parts, "weight.quant_map", (NUM_LEVELS,))
        if not is_nested:
            self.check_scales(parts, "weight.absmax", (num_blocks,))
            return
        self.require_part("weight.nested_quant_map")
        self.check_part(parts, "weight.absmax", (num_blocks,), [torch.uint8])
        self.check_scales(parts, "weight.nested_quant_map", (256,))
        self.check_scales(parts, "weight.nested_absmax", (-(-num_blocks // self._state["nested_blocksize"]),))

    def decode(self, parts: Mapping[str, torch.Tensor], rows: slice, dtype: torch.dtype) -> torch.Tensor | BlockMatrix:
        inputs, block, levels = self.shape[1], int(self._state["blocksize"]), parts["weight.quant_map"].float()
        start, stop = rows.start * inputs, rows.stop * inputs
        packed = parts["weight"].flatten().view(torch.uint8)[start // 2 : -(-stop // 2)]
        indices = torch.stack([packed >> 4, packed & 15], dim=1).flatten()[start % 2 :][: stop - start]
        indices, scales = indices.view(-1, inputs), parts["scales"]
        if self.num_groups:
            return make_level_matrix(
                indices, scales[start // block : stop // block].view(len(indices), -1), levels, dtype
            )
        blocks = torch.arange(start, stop, device=packed.device) // block
        return (levels[indices.int()] * scales[blocks].view(-1, inputs)).to(dtype)

    def prepare(self, parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return one scale per block in float32."""
        stored = parts["weight.absmax"]
        if "weight.nested_absmax" not in parts:
            return {"scales": stored.float()}
        size = min(self._state["nested_blocksize"], len(stored))
        blocks = torch.arange(len(stored), device=stored.device) // size
        factors = parts["weight.nested_absmax"].float()[blocks]
        nested: torch.Tensor = parts["weight.nested_quant_map"].float()[stored.int()] * factors
        return {"scales": nested + self._state["nested_offset"]}


class Int8Tensor(QuantizedTensor):
    """A weight is `value * SCB / 127`, with one `SCB` per row."""

    main_part = "weight"
    other_parts = ("SCB",)
    ignored_parts = ("weight_format",)
    format = "bitsandbytes-int8"
    bits = 8
    num_groups = 1

    @classmethod
    def is_main_part(cls, name: str, tensors: Mapping[str, StoredPart]) -> bool:
        return name.endswith(".weight") and f"{name.removesuffix(cls.main_part)}SCB" in tensors

    @property
    def shape(self) -> tuple[int, int]:
        return self.main_shape

    def check_parts(self, parts: Mapping[str, torch.Tensor]) -> None:
        self.check_part(parts, "weight", self.shape, [torch.int8])
        self.check_scales(parts, "SCB", self.shape[:1])
        layout = self.parts.get("weight_format")
        if layout is not None and (math.prod(layout.shape) != 1 or bool(self.read(layout) != 0)):
            raise WeightsError(
                f"{self.path}: tensor '{self.prefix}weight' has a layout for one kind of GPU; "
                "save the model again with a newer version of bitsandbytes"
            )

    def decode(self, parts: Mapping[str, torch.Tensor], rows: slice, dtype: torch.dtype) -> torch.Tensor | BlockMatrix:
        scales = parts["SCB"][rows].float()[:, None] / INT8_RANGE
        return make_integer_matrix(parts["weight"][rows], scales, None, 8, dtype)


def round_to_4_bits(weight: torch.Tensor, kind: str, dtype: torch.dtype) -> torch.Tensor | BlockMatrix:
    """Round a matrix to `LEVELS` with one scale per block of the flattened matrix, as bitsandbytes does.

    The result is a float32 tensor if blocks continue in the next row.
    """
    levels = torch.tensor(sorted(LEVELS[kind]), dtype=torch.float32, device=weight.device)
    flat, (outputs, inputs) = weight.contiguous().view(-1), weight.shape
    indices = torch.empty(len(flat), dtype=torch.uint8, device=weight.device)
    scales = torch.empty(-(-len(flat) // ROUNDING_BLOCK), dtype=torch.float32, device=weight.device)
    for start in range(0, len(flat), DECODE_CHUNK_ELEMENTS):  # a multiple of the block size
        chunk = flat[start : start + DECODE_CHUNK_ELEMENTS].float()
        blocks = F.pad(chunk, (0, -len(chunk) % ROUNDING_BLOCK)).view(-1, ROUNDING_BLOCK)
        largest, first = blocks.abs().amax(1), start // ROUNDING_BLOCK
        scales[first : first + len(largest)] = largest
        nearest = torch.bucketize(blocks * (1 / largest.clamp(min=MIN_SCALE))[:, None], (levels[:-1] + levels[1:]) / 2)
        indices[start : start + len(chunk)] = nearest.view(-1)[: len(chunk)].to(torch.uint8)
    if inputs % ROUNDING_BLOCK == 0:
        return make_level_matrix(indices.view(outputs, inputs), scales.view(outputs, -1), levels, dtype)
    factors = scales.repeat_interleave(ROUNDING_BLOCK)[: len(flat)]
    return (levels[indices.int()] * factors).view(outputs, inputs)
