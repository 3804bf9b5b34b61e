"""All ops in plain torch, for all devices. They are the specification with which the tests compare other kernels.

The code favors readability: it loops over sequences and over LoRA segments.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from lorax_server.kernels.matrix import StoredMatrix
from lorax_server.kernels.ops import (
    SIGMOID,
    Activation,
    AttentionSpec,
    CosSin,
    EmbeddingTarget,
    ExpertMatrices,
    ExpertWeights,
    Field,
    LayerCache,
    LinearWeights,
    LoraBatch,
    LoraTarget,
    PagedBatch,
    RouterSpec,
    Routing,
)
from lorax_server.kernels.quantized import BlockMatrix, QuantizedMatrix, round_inputs
from lorax_server.kernels.whole_sequences import make_mask

MIN_WEIGHT_SUM = 1e-20  # added to sums of router weights, to avoid division by 0
MAX_SCORE_ELEMENTS = 2**27  # limits the memory for attention scores of long prompts

# The properties of `Ops`.
name = "reference (torch)"
records_graphs = False
has_fast_bfloat16 = False
max_lora_rank: int | None = None
sample_tokens = None


def make_recorder(max_rows: int) -> None:
    """Return None, because these ops depend on host values, so a graph cannot replay them."""


# --- Attention ---


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    angles: CosSin | None,
    cache: LayerCache,
    batch: PagedBatch,
    spec: AttentionSpec,
) -> torch.Tensor:
    if angles is not None:
        rotary(q, *angles)
        rotary(k, *angles)
    write_kv(k, v, cache, batch, spec)
    if batch.cu_seqlens is None:
        return decode_attention(q, cache, batch, spec)
    return prefill_attention(q, k, v, cache, batch, spec)


def attend_sequences(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    angles: CosSin | None,
    lengths: Sequence[int],
    spec: AttentionSpec,
) -> torch.Tensor:
    if angles is not None:
        rotary(q, *angles)
        rotary(k, *angles)
    out, start = torch.empty_like(q), 0
    for length in lengths:
        tokens, keys_per_head = slice(start, start + length), q.shape[1] // k.shape[1]
        queries, keys, values = (x[tokens].float().transpose(0, 1) for x in (q, k, v))
        keys, values = (x.repeat_interleave(keys_per_head, dim=0) for x in (keys, values))
        chunk = max(1, MAX_SCORE_ELEMENTS // (q.shape[1] * length))
        for first in range(0, length, chunk):
            rows = range(first, min(first + chunk, length))
            mask = make_mask(rows, range(length), spec, q.device)
            scores = attention_scores(queries[:, rows.start : rows.stop], keys, spec) + mask
            weighted = (_softmax(scores, spec) @ values).transpose(0, 1)
            out[start + rows.start : start + rows.stop] = weighted.to(q.dtype)
        start += length
    return out


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Apply RoPE in place to the first n dimensions of each head of `[num_tokens, heads, head_dim]`.

    The angles are `[num_tokens, n / 2]`; dimension i is rotated with dimension i + n / 2.
    """
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    cos, sin = cos.unsqueeze(1).to(x.dtype), sin.unsqueeze(1).to(x.dtype)
    rotated = torch.addcmul(first * cos, second, sin, value=-1)
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(rotated)


