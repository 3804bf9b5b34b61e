"""The projection of multi-head latent attention from cached latents to keys and values."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from lorax_server.adapters.batch import AdapterBatchData
from lorax_server.adapters.target import AdapterTarget, TargetKind
from lorax_server.distributed import Shard, make_full_shard
from lorax_server.kernels import Field, reference
from lorax_server.weights import Weights


class _Adapter(NamedTuple):
    """The changes that one adapter makes to the projection, and the tokens in the batch that use the adapter.

    The second dimension of B, and the first dimension of the other vectors, is the head.
    """

    tokens: slice
    lora_a: torch.Tensor  # [rank, latent]
    lora_b: torch.Tensor  # [rank, heads, key + value], multiplied by the LoRA scale
    output_scale: torch.Tensor | None  # [heads, key + value]
    output_bias: torch.Tensor | None  # [heads, key + value]


class LatentProjection(nn.Module):
    """A matrix that maps a token's latent to the keys and values of all heads, without computing keys and values.

    Attention runs on the latents instead: a score is `q . (K c) = (K.T q) . c`, and an output is
    `sum(w V c) = V sum(w c)`, for a query q, latents c, attention weights w, and a head's key and value matrices K and
    V. The same identities hold for LoRA factors and output scales. A bias of the keys changes all scores of a query by
    the same amount, so it has no effect.
    """

    def __init__(self, weights: Weights, name: str, latent_size: int, outputs: Shard, key_size: int, num_heads: int):
        """Load the matrix. `outputs` is the shard with the key and value of each of this rank's `num_heads` heads."""
        super().__init__()
        self.ops = weights.ops
        self.num_heads, self.key_size = num_heads, key_size
        weight = weights.get_sharded(f"{name}.weight", 0, outputs, (outputs.full, latent_size))
        by_head = weight.view(num_heads, -1, latent_size)
        self.keys = [self.ops.make_linear(head[:key_size].t().contiguous(), None) for head in by_head]
        self.values = [self.ops.make_linear(head[key_size:].contiguous(), None) for head in by_head]
        columns = slice(0, outputs.size)
        inputs = make_full_shard(latent_size)
        # The complete matrix is kept for adapters such as DoRA, whose scales depend on it.
        self.targets = (AdapterTarget(name, TargetKind.LINEAR, inputs, outputs, columns, weight, None),)

    def project_queries(self, queries: torch.Tensor, adapter_data: AdapterBatchData | None) -> list[torch.Tensor]:
        """Return `K.T q` for queries `[num_tokens, heads, key]`: one tensor `[num_tokens, latent]` for each head."""
        adapters = list(self._find_adapters(adapter_data))
        for adapter in adapters:
            if adapter.output_scale is not None:
                queries = queries.clone() if adapter is adapters[0] else queries
                queries[adapter.tokens] *= adapter.output_scale[:, : self.key_size]
        out = [self.ops.linear(queries[:, head], matrix, None, ()) for head, matrix in enumerate(self.keys)]
        for tokens, lora_a, lora_b, *_ in adapters:
            low_rank = torch.einsum("thk,rhk->thr", queries[tokens], lora_b[..., : self.key_size])
            for head, latents in enumerate(out):
                latents[tokens] += low_rank[:, head] @ lora_a
        return out

    def project_outputs(self, latents: torch.Tensor, adapter_data: AdapterBatchData | None) -> torch.Tensor:
        """Return `V a` for the attention outputs `[num_tokens, heads, latent]`, as `[num_tokens, heads * value]`."""
        heads = [self.ops.linear(latents[:, head], matrix, None, ()) for head, matrix in enumerate(self.values)]
        out = torch.cat(heads, dim=1)
        by_head = out.view(len(out), self.num_heads, -1)
        for tokens, lora_a, lora_b, output_scale, output_bias in self._find_adapters(adapter_data):
            low_rank = latents[tokens] @ lora_a.t()
            by_head[tokens] += torch.einsum("thr,rhv->thv", low_rank, lora_b[..., self.key_size :])
            if output_scale is not None:
                by_head[tokens] *= output_scale[:, self.key_size :]
            if output_bias is not None:
                by_head[tokens] += output_bias[:, self.key_size :]
        return out

    def _find_adapters(self, adapter_data: AdapterBatchData | None) -> Iterator[_Adapter]:
        if adapter_data is None:
            return
        lora, (target,) = adapter_data.lora, adapter_data.find_targets(self.targets)
        if lora.in_graph or not lora.changes([target]):
            return  # graphs are not replayed for batches that change this matrix
        inputs, outputs = self.targets[0].inputs.size, self.targets[0].outputs.size

        def view(offset: int, rows: int, width: int) -> torch.Tensor:
            return reference.view_buffer(lora, offset, rows, width)

        def view_vector(offset: int) -> torch.Tensor | None:
            return None if offset < 0 else view(offset, 1, outputs).view(self.num_heads, -1)

        for tokens, adapter, fields in reference.adapter_segments(lora, target.index):
            rank = fields[Field.RANK]
            lora_b = view(max(fields[Field.B], 0), rank, outputs) * lora.scales[adapter, target.index]
            yield _Adapter(
                tokens,
                view(max(fields[Field.A], 0), rank, inputs),
                lora_b.view(rank, self.num_heads, outputs // self.num_heads),
                view_vector(fields[Field.OUTPUT_SCALE]),
                view_vector(fields[Field.OUTPUT_BIAS]),
            )
