"""The op table in plain torch: what every other kernel is tested against, and what runs on a CPU."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F

from lorax_server.kernels.ops import AttentionSpec, LoraSegments, PagedBatch

# Runs of one adapter's tokens from this length on are worth a matrix product of their own.
LONG_SEGMENT = 8


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: PagedBatch,
    spec: AttentionSpec,
) -> None:
    tokens, blocks, offsets = batch.once("writes", lambda: _writes(batch, k_cache.shape[2]))
    if tokens is not None:
        k, v = k[tokens], v[tokens]
    # Not index_copy_, which float8 lacks on a CPU.
    k_cache[blocks, :, offsets] = _quantize(k, k_cache.dtype, spec.k_scale)
    v_cache[blocks, :, offsets] = _quantize(v, v_cache.dtype, spec.v_scale)


def prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: PagedBatch,
    spec: AttentionSpec,
) -> torch.Tensor:
    plan = batch.once("prefill", lambda: _plan_prefill(batch))
    if k_cache.dtype != k.dtype:  # so that a token is seen the same in the forward that writes it and in later ones
        k = _dequantize(_quantize(k, k_cache.dtype, spec.k_scale), k.dtype, spec.k_scale)
        v = _dequantize(_quantize(v, v_cache.dtype, spec.v_scale), v.dtype, spec.v_scale)
    out = torch.empty_like(q)
    for group in plan.groups:
        out[group.tokens] = _attend_group(group, q, k, v, k_cache, v_cache, batch, spec).flatten(0, 1)
    if plan.singles is not None:
        out[plan.single_tokens] = decode_attention(q[plan.single_tokens], k_cache, v_cache, plan.singles, spec)
    return out


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: PagedBatch,
    spec: AttentionSpec,
) -> torch.Tensor:
    # Each block of a sequence is attended to on its own, in place where the batch owns most of a stretch of the
    # cache; the results are then weighed by the softmax mass of their blocks. Nothing is padded to the longest.
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    tiles = batch.once(("decode", spec.window), lambda: _plan_decode(batch, block_size, spec.window, k_cache))
    k = _tiles_of(k_cache, tiles, q.dtype, spec.k_scale)
    v = _tiles_of(v_cache, tiles, q.dtype, spec.v_scale)
    # The heads that share a key and value head are rows of one small product.
    grouped = q.view(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    queries = grouped.expand(len(tiles.rows), -1, -1, -1) if num_seqs == 1 else grouped.index_select(0, tiles.rows)
    out, mass = _attend_with_mass(queries, k, v, tiles.mask, spec.scale)
    return _merge_tiles(out.flatten(1, 2), mass.flatten(1, 2), tiles.rows, num_seqs)


def rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if residual is not None:
        x = x + residual
    # Not F.rms_norm, which takes three times as long on a CPU, and rounds once less in half precision.
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return weight * (wide * scale).to(x.dtype), x


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    cos, sin = cos.unsqueeze(1).to(x.dtype), sin.unsqueeze(1).to(x.dtype)
    rotated = torch.addcmul(first * cos, second, sin, value=-1)
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(rotated)


def gated_activation(gate_up: torch.Tensor, activation: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return activation(gate) * up


def lora_shrink(x: torch.Tensor, segments: LoraSegments) -> torch.Tensor:
    width = x.shape[1]
    ranks, offsets = segments.ranks.tolist(), segments.a_offsets.tolist()
    low_rank = x.new_zeros(x.shape[0], max(ranks, default=0))
    for index, start, stop in _long_segments(segments):
        factor = segments.buffer[offsets[index] :][: ranks[index] * width].view(ranks[index], width)
        low_rank[start:stop, : ranks[index]] = x[start:stop] @ factor.t()
    short = _short_rows(segments)
    if short is not None:
        rows = _rows_at(segments.buffer, segments.a_offsets[short.segments] + short.columns * width, width)
        low_rank[short.tokens, short.columns] = (rows * x[short.tokens]).sum(-1)
    return low_rank


def lora_expand(low_rank: torch.Tensor, segments: LoraSegments, out: torch.Tensor) -> None:
    width = out.shape[1]
    ranks, offsets, scales = segments.ranks.tolist(), segments.b_offsets.tolist(), segments.scales.tolist()
    for index, start, stop in _long_segments(segments):
        factor = segments.buffer[offsets[index] :][: ranks[index] * width].view(ranks[index], width)
        out[start:stop] += (low_rank[start:stop, : ranks[index]] @ factor) * scales[index]
    short = _short_rows(segments)
    if short is not None:
        rows = _rows_at(segments.buffer, segments.b_offsets[short.segments] + short.columns * width, width)
        weights = low_rank[short.tokens, short.columns] * segments.scales[short.segments].to(low_rank.dtype)
        out.index_add_(0, short.tokens, rows * weights[:, None])


# --- keys and values in blocks


def _writes(batch: PagedBatch, block_size: int) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Which tokens are stored, and in which block and place. A slot of -1 stores nothing."""
    tokens, slots = batch.written, batch.slots
    kept = slots >= 0
    if not bool(kept.all()):
        tokens = kept.nonzero()[:, 0] if tokens is None else tokens[kept]
        slots = slots[kept]
    return tokens, slots // block_size, slots % block_size