def write_kv(k: torch.Tensor, v: torch.Tensor, cache: LayerCache, batch: PagedBatch, spec: AttentionSpec) -> None:
    """Store new keys and values in their cache slots, in the cache dtype."""
    tokens = (batch.slots >= 0).nonzero()[:, 0]
    slots, block_size = batch.slots[tokens], cache[0].shape[2]
    if batch.stored is not None:
        tokens = batch.stored[tokens]
    for new, blocks, scale in ((k, cache[0], spec.k_scale), (v, cache[1], spec.v_scale)):
        blocks[slots // block_size, :, slots % block_size] = _quantize(new[tokens], blocks.dtype, scale)


def decode_attention(q: torch.Tensor, cache: LayerCache, batch: PagedBatch, spec: AttentionSpec) -> torch.Tensor:
    """Return attention outputs for one new token per sequence, whose key and value are already in the cache."""
    out = torch.zeros_like(q)
    for row, (new, cached) in enumerate(zip(*batch.read_lengths(), strict=True)):
        if new:
            out[row : row + 1] = _attend(q[row : row + 1], *_read_cache(cache, batch, row, new + cached, spec), spec)
    return out


def prefill_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, batch: PagedBatch, spec: AttentionSpec
) -> torch.Tensor:
    """Return causal attention outputs for any number of new tokens per sequence, over cached and new tokens."""
    out, stop = torch.zeros_like(q), 0
    for row, (new, cached) in enumerate(zip(*batch.read_lengths(), strict=True)):
        tokens = slice(stop, stop + new)
        stop += new
        if new:
            keys, values = _read_cache(cache, batch, row, cached, spec)
            keys = torch.cat([keys, _round_to_cache(k[tokens], cache[0].dtype, spec.k_scale)])
            values = torch.cat([values, _round_to_cache(v[tokens], cache[1].dtype, spec.v_scale)])
            out[tokens] = _attend(q[tokens], keys, values, spec)
    return out


