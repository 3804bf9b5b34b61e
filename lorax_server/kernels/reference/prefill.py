"""Prefill: any number of new tokens per sequence. Sequences of equal shape are attended to together."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby

import torch
import torch.nn.functional as F

from lorax_server.kernels.ops import AttentionSpec, LayerCache, PagedBatch
from lorax_server.kernels.reference.cache import dequantize, quantize
from lorax_server.kernels.reference.decode import decode_attention, score

Decode = Callable[[torch.Tensor, LayerCache, PagedBatch, AttentionSpec], torch.Tensor]

MAX_SCORES = 2**27  # at once, where they are written out


def prefill_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, batch: PagedBatch, spec: AttentionSpec
) -> torch.Tensor:
    return prefill_with(decode_attention, q, k, v, cache, batch, spec)


def prefill_with(
    decode: Decode,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: LayerCache,
    batch: PagedBatch,
    spec: AttentionSpec,
) -> torch.Tensor:
    """Attend as `prefill_attention`; sequences with one new token go through `decode`."""
    plan = batch.once("prefill", lambda: _plan_prefill(batch, cache[0].shape[2]))
    sources = [_round(k, cache[0], spec.k_scale), _round(v, cache[1], spec.v_scale)]
    out = torch.empty_like(q)
    for group in plan.groups:
        keys, values = (_gather(*source, group) for source in sources)
        out[group.tokens] = _attend(group, q, keys, values, spec).flatten(0, 1)
    if plan.singles is not None:
        out[plan.single_tokens] = decode(q[plan.single_tokens], cache, plan.singles, spec)
    return out


def _round(new: torch.Tensor, blocks: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Round as the cache does, so that a token looks the same in the forward that writes it and in later ones."""
    if new.dtype != blocks.dtype:
        new = dequantize(quantize(new, blocks.dtype, scale), new.dtype, scale)
    return new, blocks, scale


@dataclass(frozen=True)
class _SequenceGroup:
    """Sequences with the same number of new tokens and of cached tokens."""

    num_seqs: int
    tokens: slice | torch.Tensor
    num_new: int
    num_cached: int
    blocks: torch.Tensor  # [num_seqs, blocks of the cached tokens]


@dataclass(frozen=True)
class _PrefillPlan:
    groups: list[_SequenceGroup]
    singles: PagedBatch | None  # sequences with one new token, which is stored: attended to as in decode
    single_tokens: torch.Tensor


