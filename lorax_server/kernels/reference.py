"""The op table in plain torch, for every device: the specification that every other kernel is tested against.

It is written to be read: sequences attend one after the other, and so do the runs of each adapter's tokens.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from lorax_server.kernels.ops import (
    Activation,
    AttentionSpec,
    CosSin,
    EmbeddingTarget,
    Field,
    LayerCache,
    LinearWeights,
    LoraBatch,
    LoraTarget,
    PagedBatch,
)
from lorax_server.kernels.panels import PanelMatrix

MAX_SCORES = 2**27  # of one product: a long prompt attends in pieces, whose scores fit in memory

# The properties of `Ops`.
records_graphs = False
has_fast_bfloat16 = False
max_lora_rank: int | None = None
choose_rows = None


def make_recorder(max_rows: int) -> None:
    """Return None: these ops read numbers on the host, which a recording would repeat."""


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


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate, in place, the first n dimensions of each head of `[num_tokens, heads, head_dim]`.

    The angles are `[num_tokens, n / 2]`; dimension i turns with dimension i + n / 2.
    """
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    cos, sin = cos.unsqueeze(1).to(x.dtype), sin.unsqueeze(1).to(x.dtype)
    rotated = torch.addcmul(first * cos, second, sin, value=-1)
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(rotated)


def write_kv(k: torch.Tensor, v: torch.Tensor, cache: LayerCache, batch: PagedBatch, spec: AttentionSpec) -> None:
    """Store this forward's keys and values in their slots, in the cache's dtype."""
    tokens = (batch.slots >= 0).nonzero()[:, 0]
    slots, block_size = batch.slots[tokens], cache[0].shape[2]
    if batch.stored is not None:
        tokens = batch.stored[tokens]
    for new, blocks, scale in ((k, cache[0], spec.k_scale), (v, cache[1], spec.v_scale)):
        blocks[slots // block_size, :, slots % block_size] = _quantize(new[tokens], blocks.dtype, scale)


def decode_attention(q: torch.Tensor, cache: LayerCache, batch: PagedBatch, spec: AttentionSpec) -> torch.Tensor:
    """Attend from one token per sequence, whose key and value are in the cache, to its sequence."""
    out = torch.zeros_like(q)
    for row, (new, cached) in enumerate(zip(*batch.read_lengths(), strict=True)):
        if new:
            out[row : row + 1] = _attend(q[row : row + 1], *_read(cache, batch, row, new + cached, spec), spec)
    return out


def prefill_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, batch: PagedBatch, spec: AttentionSpec
) -> torch.Tensor:
    """Attend causally from any number of tokens per sequence to the cached tokens and to each other."""
    out, stop = torch.zeros_like(q), 0
    for row, (new, cached) in enumerate(zip(*batch.read_lengths(), strict=True)):
        tokens = slice(stop, stop + new)
        stop += new
        if new:
            keys, values = _read(cache, batch, row, cached, spec)
            keys = torch.cat([keys, _round(k[tokens], cache[0].dtype, spec.k_scale)])
            values = torch.cat([values, _round(v[tokens], cache[1].dtype, spec.v_scale)])
            out[tokens] = _attend(q[tokens], keys, values, spec)
    return out