def attention_scores(q: torch.Tensor, k: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Return attention scores `[..., queries, keys]`, with the soft cap applied."""
    scores = q @ k.transpose(-1, -2) * spec.scale
    return scores if spec.soft_cap is None else spec.soft_cap * torch.tanh(scores / spec.soft_cap)


def _attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Return attention outputs of a sequence's last tokens over all its tokens, `[tokens, heads, head_dim]`."""
    num_keys, num_heads = len(keys), q.shape[1]
    keys, values = (x.transpose(0, 1).repeat_interleave(num_heads // x.shape[1], dim=0) for x in (keys, values))
    positions = torch.arange(num_keys, device=q.device)
    count = max(1, MAX_SCORE_ELEMENTS // (num_heads * num_keys))
    pieces = []
    for queries, query_positions in zip(q.split(count), positions[num_keys - len(q) :].split(count), strict=True):
        scores = attention_scores(queries.float().transpose(0, 1), keys, spec)  # [heads, queries, keys]
        distances = positions - query_positions[:, None]
        if spec.slopes is not None:
            scores += spec.slopes[:, None, None] * distances
        scores.masked_fill_((distances > 0) | (distances <= -spec.window_or_max), -torch.inf)
        pieces.append((_softmax(scores, spec) @ values).transpose(0, 1))
    return torch.cat(pieces).to(q.dtype)


def _softmax(scores: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Return the attention weights for scores `[heads, queries, keys]`."""
    if spec.sinks is None:
        return scores.softmax(-1)
    sinks = spec.sinks[:, None, None].expand(*scores.shape[:2], 1)
    return torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]


def _read_cache(
    cache: LayerCache, batch: PagedBatch, row: int, length: int, spec: AttentionSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first `length` cached keys and values for sequence `row`, `[length, kv_heads, head_dim]` float32."""
    blocks = batch.block_tables[row, : -(-length // cache[0].shape[2])].long()
    keys, values = (x[blocks].transpose(1, 2).flatten(0, 1)[:length] for x in cache)
    return _dequantize(keys, spec.k_scale), _dequantize(values, spec.v_scale)


def _round_to_cache(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Return `x` in float32, rounded to the cache dtype, so that uncached and cached keys and values are equal."""
    return _dequantize(_quantize(x, dtype, scale), scale)


def _quantize(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Return keys or values in the cache dtype, divided by `scale` if the dtype differs."""
    if x.dtype == dtype:
        return x
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-limit, limit).to(dtype)


def _dequantize(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Return cached keys or values in float32. Only float8 values are multiplied by `scale`."""
    return x.float() * scale if x.dtype.itemsize == 1 else x.float()


# --- Adapters ---


def add_lora(out: torch.Tensor, x: torch.Tensor, lora: LoraBatch, targets: Sequence[LoraTarget]) -> None:
    if not lora.has_low_rank(targets):
        return
    for target in targets:
        for tokens, adapter, fields in adapter_segments(lora, target.index):
            if rank := fields[Field.RANK]:
                local = out[tokens, target.columns]
                lora_a, lora_b = (
                    view_buffer(lora, fields[field] + lora.expert * rank * width, rank, width)
                    for field, width in ((Field.A, x.shape[1]), (Field.B, local.shape[1]))
                )
                low_rank = x[tokens] @ lora_a.t() * lora.scales[adapter, target.index]
                local += low_rank.to(x.dtype) @ lora_b


def scale_and_shift(out: torch.Tensor, lora: LoraBatch, targets: Sequence[LoraTarget]) -> None:
    if not lora.has_vectors(targets):
        return
    for target in targets:
        for tokens, _, fields in adapter_segments(lora, target.index):
            local = out[tokens, target.columns]
            if fields[Field.OUTPUT_SCALE] >= 0:
                local *= view_buffer(lora, fields[Field.OUTPUT_SCALE], 1, local.shape[1])
            if fields[Field.OUTPUT_BIAS] >= 0:
                local += view_buffer(lora, fields[Field.OUTPUT_BIAS], 1, local.shape[1])


def adapt_embedding(out: torch.Tensor, ids: torch.Tensor, lora: LoraBatch, target: EmbeddingTarget) -> None:
    width, num_held = out.shape[1], len(target.vocab)
    for tokens, adapter, fields in adapter_segments(lora, target.index):
        local = ids[tokens] - target.vocab.start
        if count := fields[Field.NUM_ROWS]:
            row_ids = view_buffer(lora, fields[Field.ROW_IDS], 1, count * 4 // lora.buffer.itemsize)[0].view(
                torch.int32
            )
            position = torch.searchsorted(row_ids, local).clamp(max=count - 1)
            has_row = row_ids[position] == local
            rows = view_buffer(lora, fields[Field.ROWS], count, width)
            out[tokens] = torch.where(has_row[:, None], rows[position], out[tokens])
        rank = fields[Field.RANK]
        if rank and num_held:  # small vocabularies can leave a rank without tokens
            is_local = (local >= 0) & (local < num_held)
            low_rank = (
                F.embedding(local.where(is_local, 0), view_buffer(lora, fields[Field.A], num_held, rank))
                * is_local[:, None]
            )
            low_rank = (low_rank * lora.scales[adapter, target.index]).to(out.dtype)
            out[tokens] += low_rank @ view_buffer(lora, fields[Field.B], rank, width)
    scale_and_shift(out, lora, [LoraTarget(target.index, slice(0, width))])
    for tokens, _, fields in adapter_segments(lora, target.index) if target.adds_new_rows else ():
        if count := fields[Field.NUM_NEW_ROWS]:  # output scales and biases do not apply to new rows
            new = (ids[tokens] - target.vocab_size).clamp(0, count - 1)
            rows = view_buffer(lora, fields[Field.NEW_ROWS], count, width)
            out[tokens] = torch.where(ids[tokens, None] >= target.vocab_size, rows[new], out[tokens])


def refresh_lora_plan(lora: LoraBatch, current: LoraBatch) -> None:  # noqa: ARG001 - part of the op's signature
    lora.derived.clear()


def adapter_segments(lora: LoraBatch, index: int) -> Iterator[tuple[slice, int, list[int]]]:
    """Yield the tokens, the adapter and the table fields of each LoRA segment with an adapter."""
    for adapter, start, stop in zip(lora.adapters, lora.bounds, lora.bounds[1:], strict=False):
        if adapter != 0:
            yield slice(start, stop), adapter, lora.host_table[adapter, index].tolist()


def view_buffer(lora: LoraBatch, offset: int, rows: int, width: int) -> torch.Tensor:
    """Return a view of the adapter buffer as a matrix that starts at `offset`."""
    return lora.buffer[offset : offset + rows * width].view(rows, width)


# --- Linears and norms ---


def linear(
    x: torch.Tensor, weights: LinearWeights, lora: LoraBatch | None, targets: Sequence[LoraTarget]
) -> torch.Tensor:
    out = F.linear(round_inputs(x) if weights.rounds_inputs else x, weights.plain, weights.bias)
    if lora is not None:
        add_lora(out, x, lora, targets)
        scale_and_shift(out, lora, targets)
    return out


def gated_linear(
    x: torch.Tensor,
    weights: LinearWeights,
    activation: Activation,
    lora: LoraBatch | None,
    targets: Sequence[LoraTarget],
) -> torch.Tensor:
    gate, up = linear(x, weights, lora, targets).chunk(2, dim=-1)
    return activation.apply_gate(gate, up)


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    return activation(x)


def keeps_quantized(matrix: QuantizedMatrix) -> bool:
    return not matrix.has_levels or matrix.rounds_inputs


def make_linear(weight: torch.Tensor | StoredMatrix, bias: torch.Tensor | None) -> LinearWeights:
    if isinstance(weight, BlockMatrix) and weight.rounds_inputs:  # there are no kernels for these levels
        return LinearWeights(weight.read(), bias, rounds_inputs=True)
    return LinearWeights(weight, bias)


def route(
    logits: torch.Tensor,
    top_k: int,
    spec: RouterSpec,
    bias: torch.Tensor | None = None,
    activate: Callable[[torch.Tensor, Activation], torch.Tensor] = activate,
) -> Routing:
    """Implement `Ops.route` with the given `activate`. Equal scores are ranked as by `torch.topk`."""
    scores = logits.float().softmax(-1) if spec.scoring == "softmax" else activate(logits.float(), SIGMOID)
    ranking = scores if bias is None else scores + bias
    if spec.top_groups < spec.groups:
        by_group = ranking.view(len(ranking), spec.groups, -1)
        best = by_group.topk(spec.scores_per_group, dim=-1).values.sum(-1)
        is_open = torch.zeros_like(best).scatter(1, best.topk(spec.top_groups, dim=-1).indices, 1.0)
        ranking = by_group.masked_fill(is_open[..., None] == 0, -math.inf).flatten(1)
    weights, experts = ranking.topk(top_k, dim=-1)
    if bias is not None:
        weights = scores.gather(1, experts)
    if spec.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + MIN_WEIGHT_SUM)
    return Routing(experts, weights if spec.scale == 1 else weights * spec.scale)


def run_experts(
    x: torch.Tensor, routing: Routing, experts: ExpertWeights, lora: LoraBatch | None, targets: Sequence[LoraTarget]
) -> torch.Tensor:
    return loop_over_experts(x, routing, experts, lora, targets, linear, gated_linear)


def loop_over_experts(
    x: torch.Tensor,
    routing: Routing,
    experts: ExpertWeights,
    lora: LoraBatch | None,
    targets: Sequence[LoraTarget],
    linear: Callable[..., torch.Tensor],
    gated_linear: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Implement `Ops.run_experts` with the given ops, one expert after the other."""
    out = x.new_zeros(x.shape, dtype=torch.float32)
    for expert in routing.experts.unique().tolist():
        tokens, choices = (routing.experts == expert).nonzero(as_tuple=True)
        batch = None if lora is None else lora.select_expert(expert, tokens)
        gated = gated_linear(x[tokens], experts.gate_up[expert], experts.activation, batch, targets[:2])
        result = linear(gated, experts.down[expert], batch, targets[2:])
        out[tokens] += result.float() * routing.weights[tokens, choices, None]
    return out.to(x.dtype)


def make_experts(
    count: int,  # noqa: ARG001 - part of the op's signature
    matrices: Iterable[ExpertMatrices],
    activation: Activation,
    make: Callable[..., LinearWeights] = make_linear,
) -> ExpertWeights:
    gate_up, down = [], []
    for expert in matrices:
        gate_up.append(make(expert.gate_up, expert.gate_up_bias))
        down.append(make(expert.down, expert.down_bias))
    return ExpertWeights(gate_up, down, activation)


def look_up_rows(weight: torch.Tensor | StoredMatrix, ids: torch.Tensor) -> torch.Tensor:
    return weight.look_up_rows(ids) if isinstance(weight, StoredMatrix) else F.embedding(ids, weight)


def prepare(linears: Sequence[LinearWeights], with_lora: bool) -> None:
    """Return immediately: these ops use torch, which has no kernels to compile."""


def rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: torch.Tensor,
    lora: LoraBatch | None = None,
    targets: Sequence[LoraTarget] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    if residual is not None:
        x = x + residual
    # Not F.rms_norm: it is slower on a CPU and skips a rounding step of the models in half precision.
    wide = x.float()
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = torch.addcmul(eps, length, length, value=1 / x.shape[-1]).rsqrt_()
    normed = wide * scale
    normed = normed.to(x.dtype).mul_(weight) if weight.dtype == x.dtype else normed.mul_(weight).to(x.dtype)
    if lora is not None:
        scale_and_shift(normed, lora, targets)
    return normed, x


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    lora: LoraBatch | None = None,
    targets: Sequence[LoraTarget] = (),
) -> torch.Tensor:
    normed = F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    if lora is not None:
        scale_and_shift(normed, lora, targets)
    return normed


# --- Sampling ---


def choose_greedy(
    logits: torch.Tensor, token_masks: torch.Tensor | None = None, mask_indices: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _apply_masks(logits, token_masks, mask_indices)
    token_ids = argmax_scores(scores)
    return token_ids, log_softmax(scores).gather(-1, token_ids[:, None]).squeeze(-1)


def gather_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    temperatures: torch.Tensor | None = None,
    token_masks: torch.Tensor | None = None,
    mask_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    scores = _apply_masks(logits, token_masks, mask_indices)
    if temperatures is not None:
        scores = scores / temperatures[:, None]
    return log_softmax(scores).gather(-1, token_ids)


def top_k_scores(
    logits: torch.Tensor, count: int, token_masks: torch.Tensor | None = None, mask_indices: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    best, token_ids = _apply_masks(logits, token_masks, mask_indices).topk(count, dim=-1)
    return best, token_ids


def argmax_scores(scores: torch.Tensor) -> torch.Tensor:
    """Return each row's first token with the highest score. On a CPU, uses NumPy's argmax, which is faster."""
    return torch.from_numpy(scores.numpy().argmax(-1)) if scores.is_cpu else scores.argmax(-1)


def log_softmax(scores: torch.Tensor) -> torch.Tensor:
    """Return log probabilities. The softmax denominator is summed in float64.

    On a CPU, torch's float32 sum loses precision for large vocabularies, and its summation order depends on the batch.
    """
    shifted = scores - scores.amax(-1, keepdim=True)
    return shifted.sub_(shifted.exp().sum(-1, keepdim=True, dtype=torch.float64).log_().float())


def unpack_masks(token_masks: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return token masks as bool [masks, vocabulary], unpacked from int32 [masks, words], lowest bit first."""
    if token_masks.is_cpu:
        flags = np.unpackbits(token_masks.numpy().view(np.uint8), axis=1, bitorder="little", count=vocab_size)
        return torch.from_numpy(flags).view(torch.bool)
    bits = torch.arange(32, dtype=torch.int32, device=token_masks.device)
    return ((token_masks[:, :, None] >> bits) & 1).bool().flatten(1)[:, :vocab_size]


def _apply_masks(
    logits: torch.Tensor, token_masks: torch.Tensor | None, mask_indices: torch.Tensor | None
) -> torch.Tensor:
    scores = logits.detach().float()
    if token_masks is None or mask_indices is None:
        return scores
    rows = torch.nonzero(mask_indices >= 0).flatten()
    allowed = unpack_masks(token_masks[mask_indices[rows]], logits.shape[-1])
    return scores.index_copy(0, rows, scores[rows].masked_fill(~allowed, -math.inf))
