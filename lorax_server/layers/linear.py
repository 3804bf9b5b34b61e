"""Matrices, cut over the ranks, each a target of adapters.

A column linear holds some of the outputs and needs no communication; a row linear holds some of the inputs and sums
over the ranks. An adapter's delta needs no communication of its own: a column linear has all of A and its own part of
B, a row linear its own part of A and all of B, and adds its delta to the partial sum.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Self

import torch
import torch.nn.functional as F
from torch import nn

from lorax_server.adapters.batch import AdapterBatchData
from lorax_server.adapters.target import AdapterTarget, Kind
from lorax_server.distributed import Shard, shard_vocab, vocab_block, whole
from lorax_server.kernels import Activation, LoraBatch, LoraTarget
from lorax_server.layers.adapt import LogitRule, replace_scores, resize_scores
from lorax_server.weights import Weights


def find_lora(
    adapter_data: AdapterBatchData | None, targets: Sequence[AdapterTarget]
) -> tuple[LoraBatch | None, Sequence[LoraTarget]]:
    """Return the adapters of a batch and the places of a layer's targets, as the ops take them."""
    return (None, ()) if adapter_data is None else (adapter_data.lora, adapter_data.find(targets))


class TensorParallelMultiAdapterLinear(nn.Module):
    """One or several matrices with the same input, side by side, of each some of the outputs."""

    def __init__(
        self,
        weights: Weights,
        names: Sequence[str],
        in_features: int,
        outputs: Sequence[Shard],
        *,
        bias: bool,
        fan_in_fan_out: bool = False,
    ) -> None:
        """`outputs` are this rank's parts of each name's output; `fan_in_fan_out` if they are stored `[in, out]`."""
        super().__init__()
        matrices, biases = [], []
        for name, shard in zip(names, outputs, strict=True):
            if fan_in_fan_out:
                matrices.append(weights.get_sharded(f"{name}.weight", 1, shard, (in_features, shard.full)).t())
            else:
                matrices.append(weights.get_sharded(f"{name}.weight", 0, shard, (shard.full, in_features)))
            if bias:
                biases.append(weights.get_sharded(f"{name}.bias", 0, shard, (shard.full,)))
        self.linear = weights.ops.make_linear(torch.cat(matrices).contiguous(), torch.cat(biases) if bias else None)
        stops = accumulate(shard.size for shard in outputs)
        self.targets = tuple(
            self._make_target(name, in_features, shard, slice(stop - shard.size, stop), fan_in_fan_out)
            for name, shard, stop in zip(names, outputs, stops, strict=True)
        )
        self.ops = weights.ops

    def forward(self, x: torch.Tensor, adapter_data: AdapterBatchData | None = None) -> torch.Tensor:
        return self.ops.linear(x, self.linear, *find_lora(adapter_data, self.targets))

    def gated(
        self, x: torch.Tensor, activation: Activation, adapter_data: AdapterBatchData | None = None
    ) -> torch.Tensor:
        """Return `activation(gate) * up` of two matrices."""
        return self.ops.gated_linear(x, self.linear, activation, *find_lora(adapter_data, self.targets))

    def _make_target(
        self, name: str, in_features: int, outputs: Shard, columns: slice, fan_in_fan_out: bool
    ) -> AdapterTarget:
        weight, bias = self.linear.weight[columns], self.linear.bias
        bias = None if bias is None else bias[columns]
        shape = (in_features, outputs.full) if fan_in_fan_out else None
        inputs = whole(in_features)
        return AdapterTarget(name, Kind.LINEAR, inputs, outputs, columns, weight, bias, stored_shape=shape)


