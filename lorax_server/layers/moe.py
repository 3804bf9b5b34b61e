"""The experts of a mixture of experts, with LoRA."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from lorax_server.adapters.batch import AdapterBatchData
from lorax_server.adapters.target import AdapterTarget, ExpertTarget, TargetKind
from lorax_server.distributed import Shard, join_shards, make_full_shard
from lorax_server.kernels import Activation, ExpertMatrices, Routing, concat_matrices
from lorax_server.layers.linear import get_lora_args
from lorax_server.weights import Weights


class ExpertCounter:
    """Counts the tokens of each expert in a layer, without synchronizing with the device."""

    def __init__(self, num_experts: int, device: torch.device) -> None:
        self.counts = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self.num_choices = 0  # sum of the counts

    def add(self, routing: Routing) -> None:
        chosen = routing.experts.flatten()
        self.counts.scatter_add_(0, chosen, torch.ones_like(chosen))
        self.num_choices += len(chosen)


# (weights, prefix, num_experts, hidden, inner) -> the matrices of one expert after the other
ExpertLoader = Callable[[Weights, str, int, Shard, Shard], Iterator[ExpertMatrices]]


class Experts(nn.Module):
    """The experts of one layer, which are gated MLPs. Each expert is sharded over its inner dimension.

    Checkpoints have one matrix per expert, `PREFIX.0.gate_proj.weight`, or all experts in one tensor `[experts,
    outputs, inputs]`, `PREFIX.gate_up_proj`.
    """

    def __init__(
        self,
        weights: Weights,
        prefix: str,
        counts: tuple[int, int],
        hidden_size: int,
        inner: Shard,
        activation: Activation,
        matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        load: ExpertLoader | None = None,
    ) -> None:
        """Load the experts.

        `counts` are the numbers of experts and of experts per token. `matrices` are the names of gate, up and down in
        checkpoints with one matrix per expert. `load` reads another form of checkpoints, where the outputs of gate and
        up alternate.
        """
        super().__init__()
        num_experts, top_k = counts
        self.ops, self.process_group = weights.ops, weights.process_group
        hidden = make_full_shard(hidden_size)
        rows_of = slice(0, inner.full), slice(inner.full, 2 * inner.full)
        if load is not None:
            rows_of = slice(0, None, 2), slice(1, None, 2)
        elif weights.has(f"{prefix}.gate_up_proj"):
            load = _load_fused
        else:
            load = partial(_load_separate, matrices=matrices)
        loaded = load(weights, prefix, num_experts, hidden, inner)
        self.experts = weights.ops.make_experts(num_experts, loaded, activation)
        size = inner.size
        self.targets = tuple(
            AdapterTarget(
                f"{prefix}.{matrix}",
                TargetKind.EXPERTS,
                inputs,
                outputs,
                columns,
                None,
                None,
                experts=ExpertTarget(num_experts, top_k, prefix, stored, parameter, rows),
            )
            for stored, (matrix, parameter, rows, inputs, outputs, columns) in zip(
                matrices,
                (
                    ("gate_proj", "gate_up_proj", rows_of[0], hidden, inner, slice(0, size)),
                    ("up_proj", "gate_up_proj", rows_of[1], hidden, inner, slice(size, 2 * size)),
                    ("down_proj", "down_proj", slice(None), inner, hidden, slice(0, hidden_size)),
                ),
                strict=True,
            )
        )

    def forward(self, x: torch.Tensor, routing: Routing, adapter_data: AdapterBatchData | None = None) -> torch.Tensor:
        out = self.ops.run_experts(x, routing, self.experts, *get_lora_args(adapter_data, self.targets))
        return out if self.process_group.size() == 1 else self.process_group.all_reduce(out)


# Both functions load one expert at a time, so that memory for a second copy of all experts is never needed.


def _load_fused(
    weights: Weights, prefix: str, num_experts: int, hidden: Shard, inner: Shard
) -> Iterator[ExpertMatrices]:
    both = join_shards([inner, inner])
    for expert in range(num_experts):
        yield ExpertMatrices(
            weights.get_expert_matrix(f"{prefix}.gate_up_proj", expert, num_experts, both, hidden),
            weights.get_expert_matrix(f"{prefix}.down_proj", expert, num_experts, hidden, inner),
        )


def _load_separate(
    weights: Weights, prefix: str, num_experts: int, hidden: Shard, inner: Shard, matrices: tuple[str, str, str]
) -> Iterator[ExpertMatrices]:
    for expert in range(num_experts):
        gate, up, down = (f"{prefix}.{expert}.{name}.weight" for name in matrices)
        yield ExpertMatrices(
            concat_matrices([weights.get_matrix(name, inner, hidden) for name in (gate, up)]),
            concat_matrices([weights.get_matrix(down, hidden, inner)]),
        )
