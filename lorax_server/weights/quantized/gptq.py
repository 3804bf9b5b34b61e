"""GPTQ: integers in groups of inputs with scales and zero points, packed along the inputs."""

from collections.abc import Mapping

import torch

from lorax_server.errors import WeightsError
from lorax_server.kernels import BlockMatrix
from lorax_server.weights.quantized.tensor import (
    INDEX_DTYPES,
    QuantizedTensor,
    dequantize_groups,
    make_integer_matrix,
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
        words, outputs = self.parts["qweight"].shape
        return int(outputs), int(words) * (WORD_BITS // self.bits)

    @property
    def format(self) -> str:
        return f"gptq-int{self.bits}"

    @property
    def num_groups(self) -> int:
        return int(self.require_part("scales").shape[0])

    @property
    def has_zeros(self) -> bool:
        return not self.config.is_symmetric

    def check_parts(self, parts: Mapping[str, torch.Tensor]) -> None:
        for name in ("qzeros", "scales"):
            self.require_part(name)
        (outputs, inputs), num_groups = self.shape, len(parts["scales"])
        self.check_part(parts, "qweight", (inputs * self.bits // WORD_BITS, outputs), [torch.int32])
        self.check_scales(parts, "scales", (num_groups, outputs))
        self.check_part(parts, "qzeros", (num_groups, outputs * self.bits // WORD_BITS), [torch.int32])
        if "g_idx" in parts:
            self.check_part(parts, "g_idx", (inputs,), INDEX_DTYPES)
            if not 0 <= int(parts["g_idx"].min()) <= int(parts["g_idx"].max()) < num_groups:
                raise WeightsError(
                    f"{self.path}: tensor '{self.prefix}g_idx' must contain numbers from 0 to {num_groups - 1}"
                )

    def decode(self, parts: Mapping[str, torch.Tensor], rows: slice, dtype: torch.dtype) -> torch.Tensor | BlockMatrix:
        words = parts["qweight"][:, rows].t()
        values = to_signed(unpack_words(words, self.bits), self.bits)
        scales = parts["scales"][:, rows].t().contiguous()
        stored = unpack_words(parts["qzeros"], self.bits)[:, rows].t()
        mask = 2**self.bits - 1
        zeros = to_signed((stored + self.config.zero_point_offset) & mask, self.bits)
        num_groups, inputs = scales.shape[1], values.shape[1]
        regular = torch.arange(inputs, device=values.device) * num_groups // inputs
        groups = parts.get("g_idx")
        if groups is None or torch.equal(groups.to(torch.int64), regular):
            return make_integer_matrix(values, scales, zeros, self.bits, dtype)
        return dequantize_groups(values, scales, zeros, groups).to(dtype)