def score(q: torch.Tensor, k: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Return `[..., queries, keys]`, squeezed by the soft cap where there is one."""
    scores = q @ k.transpose(-1, -2) * spec.scale
    return scores if spec.soft_cap is None else spec.soft_cap * torch.tanh(scores / spec.soft_cap)


def _attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Attend from the last tokens of a sequence to all of it, each `[tokens, heads, head_dim]`."""
    num_keys, num_heads = len(keys), q.shape[1]
    keys, values = (x.transpose(0, 1).repeat_interleave(num_heads // x.shape[1], dim=0) for x in (keys, values))
    positions = torch.arange(num_keys, device=q.device)
    count = max(1, MAX_SCORES // (num_heads * num_keys))
    pieces = []
    for queries, at in zip(q.split(count), positions[num_keys - len(q) :].split(count), strict=True):
        scores = score(queries.float().transpose(0, 1), keys, spec)  # [heads, queries, keys]
        distances = positions - at[:, None]
        if spec.slopes is not None:
            scores += spec.slopes[:, None, None] * distances
        scores.masked_fill_((distances > 0) | (distances <= -spec.reach), -torch.inf)
        pieces.append((scores.softmax(-1) @ values).transpose(0, 1))
    return torch.cat(pieces).to(q.dtype)


def _read(
    cache: LayerCache, batch: PagedBatch, row: int, length: int, spec: AttentionSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a sequence's first keys and values, `[length, kv_heads, head_dim]` float32."""
    blocks = batch.block_tables[row, : -(-length // cache[0].shape[2])].long()
    keys, values = (x[blocks].transpose(1, 2).flatten(0, 1)[:length] for x in cache)
    return _dequantize(keys, spec.k_scale), _dequantize(values, spec.v_scale)


def _round(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Round as the cache does, so that a token looks the same in the forward that writes it and in later ones."""
    return _dequantize(_quantize(x, dtype, scale), scale)


def _quantize(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Convert to the dtype of a cache."""
    if x.dtype == dtype:
        return x
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-limit, limit).to(dtype)


def _dequantize(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Convert from the dtype of a cache to float32; only float8 is scaled."""
    return x.float() * scale if x.dtype.itemsize == 1 else x.float()


# --- Adapters ---


def add_lora(out: torch.Tensor, x: torch.Tensor, lora: LoraBatch, targets: Sequence[LoraTarget]) -> None:
    if not lora.has_low_rank(targets):
        return
    for target in targets:
        for tokens, adapter, fields in _find_runs(lora, target.index):
            if rank := fields[Field.RANK]:
                local = out[tokens, target.columns]
                lora_a, lora_b = (
                    _take(lora, fields[field], rank, width)
                    for field, width in ((Field.A, x.shape[1]), (Field.B, local.shape[1]))
                )
                low_rank = x[tokens] @ lora_a.t() * lora.scales[adapter, target.index]
                local += low_rank.to(x.dtype) @ lora_b


def scale_and_shift(out: torch.Tensor, lora: LoraBatch, targets: Sequence[LoraTarget]) -> None:
    if not lora.has_vectors(targets):
        return
    for target in targets:
        for tokens, _, fields in _find_runs(lora, target.index):
            local = out[tokens, target.columns]
            if fields[Field.FACTOR] >= 0:
                local *= _take(lora, fields[Field.FACTOR], 1, local.shape[1])
            if fields[Field.SHIFT] >= 0:
                local += _take(lora, fields[Field.SHIFT], 1, local.shape[1])


def adapt_embedding(out: torch.Tensor, ids: torch.Tensor, lora: LoraBatch, target: EmbeddingTarget) -> None:
    width, num_held = out.shape[1], len(target.vocab)
    for tokens, adapter, fields in _find_runs(lora, target.index):
        local = ids[tokens] - target.vocab.start
        if count := fields[Field.NUM_ROWS]:
            row_ids = _take(lora, fields[Field.ROW_IDS], 1, count * 4 // lora.buffer.itemsize)[0].view(torch.int32)
            position = torch.searchsorted(row_ids, local).clamp(max=count - 1)
            has_row = row_ids[position] == local
            rows = _take(lora, fields[Field.ROWS], count, width)
            out[tokens] = torch.where(has_row[:, None], rows[position], out[tokens])
        rank = fields[Field.RANK]
        if rank and num_held:  # nothing where a rank has no part of a small vocabulary
            held = (local >= 0) & (local < num_held)
            low_rank = F.embedding(local.where(held, 0), _take(lora, fields[Field.A], num_held, rank)) * held[:, None]
            low_rank = (low_rank * lora.scales[adapter, target.index]).to(out.dtype)
            out[tokens] += low_rank @ _take(lora, fields[Field.B], rank, width)
    scale_and_shift(out, lora, [LoraTarget(target.index, slice(0, width))])
    for tokens, _, fields in _find_runs(lora, target.index) if target.adds_new_rows else ():
        if count := fields[Field.NUM_NEW_ROWS]:  # after factors and shifts, which are not for them
            new = (ids[tokens] - target.vocab_size).clamp(0, count - 1)
            rows = _take(lora, fields[Field.NEW_ROWS], count, width)
            out[tokens] = torch.where(ids[tokens, None] >= target.vocab_size, rows[new], out[tokens])


def plan_lora(lora: LoraBatch, current: LoraBatch) -> None:  # noqa: ARG001 - the op table names it
    lora.derived.clear()


def _find_runs(lora: LoraBatch, index: int) -> Iterator[tuple[slice, int, list[int]]]:
    """Yield the tokens of each run, their adapter, and its fields at a target."""
    for adapter, start, stop in zip(lora.adapters, lora.bounds, lora.bounds[1:], strict=False):
        if adapter != 0:
            yield slice(start, stop), adapter, lora.host_table[adapter, index].tolist()


def _take(lora: LoraBatch, offset: int, rows: int, width: int) -> torch.Tensor:
    """Return a matrix of the adapters' buffer."""
    return lora.buffer[offset : offset + rows * width].view(rows, width)


# --- Linears and norms ---


def linear(
    x: torch.Tensor, weights: LinearWeights, lora: LoraBatch | None, targets: Sequence[LoraTarget]
) -> torch.Tensor:
    out = F.linear(x, weights.plain, weights.bias)
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
    return activation(gate) * up


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> LinearWeights:
    return LinearWeights(weight, bias)


def look_up(weight: torch.Tensor | PanelMatrix, ids: torch.Tensor) -> torch.Tensor:
    return weight.look_up(ids) if isinstance(weight, PanelMatrix) else F.embedding(ids, weight)


def prepare(linears: Sequence[LinearWeights], with_lora: bool) -> None:
    """Compile nothing: torch brings all."""


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
    # Not F.rms_norm: it is slower on a CPU, and rounds once less than the models do in half precision.
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
    logits: torch.Tensor, words: torch.Tensor | None = None, numbers: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _apply_masks(logits, words, numbers)
    token_ids = find_likeliest(scores)
    return token_ids, log_softmax(scores).gather(-1, token_ids[:, None]).squeeze(-1)


def find_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    temperatures: torch.Tensor | None = None,
    words: torch.Tensor | None = None,
    numbers: torch.Tensor | None = None,
) -> torch.Tensor:
    scores = _apply_masks(logits, words, numbers)
    if temperatures is not None:
        scores = scores / temperatures[:, None]
    return log_softmax(scores).gather(-1, token_ids)


def find_best(
    logits: torch.Tensor, count: int, words: torch.Tensor | None = None, numbers: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    best, token_ids = _apply_masks(logits, words, numbers).topk(count, dim=-1)
    return best, token_ids


def find_likeliest(scores: torch.Tensor) -> torch.Tensor:
    """Return [rows] the token of the highest score, the first of equals. numpy looks at several scores at once on a
    CPU, which torch does not."""
    return torch.from_numpy(scores.numpy().argmax(-1)) if scores.is_cpu else scores.argmax(-1)


def log_softmax(scores: torch.Tensor) -> torch.Tensor:
    """Return log probabilities. The sum is float64: torch's own loses digits of a large vocabulary on a CPU, and its
    order, which depends on the number of rows and on threads, would show."""
    shifted = scores - scores.amax(-1, keepdim=True)
    return shifted.sub_(shifted.exp().sum(-1, keepdim=True, dtype=torch.float64).log_().float())


def unpack_masks(words: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return [masks, vocabulary] bool, the bits of [masks, words] int32, the first the lowest."""
    if words.is_cpu:
        flags = np.unpackbits(words.numpy().view(np.uint8), axis=1, bitorder="little", count=vocab_size)
        return torch.from_numpy(flags).view(torch.bool)
    bits = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> bits) & 1).bool().flatten(1)[:, :vocab_size]


def _apply_masks(logits: torch.Tensor, words: torch.Tensor | None, numbers: torch.Tensor | None) -> torch.Tensor:
    scores = logits.detach().float()
    if words is None or numbers is None:
        return scores
    rows = torch.nonzero(numbers >= 0).flatten()
    allowed = unpack_masks(words[numbers[rows]], logits.shape[-1])
    return scores.index_copy(0, rows, scores[rows].masked_fill(~allowed, -math.inf))
