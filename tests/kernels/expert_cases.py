"""Random mixtures of experts with adapters, and the expected outputs in float64."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from lorax_server.kernels import Activation, ExpertMatrices, ExpertWeights, Field, LoraBatch, LoraTarget, Routing

FIRST_TARGET = 1
Runs = Sequence[tuple[int, int]]  # adapter, number of tokens


class Mixture(NamedTuple):
    hidden: int
    inner: int
    num_experts: int
    top_k: int

    @property
    def targets(self) -> list[LoraTarget]:
        inner = self.inner
        columns = slice(0, inner), slice(inner, 2 * inner), slice(0, self.hidden)
        return [LoraTarget(FIRST_TARGET + index, part) for index, part in enumerate(columns)]

    @property
    def features(self) -> list[tuple[int, int]]:
        return [(self.hidden, self.inner), (self.hidden, self.inner), (self.inner, self.hidden)]

    def matrices(self, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[ExpertMatrices]:
        draw = torch.Generator().manual_seed(1)

        def matrix(outputs: int, inputs: int) -> torch.Tensor:
            return (torch.randn(outputs, inputs, generator=draw) / math.sqrt(inputs)).to(device, dtype)

        sizes = (2 * self.inner, self.hidden), (self.hidden, self.inner)
        return [ExpertMatrices(*(matrix(*size) for size in sizes)) for _ in range(self.num_experts)]

    def make(self, ops: Any, dtype: torch.dtype = torch.float32, activation: str = "silu") -> ExpertWeights:
        made: ExpertWeights = ops.make_experts(
            self.num_experts, iter(self.matrices(dtype)), Activation(activation, getattr(F, activation))
        )
        return made

    def route(self, tokens: int, seed: int = 2) -> Routing:
        scores = torch.randn(tokens, self.num_experts, generator=torch.Generator().manual_seed(seed))
        weights, experts = scores.softmax(-1).topk(self.top_k)
        return Routing(experts, weights)

    def inputs(self, tokens: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(tokens, self.hidden, generator=torch.Generator().manual_seed(3)).to(dtype)

    def lora(self, runs: Runs, ranks: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32) -> LoraBatch:
        """Make a batch in which adapter `i + 1` has rank `ranks[i][target]`. NaN separates the tensors."""
        draw = torch.Generator().manual_seed(4)
        nan = torch.full((128,), math.nan)
        parts, table = [nan], torch.zeros(1 + len(ranks), FIRST_TARGET + 3, len(Field), dtype=torch.long)
        table[:, :, : Field.RANK] = -1
        for adapter, of_targets in enumerate(ranks, start=1):
            for index, (rank, sizes) in enumerate(zip(of_targets, self.features, strict=True), start=FIRST_TARGET):
                table[adapter, index, Field.RANK] = rank
                for field, size in zip((Field.A, Field.B), sizes, strict=True) if rank else ():
                    table[adapter, index, field] = sum(map(len, parts))
                    factor = torch.randn(self.num_experts * rank * size, generator=draw) / math.sqrt(max(rank, 8))
                    parts += [factor, nan.repeat(1 + -len(factor) % 128)[: 128 + -len(factor) % 128]]
        lengths = [length for _, length in runs]
        return LoraBatch(
            buffer=torch.cat(parts).to(dtype),
            table=table,
            scales=torch.arange(table[..., 0].numel()).view(table.shape[:2]) % 5 * 0.25 + 0.25,
            features=torch.tensor([(self.hidden, self.hidden), *self.features]),
            adapter_indices=torch.tensor(
                [adapter for adapter, length in runs for _ in range(length)], dtype=torch.int32
            ),
            host_table=table,
            bounds=[sum(lengths[:count]) for count in range(len(runs) + 1)],
            adapters=[adapter for adapter, _ in runs],
        )

    def expected(
        self, x: torch.Tensor, routing: Routing, lora: LoraBatch | None = None, activation: str = "silu"
    ) -> torch.Tensor:
        """Return the outputs in float64, computed token by token with adapters merged into the matrices."""
        out = torch.zeros(x.shape, dtype=torch.float64)
        matrices = self.matrices(x.dtype)
        for token, (experts, weights) in enumerate(
            zip(routing.experts.tolist(), routing.weights.tolist(), strict=True)
        ):
            for expert, weight in zip(experts, weights, strict=True):
                gate_up, down = (part.double() for part in matrices[expert][:2])
                if lora is not None:
                    deltas = [self._delta(lora, token, expert, index) for index in range(3)]
                    gate_up, down = gate_up + torch.cat(deltas[:2]), down + deltas[2]
                gate, up = (gate_up @ x[token].double()).chunk(2)
                out[token] += weight * (down @ (getattr(F, activation)(gate) * up))
        return out

    def _delta(self, lora: LoraBatch, token: int, expert: int, index: int) -> torch.Tensor:
        adapter, (inputs, outputs) = int(lora.adapter_indices[token]), self.features[index]
        fields = lora.table[adapter, FIRST_TARGET + index].tolist()
        a, b = (
            lora.buffer[fields[field] + expert * fields[Field.RANK] * size :][: fields[Field.RANK] * size]
            .double()
            .view(-1, size)
            if fields[Field.RANK]
            else torch.zeros(0, size, dtype=torch.float64)
            for field, size in ((Field.A, inputs), (Field.B, outputs))
        )
        return b.t() @ a * float(lora.scales[adapter, FIRST_TARGET + index])
