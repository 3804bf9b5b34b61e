"""The sizes of a model, and the bytes that follow from them."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

UNIT_BYTES = 256  # a tensor of an adapter begins at a multiple of this
HALF_BYTES = 2  # of a number in half precision


class MatrixSize(NamedTuple):
    """A linear of a layer, by the name that adapters use."""

    name: str
    outputs: int
    inputs: int


@dataclass(frozen=True)
class ModelSizes:
    """Counts of a model. All numbers are in half precision."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_length: int
    matrices: tuple[MatrixSize, ...]  # of one layer
    head: int  # numbers of the matrix that gives the scores
    others: int  # numbers that a step does not read, or hardly: embeddings, norms, biases

    @property
    def read_bytes(self) -> int:
        """The bytes of weights that every step reads."""
        layer = sum(matrix.outputs * matrix.inputs for matrix in self.matrices)
        return HALF_BYTES * (self.layers * layer + self.head)

    @property
    def weight_bytes(self) -> int:
        return self.read_bytes + HALF_BYTES * self.others

    def token_bytes(self, is_float8: bool = False) -> int:
        """Return the bytes of the keys and values of a token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * (1 if is_float8 else HALF_BYTES)

    def adapter_bytes(self, rank: int, modules: Collection[str], has_magnitudes: bool = False) -> int:
        """Return the bytes of an adapter on the device: at each module A, B, and DoRA's factor."""
        chosen = [matrix for matrix in self.matrices if matrix.name in modules]
        tensors = [rank * size for matrix in chosen for size in (matrix.inputs, matrix.outputs)]
        tensors += [matrix.outputs for matrix in chosen if has_magnitudes]
        return self.layers * sum(-(-HALF_BYTES * numbers // UNIT_BYTES) * UNIT_BYTES for numbers in tensors)

    def prompt_flop(self, length: int) -> float:
        """Return the floating-point operations for a token of a prompt of some length."""
        linear = 2 * self.layers * sum(matrix.outputs * matrix.inputs for matrix in self.matrices)
        return linear + 4 * self.layers * self.heads * self.head_dim * length / 2