def _quantize(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    if x.dtype == dtype:
        return x
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-limit, limit).to(dtype)


def _dequantize(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    return x if x.dtype == dtype else (x.float() * scale).to(dtype)


# --- decode: one query per sequence, over the blocks of its sequence


@dataclass(frozen=True)
class _Tiles:
    """The blocks to attend to, as one stretch of the cache or as a list."""

    rows: torch.Tensor  # [num_tiles] the sequence a tile belongs to
    mask: torch.Tensor  # [num_tiles, 1, 1, block_size] added to the scores
    blocks: torch.Tensor  # [num_tiles]
    stretch: tuple[int, int] | None  # tiles are these blocks of the cache, in its own order


def _plan_decode(batch: PagedBatch, block_size: int, window: int | None, cache: torch.Tensor) -> _Tiles:
    lengths = batch.input_lengths + batch.cache_lengths
    first = torch.zeros_like(lengths) if window is None else (lengths - window).clamp(min=0)
    start, stop = first // block_size, -(-lengths // block_size)
    counts = stop - start
    rows = torch.repeat_interleave(counts)
    columns = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows] + start[rows]
    blocks = batch.block_tables[rows, columns].long()
    positions = columns[:, None] * block_size + torch.arange(block_size, device=rows.device)
    hidden = (positions >= lengths[rows, None]) | (positions < first[rows, None])
    mask = torch.zeros(positions.shape, device=rows.device)
    mask = mask.masked_fill_(hidden, torch.finfo(torch.float32).min)
    stretch = _stretch(blocks, cache)
    if stretch is not None:
        rows, mask = _in_cache_order(rows, mask, blocks - stretch[0], stretch[1] - stretch[0])
    return _Tiles(rows, mask[:, None, None], blocks, stretch)


def _stretch(blocks: torch.Tensor, cache: torch.Tensor) -> tuple[int, int] | None:
    """The stretch of the cache that holds these blocks, if at least half of it is theirs and none is shared."""
    if cache.device.type != "cpu" or not cache.dtype.itemsize > 1:
        return None
    low, high = int(blocks.min()), int(blocks.max()) + 1
    if 2 * len(blocks) < high - low or len(blocks.unique()) < len(blocks):
        return None
    return low, high


