"""Prefill: any number of new tokens per sequence; sequences of equal shape are attended to together."""

from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby

import torch
import torch.nn.functional as F

from lorax_server.kernels.ops import AttentionSpec, PagedBatch
from lorax_server.kernels.reference.cache import dequantize, plan_writes, quantize
from lorax_server.kernels.reference.decode import decode_attention

MAX_SCORES = 2**27  # at once, on a GPU


def prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: PagedBatch,
    spec: AttentionSpec,
) -> torch.Tensor:
    plan = batch.once("prefill", lambda: _plan_prefill(batch, k_cache.shape[2]))
    if k_cache.dtype != k.dtype:  # so that a token is seen the same in the forward that writes it and in later ones
        k = dequantize(quantize(k, k_cache.dtype, spec.k_scale), k_cache.dtype, k.dtype, spec.k_scale)
        v = dequantize(quantize(v, v_cache.dtype, spec.v_scale), v_cache.dtype, v.dtype, spec.v_scale)
    out = torch.empty_like(q)
    for group in plan.groups:
        out[group.tokens] = _attend_group(group, q, k, v, k_cache, v_cache, batch, spec).flatten(0, 1)
    if plan.singles is not None:
        out[plan.single_tokens] = decode_attention(q[plan.single_tokens], k_cache, v_cache, plan.singles, spec)
    return out


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
    singles: PagedBatch | None  # sequences that one token continues, itself in the cache: as in decode
    single_tokens: torch.Tensor


def _plan_prefill(batch: PagedBatch, block_size: int) -> _PrefillPlan:
    new, cached = batch.input_lengths.tolist(), batch.cache_lengths.tolist()
    starts = [0, *accumulate(new)]
    device = batch.block_tables.device
    stored = _stored(batch, block_size, starts[-1])
    shapes = {row: (new[row], cached[row]) for row in range(len(new)) if new[row]}
    single = [row for row, shape in shapes.items() if shape[0] == 1 and shape[1] and stored[starts[row]]]
    for row in single:
        del shapes[row]
    groups = []
    ordered = sorted(shapes, key=lambda row: (shapes[row], row))
    for (num_new, num_cached), members in groupby(ordered, key=lambda row: shapes[row]):
        rows = list(members)
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


def _stored(batch: PagedBatch, block_size: int, num_tokens: int) -> list[bool]:
    """Whether each token's key and value are in the cache."""
    writes = batch.once("writes", lambda: plan_writes(batch, block_size))
    if writes.tokens is None:
        return [True] * num_tokens
    stored = torch.zeros(num_tokens, dtype=torch.bool)
    stored[writes.tokens.cpu()] = True
    return stored.tolist()


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
    attend = partial(F.scaled_dot_product_attention, scale=spec.scale, enable_gqa=keys.shape[1] != queries.shape[1])
    if group.num_cached == 0 and spec.window is None:
        return attend(queries, keys, values, is_causal=True).transpose(1, 2)
    positions = torch.arange(group.num_cached, keys.shape[2], device=q.device)
    count = _queries_at_once(queries, keys.shape[2])
    out = [
        attend(piece, keys, values, attn_mask=_causal_mask(at, keys.shape[2], spec.window))
        for piece, at in zip(queries.split(count, dim=2), positions.split(count), strict=True)
    ]
    return (out[0] if len(out) == 1 else torch.cat(out, dim=2)).transpose(1, 2)


def _queries_at_once(queries: torch.Tensor, num_keys: int) -> int:
    """A GPU writes all scores out where there is a mask and heads share keys, so that a long context needs pieces."""
    if not queries.is_cuda:
        return queries.shape[2]
    return max(1, MAX_SCORES // (queries.shape[0] * queries.shape[1] * num_keys))


def _cached(cache: torch.Tensor, group: _Group, batch: PagedBatch, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """The cached tokens of the group's sequences: `[sequences, kv_heads, tokens, head_dim]`."""
    num_blocks = -(-group.num_cached // cache.shape[2])
    blocks = batch.block_tables[group.rows, :num_blocks].long()
    gathered = dequantize(cache[blocks], cache.dtype, dtype, scale).transpose(1, 2).flatten(2, 3)
    return gathered[:, :, : group.num_cached]


def _causal_mask(queries: torch.Tensor, num_keys: int, window: int | None) -> torch.Tensor:
    """True where queries at these positions may look: `[queries, keys]`."""
    queries = queries[:, None]
    keys = torch.arange(num_keys, device=queries.device)[None]
    visible = keys <= queries
    return visible if window is None else visible & (keys > queries - window)
