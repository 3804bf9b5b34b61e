"""compressed-tensors `pack-quantized`: 4-bit or 8-bit integers with scales, packed along the inputs.

`scaled.py` reads the other formats of compressed-tensors.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch

from lorax_server.errors import WeightsError
from lorax_server.kernels import BlockMatrix
from lorax_server.weights.quantized.tensor import (
    INDEX_DTYPES,
    QuantizedTensor,
    dequantize_groups,
    find_groups,
    keep_nonzero,
    make_integer_matrix,
    select_rows,
    to_signed,
    unpack_words,
)

WORD_BITS = 32


class PackedTensor(QuantizedTensor):
    """A weight is `(value - zero) * scale`, with one scale per group of inputs, per row or per matrix.

    `weight_packed` is int32 `[outputs, ceil(inputs * bits / 32)]`, `weight_shape` contains outputs and inputs,
    `weight_scale` is `[outputs, groups]` or has one element, and `weight_zero_point` is packed along the outputs.
    `weight_g_idx` assigns inputs to groups.
    """

    main_part = "weight_packed"
    other_parts = ("weight_scale", "weight_zero_point", "weight_g_idx")
    ignored_parts = ("weight_shape", "input_scale", "input_zero_point", "input_global_scale", "output_scale")

    @cached_property
    def shape(self) -> tuple[int, int]:
        stored = self.require_part("weight_shape")
        sizes = self.read(stored).flatten() if math.prod(stored.shape) == 2 else torch.zeros(2)
        if sizes.is_floating_point() or int(sizes.min()) < 1:
            raise WeightsError(f"{self.path}: tensor '{self.prefix}weight_shape' must contain two positive integers")
        return int(sizes[0]), int(sizes[1])

    @cached_property
    def bits(self) -> int:
        words, inputs = self.main_shape[1], self.shape[1]
        matching = [bits for bits in self.config.bits or (4, 8) if -(-inputs * bits // WORD_BITS) == words]
        if len(matching) != 1:
            raise WeightsError(
                f"{self.path}: tensor '{self.prefix}weight_packed' has {words} words per row, which does not fit "
                f"{inputs} inputs"
            )
        return matching[0]

    @property
    def format(self) -> str:
        return f"compressed-tensors-int{self.bits}"

    @property
    def num_groups(self) -> int:
        return count_groups(self.require_part("weight_scale").shape)

    def estimate_bytes(self, dtype: torch.dtype, device: torch.device) -> float:
        if "weight_g_idx" in self.parts:
            groups = self.read(self.parts["weight_g_idx"])
            self._check_group_indices(groups)
            if self.is_converted(self._find_groups(groups)):
                return math.prod(self.shape) * dtype.itemsize
        return super().estimate_bytes(dtype, device)

    @property
    def has_zeros(self) -> bool:
        return "weight_zero_point" in self.parts

    def check_parts(self, parts: Mapping[str, torch.Tensor]) -> None:
        self.require_part("weight_scale")
        (outputs, inputs), scales, num_groups = self.shape, parts["weight_scale"], self.num_groups
        self.check_part(parts, "weight_packed", (outputs, -(-inputs * self.bits // WORD_BITS)), [torch.int32])
        self.check_scales(parts, "weight_scale", scales.shape if scales.numel() == 1 else (outputs, num_groups))
        if "weight_zero_point" in parts and parts["weight_zero_point"].dtype == torch.int8:
            self.check_part(parts, "weight_zero_point", scales.shape, [torch.int8])
        elif "weight_zero_point" in parts:
            shape = (-(-outputs * self.bits // WORD_BITS), num_groups)
            self.check_part(parts, "weight_zero_point", shape, [torch.int32])
        if "weight_g_idx" not in parts:
            self.check_groups()
        else:
            self._check_group_indices(parts["weight_g_idx"])

    def _check_group_indices(self, groups: torch.Tensor) -> None:
        self.check_part({"weight_g_idx": groups}, "weight_g_idx", (self.shape[1],), INDEX_DTYPES)
        if int(groups.max()) >= self.num_groups:
            raise WeightsError(
                f"{self.path}: tensor '{self.prefix}weight_g_idx' must contain numbers below {self.num_groups}"
            )

    def prepare(self, parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the zero points `[outputs, groups]`, and the result of `find_groups`."""
        prepared = self._find_groups(parts.get("weight_g_idx"))
        stored = parts.get("weight_zero_point")
        if stored is None:
            return prepared
        if stored.dtype == torch.int8:
            return prepared | keep_nonzero(zeros=expand_scales(stored, self.shape[0]))
        zeros = to_signed(unpack_words(stored.t(), self.bits).t()[: self.shape[0]], self.bits)
        return prepared | keep_nonzero(zeros=zeros)

    def _find_groups(self, groups: torch.Tensor | None) -> dict[str, torch.Tensor]:
        if groups is None or int(groups.min()) < 0:  # -1 means that the groups are consecutive
            return {}
        return find_groups(groups, self.shape[1], self.num_groups)

    def decode(self, parts: Mapping[str, torch.Tensor], rows: slice, dtype: torch.dtype) -> torch.Tensor | BlockMatrix:
        (outputs, inputs), bits = self.shape, self.bits
        values = to_signed(unpack_words(parts["weight_packed"][rows], bits)[:, :inputs], bits)
        scales = expand_scales(parts["weight_scale"], outputs)[rows]
        zeros = select_rows(parts.get("zeros"), rows)
        if "groups" in parts:
            return dequantize_groups(values, scales, zeros, parts["groups"]).to(dtype)
        if "order" in parts:
            values = values[:, parts["order"]]
        return make_integer_matrix(values, scales, zeros, bits, dtype)


def count_groups(shape: Sequence[int]) -> int:
    """Return the number of scales per row, given the shape of the scales."""
    return 1 if len(shape) < 2 else int(shape[1])


def expand_scales(scales: torch.Tensor, outputs: int) -> torch.Tensor:
    """Return scales or zero points as `[outputs, groups]`, from one per matrix, per row, or per group of inputs."""
    return scales.reshape(1, 1).expand(outputs, 1) if scales.numel() == 1 else scales.view(outputs, -1)