def _in_cache_order(
    rows: torch.Tensor, mask: torch.Tensor, places: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same tiles in the order of the cache; blocks that are not ours are masked as a whole."""
    ordered_rows = rows.new_zeros(count)
    ordered_mask = mask.new_full((count, mask.shape[1]), torch.finfo(torch.float32).min)
    ordered_rows[places] = rows
    ordered_mask[places] = mask
    return ordered_rows, ordered_mask


def _tiles_of(cache: torch.Tensor, tiles: _Tiles, dtype: torch.dtype, scale: float) -> torch.Tensor:
    if tiles.stretch is not None:
        return cache[tiles.stretch[0] : tiles.stretch[1]]
    return _dequantize(cache.index_select(0, tiles.blocks), dtype, scale)


def _attend_with_mass(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention `[tiles, heads, queries, head_dim]` and the log of its softmax mass. Scores are float32 throughout."""
    if q.device.type == "cpu":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(q, k, v, 0.0, False, attn_mask=mask.to(q.dtype), scale=scale)  # type: ignore[no-any-return]
    scores = q.float() @ k.float().transpose(-1, -2) * scale + mask
    mass = scores.logsumexp(-1)
    return ((scores - mass[..., None]).exp() @ v.float()).to(q.dtype), mass


def _merge_tiles(out: torch.Tensor, mass: torch.Tensor, rows: torch.Tensor, num_seqs: int) -> torch.Tensor:
    """Join the tiles of each sequence: `out` `[tiles, heads, head_dim]`, `mass` `[tiles, heads]`."""
    mass = mass.float()
    if num_seqs == 1:
        return (out * mass.softmax(0)[..., None].to(out.dtype)).sum(0, keepdim=True)
    highest = mass.new_full((num_seqs, mass.shape[1]), torch.finfo(torch.float32).min)
    highest.scatter_reduce_(0, rows[:, None].expand_as(mass), mass, "amax")
    weights = (mass - highest.index_select(0, rows)).exp_()
    total = torch.zeros_like(highest).index_add_(0, rows, weights)
    joined = out.new_zeros(num_seqs, *out.shape[1:], dtype=torch.float32)
    joined.index_add_(0, rows, out.float() * weights[..., None])
    return (joined / total[..., None]).to(out.dtype)


# --- prefill: sequences of equal shape are attended to together


@dataclass(frozen=True)
class _Group:
    """Sequences with the same number of new and of cached tokens."""

    rows: list[int]
    tokens: slice | torch.Tensor
    num_new: int
    num_cached: int


@dataclass(frozen=True)
class _PrefillPlan:
    groups: list[_Group]
    singles: PagedBatch | None  # the sequences of which a single token continues a cached sequence
    single_tokens: torch.Tensor


def _plan_prefill(batch: PagedBatch) -> _PrefillPlan:
    new, cached = batch.input_lengths.tolist(), batch.cache_lengths.tolist()
    starts = [0]
    for length in new:
        starts.append(starts[-1] + length)
    single = [row for row in range(len(new)) if new[row] == 1 and cached[row] > 0]
    others = [row for row in range(len(new)) if new[row] > 0 and not (new[row] == 1 and cached[row] > 0)]
    device = batch.block_tables.device
    groups = []
    for (num_new, num_cached), rows_of_shape in groupby(
        sorted(others, key=lambda row: (new[row], cached[row], row)), key=lambda row: (new[row], cached[row])
    ):
        rows = list(rows_of_shape)
        groups.append(_Group(rows, _tokens_of(rows, starts, num_new, device), num_new, num_cached))
    at = torch.tensor(single, dtype=torch.long, device=device)
    singles = PagedBatch(
        block_tables=batch.block_tables[at],
        input_lengths=batch.input_lengths[at],
        cache_lengths=batch.cache_lengths[at],
        slots=batch.slots,
    )
    single_tokens = torch.tensor([starts[row] for row in single], dtype=torch.long, device=device)
    return _PrefillPlan(groups, singles if single else None, single_tokens)


def _tokens_of(rows: list[int], starts: list[int], num_new: int, device: torch.device) -> slice | torch.Tensor:
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(starts[rows[0]], starts[rows[-1]] + num_new)
    first = torch.tensor([starts[row] for row in rows], device=device)
    return (first[:, None] + torch.arange(num_new, device=device)).flatten()


def _attend_group(
    group: _Group,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: PagedBatch,
    spec: AttentionSpec,
) -> torch.Tensor:  # [sequences, new tokens, heads, head_dim]
    shape = (len(group.rows), group.num_new)
    queries = q[group.tokens].unflatten(0, shape).transpose(1, 2)
    keys = k[group.tokens].unflatten(0, shape).transpose(1, 2)
    values = v[group.tokens].unflatten(0, shape).transpose(1, 2)
    if group.num_cached:
        keys = torch.cat([_cached(k_cache, group, batch, q.dtype, spec.k_scale), keys], dim=2)
        values = torch.cat([_cached(v_cache, group, batch, q.dtype, spec.v_scale), values], dim=2)
    plain = group.num_cached == 0 and spec.window is None
    mask = None if plain else _causal_mask(group.num_new, group.num_cached, spec.window, q.device)
    out = F.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=mask,
        is_causal=plain,
        scale=spec.scale,
        enable_gqa=keys.shape[1] != queries.shape[1],
    )
    return out.transpose(1, 2)