def _plan_prefill(batch: PagedBatch, block_size: int) -> _PrefillPlan:
    new, cached = batch.read_lengths()
    starts = [0, *accumulate(new)]
    device = batch.block_tables.device
    shapes = {row: (new[row], cached[row]) for row in range(len(new)) if new[row]}
    single = _find_singles(batch, shapes, starts)
    for row in single:
        del shapes[row]
    groups = []
    ordered = sorted(shapes, key=lambda row: (shapes[row], row))
    for (num_new, num_cached), members in groupby(ordered, key=lambda row: shapes[row]):
        rows = list(members)
        tokens = _index_tokens(rows, starts, num_new, device)
        blocks = batch.block_tables[_index_rows(rows, device), : -(-num_cached // block_size)].long()
        groups.append(_SequenceGroup(len(rows), tokens, num_new, num_cached, blocks))
    singles = None
    if single:
        at = torch.tensor(single, device=device)
        singles = PagedBatch(batch.block_tables[at], batch.input_lengths[at], batch.cache_lengths[at], batch.slots)
    single_tokens = torch.tensor([starts[row] for row in single], dtype=torch.long, device=device)
    return _PrefillPlan(groups, singles, single_tokens)


def _find_singles(batch: PagedBatch, shapes: dict[int, tuple[int, int]], starts: list[int]) -> list[int]:
    """Return the sequences with one new token, which is stored, and others in the cache."""
    single = [row for row, (num_new, num_cached) in shapes.items() if num_new == 1 and num_cached]
    if not single or batch.stores_all:
        return single  # and the device need not be asked what is stored
    has_slot = (batch.slots >= 0).cpu()
    if batch.stored is None:
        is_stored = has_slot
    else:
        is_stored = torch.zeros(starts[-1], dtype=torch.bool)
        is_stored[batch.stored.cpu()] = has_slot
    return [row for row in single if is_stored[starts[row]]]


def _index_rows(rows: list[int], device: torch.device) -> slice | torch.Tensor:
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device=device)


def _index_tokens(rows: list[int], starts: list[int], num_new: int, device: torch.device) -> slice | torch.Tensor:
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(starts[rows[0]], starts[rows[-1]] + num_new)
    first = torch.tensor([starts[row] for row in rows], device=device)
    return (first[:, None] + torch.arange(num_new, device=device)).flatten()


def _gather(new: torch.Tensor, blocks: torch.Tensor, scale: float, group: _SequenceGroup) -> torch.Tensor:
    """Return the cached and new tokens of a group: `[sequences, kv_heads, tokens, head_dim]`."""
    new = _split_sequences(new, group)
    if group.num_cached == 0:
        return new
    cached = dequantize(blocks[group.blocks], new.dtype, scale).transpose(1, 2).flatten(2, 3)
    return torch.cat([cached[:, :, : group.num_cached], new], dim=2)


def _split_sequences(flat: torch.Tensor, group: _SequenceGroup) -> torch.Tensor:
    split: torch.Tensor = flat[group.tokens].unflatten(0, (group.num_seqs, group.num_new))
    return split.transpose(1, 2)


def _attend(
    group: _SequenceGroup, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec
) -> torch.Tensor:
    """Return `[sequences, new tokens, heads, head_dim]`."""
    queries = _split_sequences(q, group)
    attend = partial(F.scaled_dot_product_attention, scale=spec.scale, enable_gqa=keys.shape[1] != queries.shape[1])
    if spec.soft_cap is not None or spec.slopes is not None:
        attend = partial(_attend_in_float, spec=spec)
    elif group.num_cached == 0 and spec.window is None:
        return attend(queries, keys, values, is_causal=True).transpose(1, 2)
    num_keys = keys.shape[2]
    positions = torch.arange(group.num_cached, num_keys, device=q.device)
    count = _count_at_once(queries, num_keys, spec)
    out = [
        attend(piece, keys, values, attn_mask=_make_mask(at, num_keys, spec))
        for piece, at in zip(queries.split(count, dim=2), positions.split(count), strict=True)
    ]
    return (out[0] if len(out) == 1 else torch.cat(out, dim=2)).transpose(1, 2)


def _attend_in_float(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, attn_mask: torch.Tensor, spec: AttentionSpec
) -> torch.Tensor:
    """Attend in plain torch, in float32: torch's own attention has no soft cap, and would round what slopes add."""
    num_kv_heads = keys.shape[1]
    grouped = queries.float().unflatten(1, (num_kv_heads, -1))
    scores = score(grouped, keys.float()[:, :, None], spec)
    if attn_mask.dtype == torch.bool:
        scores = scores.masked_fill_(~attn_mask, -torch.inf)
    else:
        scores += attn_mask.unflatten(0, (num_kv_heads, -1))
    return (scores.softmax(-1) @ values.float()[:, :, None]).flatten(1, 2).to(queries.dtype)


def _count_at_once(queries: torch.Tensor, num_keys: int, spec: AttentionSpec) -> int:
    """Limit the queries of one call where all scores are written out.

    A GPU does so where there is a mask and heads share keys, and a soft cap and slopes need it.
    """
    if not queries.is_cuda and spec.soft_cap is None and spec.slopes is None:
        return queries.shape[2]
    return max(1, MAX_SCORES // (queries.shape[0] * queries.shape[1] * num_keys))


def _make_mask(queries: torch.Tensor, num_keys: int, spec: AttentionSpec) -> torch.Tensor:
    """Return a mask, or with slopes what is added to scores: `[heads, queries, keys]`."""
    visible = _causal_mask(queries, num_keys, spec.window)
    if spec.slopes is None:
        return visible
    distances = torch.arange(num_keys, device=queries.device) - queries[:, None]
    return (spec.slopes[:, None, None] * distances).masked_fill_(~visible, -torch.inf)


def _causal_mask(queries: torch.Tensor, num_keys: int, window: int | None) -> torch.Tensor:
    """Return `[queries, keys]`, True where a query at one of these positions may look."""
    queries = queries[:, None]
    keys = torch.arange(num_keys, device=queries.device)[None]
    visible = keys <= queries
    return visible if window is None else visible & (keys > queries - window)
