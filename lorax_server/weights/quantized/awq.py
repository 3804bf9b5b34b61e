"""AWQ (version `gemm`): 4-bit integers in groups of inputs with scales and zero points, packed along the outputs."""

from collections.abc import Mapping

import torch

from lorax_server.kernels import BlockMatrix
from lorax_server.weights.quantized.tensor import (
    QuantizedTensor,
    keep_nonzero,
    make_integer_matrix,
    select_rows,
    to_signed,
    unpack_words,
)

VALUES_PER_WORD = 8
# The position in a word of each of 8 consecutive outputs.
POSITIONS = (0, 4, 1, 5, 2, 6, 3, 7)


class AWQTensor(QuantizedTensor):
    """A weight is `(value - zero) * scale`.

    `qweight` is int32 `[inputs, outputs / 8]`, `qzeros` is int32 `[groups, outputs / 8]`, and `scales` is `[groups,
    outputs]`.
    """

    main_part = "qweight"
    other_parts = ("qzeros", "scales")
    format = "awq-int4"
    bits = 4

    @property
    def shape(self) -> tuple[int, int]:
        inputs, words = self.main_shape
        return words * VALUES_PER_WORD, inputs

    @property
    def num_groups(self) -> int:
        shape = self.require_part("scales").shape
        return int(shape[0]) if len(shape) == 2 else 0

    @property
    def has_zeros(self) -> bool:
        return "qzeros" in self.parts

    def check_parts(self, parts: Mapping[str, torch.Tensor]) -> None:
        self.check_groups()
        (outputs, inputs), num_groups = self.shape, self.num_groups
        self.check_part(parts, "qweight", (inputs, outputs // VALUES_PER_WORD), [torch.int32])
        self.check_scales(parts, "scales", (num_groups, outputs))
        if "qzeros" in parts:
            self.check_part(parts, "qzeros", (num_groups, outputs // VALUES_PER_WORD), [torch.int32])

    def prepare(self, parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the zero points `[outputs, groups]`."""
        return keep_nonzero(zeros=to_signed(_unpack(parts["qzeros"]).t(), 4)) if "qzeros" in parts else {}

    def decode(self, parts: Mapping[str, torch.Tensor], rows: slice, dtype: torch.dtype) -> torch.Tensor | BlockMatrix:
        words = slice(rows.start // VALUES_PER_WORD, -(-rows.stop // VALUES_PER_WORD))
        wanted = slice(rows.start - words.start * VALUES_PER_WORD, rows.stop - words.start * VALUES_PER_WORD)
        values = to_signed(_unpack(parts["qweight"][:, words])[:, wanted].t().contiguous(), 4)
        scales, zeros = parts["scales"][:, rows].t().contiguous(), select_rows(parts.get("zeros"), rows)
        return make_integer_matrix(values, scales, zeros, 4, dtype)


def _unpack(words: torch.Tensor) -> torch.Tensor:
    ordered: torch.Tensor = unpack_words(words, 4).unflatten(1, (-1, VALUES_PER_WORD))[:, :, POSITIONS]
    return ordered.flatten(1)