def _cached(cache: torch.Tensor, group: _Group, batch: PagedBatch, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """The cached tokens of the group's sequences: `[sequences, kv_heads, tokens, head_dim]`."""
    num_blocks = -(-group.num_cached // cache.shape[2])
    blocks = batch.block_tables[group.rows, :num_blocks].long()
    gathered = _dequantize(cache[blocks], dtype, scale).transpose(1, 2).flatten(2, 3)
    return gathered[:, :, : group.num_cached]


def _causal_mask(num_new: int, num_cached: int, window: int | None, device: torch.device) -> torch.Tensor:
    """True where a query may look: `[new tokens, cached and new tokens]`."""
    queries = torch.arange(num_cached, num_cached + num_new, device=device)[:, None]
    keys = torch.arange(num_cached + num_new, device=device)[None]
    visible = keys <= queries
    return visible if window is None else visible & (keys > queries - window)


# --- LoRA: tokens of one adapter in a run are multiplied together, scattered ones row by row of their factors


@dataclass(frozen=True)
class _ShortRows:
    """One entry for each rank of each token of the short segments."""

    segments: torch.Tensor
    tokens: torch.Tensor
    columns: torch.Tensor  # which rank


def _long_segments(segments: LoraSegments) -> list[tuple[int, int, int]]:
    bounds, ranks = segments.bounds, segments.ranks.tolist()
    return [
        (index, bounds[index], bounds[index + 1])
        for index, rank in enumerate(ranks)
        if rank and bounds[index + 1] - bounds[index] >= LONG_SEGMENT
    ]


def _short_rows(segments: LoraSegments) -> _ShortRows | None:
    device = segments.ranks.device
    bounds = torch.tensor(segments.bounds, device=device)
    lengths = bounds.diff()
    lengths = torch.where(lengths < LONG_SEGMENT, lengths, 0)
    segment_of_token = torch.repeat_interleave(lengths)
    tokens = torch.arange(len(segment_of_token), device=device) - (lengths.cumsum(0) - lengths)[segment_of_token]
    tokens = tokens + bounds[segment_of_token]
    counts = segments.ranks[segment_of_token]
    entry = torch.repeat_interleave(counts)
    if len(entry) == 0:
        return None
    columns = torch.arange(len(entry), device=device) - (counts.cumsum(0) - counts)[entry]
    return _ShortRows(segment_of_token[entry], tokens[entry], columns)


def _rows_at(buffer: torch.Tensor, offsets: torch.Tensor, width: int) -> torch.Tensor:
    """Rows of `width` elements that begin anywhere in a flat buffer."""
    windows = buffer.as_strided((buffer.numel() - width + 1, width), (1, 1))
    return windows.index_select(0, offsets)
