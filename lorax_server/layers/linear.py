"""Tensor-parallel linear layers with LoRA.

A column-parallel layer shards its outputs and LoRA B. A row-parallel layer shards its inputs and LoRA A, and adds the
LoRA delta to the partial sum before the all-reduce. Adapters therefore need no extra communication.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Self

import torch
import torch.nn.functional as F
from torch import nn

from lorax_server.adapters.batch import AdapterBatchData
from lorax_server.adapters.target import AdapterTarget, TargetKind
from lorax_server.distributed import Shard, make_full_shard, shard_vocab, vocab_shard_size
from lorax_server.kernels import (
    Activation,
    LoraBatch,
    LoraTarget,
    Ops,
    QuantizedMatrix,
    ReorderedMatrix,
    StoredMatrix,
    concat_matrices,
)
from lorax_server.layers.logits import LogitTransform, replace_row_logits, resize_logits
from lorax_server.weights import Weights


def get_lora_args(
    adapter_data: AdapterBatchData | None, targets: Sequence[AdapterTarget]
) -> tuple[LoraBatch | None, Sequence[LoraTarget]]:
    """Return the LoRA arguments for a linear op: the batch's adapters and the layer's target modules."""
    return (None, ()) if adapter_data is None else (adapter_data.lora, adapter_data.find_targets(targets))


class AdapterLinear(nn.Module):
    """A layer with one matrix. The inputs of the matrix, and of adapters for it, may be stored in another order."""

    input_order: torch.Tensor | None = None  # the original index of each stored input; None if they are not reordered

    def set_weights(self, ops: Ops, matrix: torch.Tensor | QuantizedMatrix, bias: torch.Tensor | None) -> None:
        self.ops = ops
        if isinstance(matrix, ReorderedMatrix):
            self.input_order, matrix = matrix.order, matrix.blocks
        self.linear = ops.make_linear(matrix, bias)

    @property
    def weight(self) -> torch.Tensor | StoredMatrix:
        """Return the matrix with its inputs in their original order."""
        stored = self.linear.weight
        if self.input_order is None:
            return stored
        assert isinstance(stored, StoredMatrix)
        return ReorderedMatrix(stored, self.input_order)

    def reorder(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's inputs in the order of the matrix."""
        return x if self.input_order is None else x.index_select(1, self.input_order)


class TensorParallelMultiAdapterLinear(AdapterLinear):
    """A column-parallel linear layer that fuses one or more matrices with the same input."""

    def __init__(
        self,
        weights: Weights,
        names: Sequence[str],
        in_features: int,
        outputs: Sequence[Shard],
        *,
        bias: bool,
        fan_in_fan_out: bool = False,
        min_bits: int = 4,
    ) -> None:
        """Load the matrices.

        `outputs` has one shard per name. With `fan_in_fan_out`, the checkpoint layout is `[in, out]`. `min_bits` is the
        lowest precision if the matrices are quantized while loading.
        """
        super().__init__()
        matrices, biases = [], []
        inputs = make_full_shard(in_features)
        for name, shard in zip(names, outputs, strict=True):
            matrix = weights.get_matrix(
                f"{name}.weight",
                shard,
                inputs,
                fan_in_fan_out=fan_in_fan_out,
                min_bits=min_bits,
                can_reorder=True,
            )
            matrices.append(matrix)
            if bias:
                biases.append(weights.get_sharded(f"{name}.bias", 0, shard, (shard.full,)))
        self.set_weights(weights.ops, concat_matrices(matrices), torch.cat(biases) if bias else None)
        stops = accumulate(shard.size for shard in outputs)
        self.targets = tuple(
            self._make_target(name, in_features, shard, slice(stop - shard.size, stop), fan_in_fan_out)
            for name, shard, stop in zip(names, outputs, stops, strict=True)
        )

    def forward(self, x: torch.Tensor, adapter_data: AdapterBatchData | None = None) -> torch.Tensor:
        return self.ops.linear(self.reorder(x), self.linear, *get_lora_args(adapter_data, self.targets))

    def forward_gated(
        self, x: torch.Tensor, activation: Activation, adapter_data: AdapterBatchData | None = None
    ) -> torch.Tensor:
        """Return `activation(gate) * up`, where gate and up are the outputs of the two matrices."""
        lora_args = get_lora_args(adapter_data, self.targets)
        return self.ops.gated_linear(self.reorder(x), self.linear, activation, *lora_args)

    def _make_target(
        self, name: str, in_features: int, outputs: Shard, columns: slice, fan_in_fan_out: bool
    ) -> AdapterTarget:
        weight, bias = self.weight[columns], self.linear.bias
        bias = None if bias is None else bias[columns]
        shape = (in_features, outputs.full) if fan_in_fan_out else None
        inputs = make_full_shard(in_features)
        return AdapterTarget(name, TargetKind.LINEAR, inputs, outputs, columns, weight, bias, checkpoint_shape=shape)


