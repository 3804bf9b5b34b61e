"""Random adapter batches, and the expected linear outputs in float32."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lorax_server.adapters.batch import find_segments
from lorax_server.kernels.ops import Field, LinearWeights, LoraBatch, LoraTarget

ALIGNMENT_ELEMENTS = 128  # 256 bytes, the alignment of LoRA factors


@dataclass(frozen=True)
class Adapter:
    """Adapter ranks by target (0: not adapted), and whether the adapter has output scales and output biases."""

    ranks: Sequence[int]
    vectors: bool = False


class LinearCase:
    """A random linear layer with several slices, and adapters. Memory between the factors is NaN."""

    def __init__(
        self,
        inputs: int,
        widths: Sequence[int],
        adapters: Sequence[Adapter],
        *,
        dtype: torch.dtype = torch.bfloat16,
        bias: bool = False,
        seed: int = 0,
        first_target: int = 1,
        device: str = "cuda",
    ) -> None:
        self.device = device
        self.inputs, self.widths, self.adapters, self.dtype = inputs, list(widths), adapters, dtype
        self.draw = torch.Generator(device).manual_seed(seed)
        outputs = sum(widths)
        self.weights = LinearWeights(self.normal(outputs, inputs) * 0.02, self.normal(outputs) if bias else None)
        starts = [sum(widths[:i]) for i in range(len(widths))]
        self.targets = [
            LoraTarget(first_target + i, slice(start, start + width))
            for i, (start, width) in enumerate(zip(starts, widths, strict=True))
        ]
        num_targets = first_target + len(widths) + 1
        self.table = torch.full((len(adapters) + 1, num_targets, len(Field)), -1, dtype=torch.int64)
        self.table[..., Field.RANK :] = 0
        self.scales = torch.rand(len(adapters) + 1, num_targets, generator=self.draw, device=device) + 0.5
        self._pieces: list[tuple[int, torch.Tensor]] = []
        self._end = ALIGNMENT_ELEMENTS
        for index, adapter in enumerate(adapters, 1):
            self._place(index, adapter)
        self.buffer = torch.full((self._end + 16 * max(inputs, *widths),), torch.nan, dtype=dtype, device=device)
        for at, values in self._pieces:
            self.buffer[at : at + values.numel()] = values.flatten()

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.draw, device=self.device).to(self.dtype)

    def _place(self, index: int, adapter: Adapter) -> None:
        for slice_, target in enumerate(self.targets):
            rank, width, row = adapter.ranks[slice_], self.widths[slice_], self.table[index, target.index]
            row[Field.RANK] = rank
            if rank:
                row[Field.A] = self._store(self.normal(rank, self.inputs) * 0.05)
                row[Field.B] = self._store(self.normal(rank, width) * 0.05)
            if adapter.vectors:
                row[Field.OUTPUT_SCALE] = self._store(self.normal(width))
                row[Field.OUTPUT_BIAS] = self._store(self.normal(width))

    def _store(self, values: torch.Tensor) -> int:
        at = self._end
        self._pieces.append((at, values))
        self._end += -(-values.numel() // ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS + ALIGNMENT_ELEMENTS
        return at

    def batch(self, indices: Sequence[int]) -> LoraBatch:
        widths = torch.zeros(self.table.shape[1], 2, dtype=torch.int64, device=self.device)
        for target, width in zip(self.targets, self.widths, strict=True):
            widths[target.index] = torch.tensor([self.inputs, width])
        bounds, adapters = find_segments(torch.tensor(indices))
        rows = torch.tensor(indices, dtype=torch.int32, device=self.device)
        return LoraBatch(
            self.buffer, self.table.to(self.device), self.scales, widths, rows, self.table, bounds, adapters
        )

    def expected(
        self,
        x: torch.Tensor,
        indices: Sequence[int],
        out: torch.Tensor | None = None,
        product: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the output in float32. With `out`, add only LoRA to `out`. `product` replaces `x @ weight.T`."""
        wide = x.float()
        if out is None:
            y = (wide @ self.weights.plain.float().t()) if product is None else product.float()
            y += 0 if self.weights.bias is None else self.weights.bias.float()
        else:
            y = out.float()
        for row, index in enumerate(indices):
            for target in self.targets if index else ():
                y[row, target.columns] = self._adapt(y[row, target.columns], wide[row], index, target, out is None)
        return y

    def _adapt(
        self, y: torch.Tensor, x: torch.Tensor, index: int, target: LoraTarget, with_vectors: bool
    ) -> torch.Tensor:
        fields, width = self.table[index, target.index].tolist(), len(y)
        if rank := fields[Field.RANK]:
            a = self._take(fields[Field.A], rank, self.inputs)
            b = self._take(fields[Field.B], rank, width)
            y = y + self.scales[index, target.index] * (x @ a.t()) @ b
        if with_vectors and fields[Field.OUTPUT_SCALE] >= 0:
            y = (
                y * self._take(fields[Field.OUTPUT_SCALE], 1, width)[0]
                + self._take(fields[Field.OUTPUT_BIAS], 1, width)[0]
            )
        return y

    def _take(self, at: int, rows: int, width: int) -> torch.Tensor:
        return self.buffer[at : at + rows * width].view(rows, width).float()


def spread_adapters(rows: int, adapters: int) -> list[int]:
    """Distribute rows evenly over adapters."""
    return [1 + row * adapters // rows for row in range(rows)]


def draw_adapters(rows: int, adapters: int, seed: int) -> list[int]:
    """Draw sorted random adapter indices, including the base model."""
    draw = random.Random(seed)
    return sorted(draw.randint(0, adapters) for _ in range(rows))


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float() - expected).norm() / expected.norm())
