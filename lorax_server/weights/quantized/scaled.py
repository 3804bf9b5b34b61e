"""Matrices that are stored as 8-bit floats or 8-bit integers, one value per weight, with scales.

These are the formats `fp8` and `fbgemm_fp8`, and `float-quantized` and `int-quantized` of compressed-tensors. Scales
for activations are ignored, because the server does not round activations.
"""

import math
from collections.abc import Mapping

import torch

from lorax_server.errors import WeightsError
from lorax_server.kernels import BlockMatrix
from lorax_server.kernels.quantized import float8_levels
from lorax_server.weights.quantized.compressed_tensors import count_groups, expand_scales
from lorax_server.weights.quantized.tensor import (
    QuantizedTensor,
    StoredPart,
    keep_nonzero,
    make_integer_matrix,
    make_level_matrix,
    select_rows,
)

SCALE_NAMES = ("weight_scale", "weight_scale_inv")  # multiplied with the values in both cases
FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


class ScaledTensor(QuantizedTensor):
    """A weight is `value * scale` for floats, and `(value - zero) * scale` for integers.

    There is one scale per matrix, per row, per group of inputs, or per block of outputs and inputs.
    """

    main_part = "weight"
    other_parts = (*SCALE_NAMES, "weight_zero_point")
    ignored_parts = ("input_scale", "input_zero_point", "input_scale_ub", "activation_scale", "output_scale")

    @classmethod
    def is_main_part(cls, name: str, tensors: Mapping[str, StoredPart]) -> bool:
        prefix = name.removesuffix(cls.main_part)
        return name.endswith(".weight") and any(f"{prefix}{scale}" in tensors for scale in SCALE_NAMES)

    @property
    def shape(self) -> tuple[int, int]:
        return self.main_shape

    @property
    def format(self) -> str:
        kind = "int8" if self._has_integers else "fp8"
        return kind if self.config.method == "fp8" else f"{self.config.method}-{kind}"

    bits = 8

    @property
    def num_groups(self) -> int:
        stored = self.parts[self._scale_name].shape
        if math.prod(stored) == 1 or self._block is None:
            return count_groups(stored)
        return 0 if self.shape[1] % self._block[1] else self.shape[1] // self._block[1]

    @property
    def _block(self) -> tuple[int, int] | None:
        """Return the outputs and inputs per scale, or None if there are scales for rows."""
        if self.config.block_size is None or self._has_integers:
            return None
        return min(self.config.block_size[0], self.shape[0]), min(self.config.block_size[1], self.shape[1])

    @property
    def has_levels(self) -> bool:
        return not self._has_integers

    @property
    def has_zeros(self) -> bool:
        return "weight_zero_point" in self.parts

    @property
    def _has_integers(self) -> bool:
        return bool(self.parts["weight"].dtype == torch.int8)

    @property
    def _scale_name(self) -> str:
        return next(name for name in SCALE_NAMES if name in self.parts)

    def check_parts(self, parts: Mapping[str, torch.Tensor]) -> None:
        name, block = self._scale_name, self._block
        (outputs, inputs), scales = self.shape, parts[name]
        self.check_part(parts, "weight", (outputs, inputs), [torch.int8, *FLOAT8_DTYPES])
        if scales.numel() == 1:
            shape = tuple(scales.shape)
        elif block is not None:
            shape = (-(-outputs // block[0]), -(-inputs // block[1]))
        else:
            shape = (outputs, *scales.shape[1:2])
            self.check_groups()
        self.check_scales(parts, name, shape)
        if "weight_zero_point" in parts and self._has_integers:
            self.check_part(parts, "weight_zero_point", shape, [torch.int8])
        elif "weight_zero_point" in parts and bool(parts["weight_zero_point"].float().any()):
            raise WeightsError(f"{self.path}: tensor '{self.prefix}weight' has zero points, but no integers")

    def prepare(self, parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the zero points `[outputs, groups]`."""
        if not self._has_integers or "weight_zero_point" not in parts:
            return {}
        return keep_nonzero(zeros=expand_scales(parts["weight_zero_point"], self.shape[0]))

    def decode(self, parts: Mapping[str, torch.Tensor], rows: slice, dtype: torch.dtype) -> torch.Tensor | BlockMatrix:
        (outputs, inputs), values, scales = self.shape, parts["weight"][rows], parts[self._scale_name]
        block = self._block
        if self._has_integers:
            zeros = select_rows(parts.get("zeros"), rows)
            return make_integer_matrix(values, expand_scales(scales, outputs)[rows], zeros, 8, dtype)
        if scales.numel() == 1 or block is None:
            factors = expand_scales(scales, outputs)[rows].float()
        else:
            blocks = torch.arange(rows.start, rows.stop, device=scales.device) // block[0]
            factors = scales.float()[blocks]
            if inputs % block[1]:
                return (values.float() * factors.repeat_interleave(block[1], dim=1)[:, :inputs]).to(dtype)
        return make_level_matrix(values.view(torch.uint8), factors, float8_levels(values.device, values.dtype), dtype)