class TensorParallelAdapterRowLinear(nn.Module):
    """A matrix of which this rank holds some of the inputs; the first rank alone adds the bias."""

    def __init__(
        self,
        weights: Weights,
        name: str,
        inputs: Shard,
        out_features: int,
        *,
        bias: bool,
        fan_in_fan_out: bool = False,
        scaled_at: tuple[str, int] | None = None,
        scales_input: bool = False,
    ) -> None:
        """Some adapters scale the inputs of this layer. `scaled_at` names a matrix before it whose outputs can be
        scaled instead, and the first of them. Where there is none, `scales_input` lets `forward` scale its argument in
        place: nothing else may read that afterwards.
        """
        super().__init__()
        if fan_in_fan_out:
            matrix = weights.get_sharded(f"{name}.weight", 0, inputs, (inputs.full, out_features)).t()
        else:
            matrix = weights.get_sharded(f"{name}.weight", 1, inputs, (out_features, inputs.full))
        added = weights.get_tensor(f"{name}.bias", (out_features,)) if bias else None
        is_first = weights.process_group.rank() == 0
        self.linear = weights.ops.make_linear(matrix.contiguous(), added if is_first else None)
        outputs, columns = whole(out_features), slice(0, out_features)
        shape = (inputs.full, out_features) if fan_in_fan_out else None
        place = (f"{name}:input", 0) if scales_input else scaled_at
        target = AdapterTarget(name, Kind.LINEAR, inputs, outputs, columns, self.linear.weight, added, is_first)
        target = replace(target, stored_shape=shape, scaled_at=place)
        input_target = AdapterTarget(f"{name}:input", Kind.INPUT, inputs, inputs, slice(0, inputs.size), None, None)
        self.targets = (target, input_target) if scales_input else (target,)
        self.process_group = weights.process_group
        self.ops = weights.ops

    def forward(self, x: torch.Tensor, adapter_data: AdapterBatchData | None = None) -> torch.Tensor:
        target, *input_targets = self.targets
        if input_targets and adapter_data is not None:
            self.ops.scale_and_shift(x, adapter_data.lora, adapter_data.find(input_targets))
        out = self.ops.linear(x, self.linear, *find_lora(adapter_data, [target]))
        return out if self.process_group.size() == 1 else self.process_group.all_reduce(out)


class MultiAdapterHead(nn.Module):
    """The matrix onto the vocabulary, cut by vocabulary: each rank scores its part, and all get the whole."""

    rule: LogitRule | None = None

    def __init__(
        self,
        matrix: torch.Tensor,
        target_name: str,
        vocab_size: int,
        weights: Weights,
        *,
        bias: torch.Tensor | None = None,
        is_tied: bool = True,
    ) -> None:
        """`matrix` and `bias` are this rank's parts. The matrix is the embedding's, too, if `is_tied`. Adapters call
        the head `target_name`."""
        super().__init__()
        shard = shard_vocab(weights.process_group, vocab_size)
        padding = vocab_block(weights.process_group, vocab_size) - shard.size
        filled = None if bias is None else F.pad(bias, (0, padding))
        self.linear = weights.ops.make_linear(F.pad(matrix, (0, 0, 0, padding)) if padding else matrix, filled)
        inputs, columns = whole(matrix.shape[1]), slice(0, shard.size)
        # A tied pair is known by the one matrix that both have. The head's may lie in panels, which serve as both.
        weight = self.linear.weight[columns] if not is_tied else matrix if padding else self.linear.weight
        self.targets = (AdapterTarget(target_name, Kind.HEAD, inputs, shard, columns, weight, bias),)
        self.vocab_size = vocab_size
        self.process_group = weights.process_group
        self.ops = weights.ops

    @classmethod
    def load(
        cls,
        weights: Weights,
        name: str,
        in_features: int,
        vocab_size: int,
        target_name: str | None = None,
        *,
        bias: torch.Tensor | None = None,
    ) -> Self:
        shard = shard_vocab(weights.process_group, vocab_size)
        matrix = weights.get_sharded(f"{name}.weight", 0, shard, (vocab_size, in_features)).contiguous()
        return cls(matrix, target_name or name, vocab_size, weights, bias=bias, is_tied=False)

    def forward(
        self, x: torch.Tensor, adapter_data: AdapterBatchData | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return logits, and None where logits of speculated tokens will be."""
        if adapter_data is None:
            return self._gather(self.ops.linear(x, self.linear, None, ())), None
        (target,), lora_targets = self.targets, adapter_data.find(self.targets)
        lora = adapter_data.lora
        if not lora.changes(lora_targets):
            logits = self.ops.linear(x, self.linear, None, ())
        elif lora.has_rows(lora_targets[0].index):
            logits = self.ops.linear(x, self.linear, None, ())
            replace_scores(logits, x, target, adapter_data)
            self.ops.add_lora(logits, x, lora, lora_targets)
            self.ops.scale_and_shift(logits, lora, lora_targets)
        else:
            logits = self.ops.linear(x, self.linear, lora, lora_targets)
        return resize_scores(self._gather(logits), x, target, adapter_data, self.rule), None

    def _gather(self, logits: torch.Tensor) -> torch.Tensor:
        if self.process_group.size() > 1:
            logits = self.process_group.all_gather(logits, dim=-1)[..., : self.vocab_size]
        return logits if self.rule is None else self.rule(logits)
