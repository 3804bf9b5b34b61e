"""GPTQ: integers in groups of inputs with scales and zero points, packed along the inputs."""

import math
from collections.abc import Mapping

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


class GPTQTensor(QuantizedTensor):
    """A weight is `(value - zero) * scale`. With activation ordering (`desc_act`), `g_idx` assigns inputs to groups.

    `qweight` is int32 `[inputs * bits / 32, outputs]`, `qzeros` is int32 `[groups, outputs * bits / 32]`, and `scales`
    is `[groups, outputs]`. Format v1 stores the zero points minus 1.
    """

    main_part = "qweight"
    other_parts = ("qzeros", "scales", "g_idx")

    @property
    def bits(self) -> int:
        return self.config.bits[0]

    @property
    def shape(self) -> tuple[int, int]:
        words, outputs = self.main_shape
        return outputs, words * (WORD_BITS // self.bits)

    @property
    def format(self) -> str:
        return f"gptq-int{self.bits}"

    @property
    def num_groups(self) -> int:
        shape = self.require_part("scales").shape
        return int(shape[0]) if len(shape) == 2 else 0

    def estimate_bytes(self, dtype: torch.dtype, device: torch.device) -> float:
        if self.config.is_reordered and "g_idx" in self.parts:
            groups = self.read(self.parts["g_idx"])
            self._check_group_indices(groups)
            if self.is_converted(self._find_groups(groups)):
                return math.prod(self.shape) * dtype.itemsize
        return super().estimate_bytes(dtype, device)

    @property
    def has_zeros(self) -> bool:
        return not self.config.is_symmetric

    def check_parts(self, parts: Mapping[str, torch.Tensor]) -> None:
        for name in ("qzeros", "scales"):
            self.require_part(name)
        (outputs, inputs), num_groups = self.shape, self.num_groups
        self.check_part(parts, "qweight", (inputs * self.bits // WORD_BITS, outputs), [torch.int32])
        self.check_scales(parts, "scales", (num_groups, outputs))
        self.check_part(parts, "qzeros", (num_groups, outputs * self.bits // WORD_BITS), [torch.int32])
        if "g_idx" in parts:
            self._check_group_indices(parts["g_idx"])

    def _check_group_indices(self, groups: torch.Tensor) -> None:
        self.check_part({"g_idx": groups}, "g_idx", (self.shape[1],), INDEX_DTYPES)
        if not 0 <= int(groups.min()) <= int(groups.max()) < self.num_groups:
            raise WeightsError(
                f"{self.path}: tensor '{self.prefix}g_idx' must contain numbers from 0 to {self.num_groups - 1}"
            )

    def _find_group_size(self) -> int:
        """Return the number of inputs per group. The last group is smaller if the size in the config says so."""
        size, inputs = self.config.group_size, self.shape[1]
        if size is not None and -(-inputs // size) == self.num_groups:
            return size
        self.check_groups()
        return inputs // self.num_groups

    def prepare(self, parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the zero points `[outputs, groups]`, and the result of `find_groups`."""
        mask, stored = 2**self.bits - 1, unpack_words(parts["qzeros"], self.bits).t()
        zeros = to_signed((stored + self.config.zero_point_offset) & mask, self.bits)
        return keep_nonzero(zeros=zeros) | self._find_groups(parts.get("g_idx"))

    def _find_groups(self, groups: torch.Tensor | None) -> dict[str, torch.Tensor]:
        inputs = self.shape[1]
        if groups is None or not bool(groups.any()):  # some programs write only zeros for consecutive groups
            groups = torch.arange(inputs) // self._find_group_size()
        return find_groups(groups, inputs, self.num_groups)

    def decode(self, parts: Mapping[str, torch.Tensor], rows: slice, dtype: torch.dtype) -> torch.Tensor | BlockMatrix:
        values = to_signed(unpack_words(parts["qweight"][:, rows].t(), self.bits), self.bits)
        scales, zeros = parts["scales"][:, rows].t().contiguous(), select_rows(parts.get("zeros"), rows)
        if "groups" in parts:
            return dequantize_groups(values, scales, zeros, parts["groups"]).to(dtype)
        if "order" in parts:
            values = values[:, parts["order"]]
        return make_integer_matrix(values, scales, zeros, self.bits, dtype)