class TensorParallelAdapterRowLinear(AdapterLinear):
    """A row-parallel linear layer. Only rank 0 adds the bias."""

    def __init__(
        self,
        weights: Weights,
        name: str,
        inputs: Shard,
        out_features: int,
        *,
        bias: bool,
        fan_in_fan_out: bool = False,
        input_scale_target: tuple[str, int] | None = None,
        scales_input: bool = False,
    ) -> None:
        """Load the layer, and choose where (IA)³ adapters scale its inputs.

        `input_scale_target` is the name of a preceding matrix whose outputs are scaled instead, and the index of the
        first scaled output. With `scales_input`, `forward` scales its argument in place, so the caller must not use the
        argument afterwards.
        """
        super().__init__()
        outputs = make_full_shard(out_features)
        matrix = weights.get_matrix(f"{name}.weight", outputs, inputs, fan_in_fan_out=fan_in_fan_out, can_reorder=True)
        added = weights.get_tensor(f"{name}.bias", (out_features,)) if bias else None
        is_first_rank = weights.process_group.rank() == 0
        self.set_weights(weights.ops, concat_matrices([matrix]), added if is_first_rank else None)
        columns = slice(0, out_features)
        shape = (inputs.full, out_features) if fan_in_fan_out else None
        scale_target = (f"{name}:input", 0) if scales_input else input_scale_target
        target = AdapterTarget(name, TargetKind.LINEAR, inputs, outputs, columns, self.weight, added, is_first_rank)
        target = replace(target, checkpoint_shape=shape, input_scale_target=scale_target)
        input_target = AdapterTarget(
            f"{name}:input", TargetKind.INPUT, inputs, inputs, slice(0, inputs.size), None, None
        )
        self.targets = (target, input_target) if scales_input else (target,)
        self.process_group = weights.process_group

    def forward(self, x: torch.Tensor, adapter_data: AdapterBatchData | None = None) -> torch.Tensor:
        target, *input_targets = self.targets
        if input_targets and adapter_data is not None:
            self.ops.scale_and_shift(x, adapter_data.lora, adapter_data.find_targets(input_targets))
        out = self.ops.linear(self.reorder(x), self.linear, *get_lora_args(adapter_data, [target]))
        return out if self.process_group.size() == 1 else self.process_group.all_reduce(out)


class MultiAdapterHead(nn.Module):
    """The LM head, sharded over the vocabulary. An all-gather gives every rank all logits."""

    logit_transform: LogitTransform | None = None

    def __init__(
        self,
        matrix: torch.Tensor | QuantizedMatrix,
        target_name: str,
        vocab_size: int,
        weights: Weights,
        *,
        bias: torch.Tensor | None = None,
        is_tied: bool = True,
    ) -> None:
        """Create the head from this rank's matrix and bias shards. With `is_tied`, the embedding uses the same matrix.

        `target_name` is the head's module name in adapters.
        """
        super().__init__()
        shard = shard_vocab(weights.process_group, vocab_size)
        padding = vocab_shard_size(weights.process_group, vocab_size) - shard.size
        filled = None if bias is None else F.pad(bias, (0, padding))
        padded = matrix
        if padding:
            padded = F.pad(matrix, (0, 0, 0, padding)) if isinstance(matrix, torch.Tensor) else matrix.pad_rows(padding)
        self.linear = weights.ops.make_linear(padded, filled)
        inputs, columns = make_full_shard(matrix.shape[1]), slice(0, shard.size)
        # Embedding and head count as tied if they share one matrix object, which may be stored in panels.
        weight = self.linear.weight[columns] if not is_tied else matrix if padding else self.linear.weight
        self.targets = (AdapterTarget(target_name, TargetKind.HEAD, inputs, shard, columns, weight, bias),)
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
        matrix = weights.get_matrix(f"{name}.weight", shard, make_full_shard(in_features), min_bits=8)
        return cls(concat_matrices([matrix]), target_name or name, vocab_size, weights, bias=bias, is_tied=False)

    def forward(
        self, x: torch.Tensor, adapter_data: AdapterBatchData | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return logits, and None for speculative logits, which are not supported."""
        if adapter_data is None:
            return self._gather(self.ops.linear(x, self.linear, None, ())), None
        (target,), lora_targets = self.targets, adapter_data.find_targets(self.targets)
        lora = adapter_data.lora
        if not lora.changes(lora_targets):
            logits = self.ops.linear(x, self.linear, None, ())
        elif lora.has_rows(lora_targets[0].index):
            logits = self.ops.linear(x, self.linear, None, ())
            replace_row_logits(logits, x, target, adapter_data)
            self.ops.add_lora(logits, x, lora, lora_targets)
            self.ops.scale_and_shift(logits, lora, lora_targets)
        else:
            logits = self.ops.linear(x, self.linear, lora, lora_targets)
        return resize_logits(self._gather(logits), x, target, adapter_data, self.logit_transform), None

    def _gather(self, logits: torch.Tensor) -> torch.Tensor:
        if self.process_group.size() > 1:
            logits = self.process_group.all_gather(logits, dim=-1)[..., : self.vocab_size]
        return logits if self.logit_transform is None else self.logit_transform(logits)
