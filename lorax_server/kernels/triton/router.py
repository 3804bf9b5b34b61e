"""Routing of tokens to experts, with one program per token instead of several torch kernels."""

import torch
import triton
import triton.language as tl

from lorax_server.kernels.ops import RouterSpec, Routing
from lorax_server.kernels.reference import MIN_WEIGHT_SUM

MIN_KEY = tl.constexpr(-(2**63 - 1))  # smaller than the keys of all scores
MAX_INT = tl.constexpr(2**31 - 1)  # all bits except the sign


def route(logits: torch.Tensor, top_k: int, spec: RouterSpec, bias: torch.Tensor | None = None) -> Routing:
    """Implement `Ops.route`. Among experts with equal scores, the lowest index is chosen first."""
    tokens, num_experts = logits.shape
    logits = logits.contiguous()
    experts = logits.new_empty(tokens, top_k, dtype=torch.int64)
    weights = logits.new_empty(tokens, top_k, dtype=torch.float32)
    if tokens:
        _route[(tokens,)](
            experts, weights, logits, logits if bias is None else bias, spec.scale, HAS_BIAS=bias is not None,
            EXPERTS=num_experts, BLOCK=triton.next_power_of_2(num_experts), TOP_K=top_k,
            TOP_K_BLOCK=triton.next_power_of_2(top_k), IS_SOFTMAX=spec.scoring == "softmax", GROUPS=spec.groups,
            GROUP_BLOCK=triton.next_power_of_2(spec.groups), TOP_GROUPS=spec.top_groups,
            SCORES_PER_GROUP=spec.scores_per_group, NORMALIZE=spec.normalize, MIN_SUM=MIN_WEIGHT_SUM,
            num_warps=1,
        )  # fmt: skip
    return Routing(experts, weights)


@triton.jit
def _make_keys(values, indices):
    """Return distinct integers that have the order of the float32 values. Among equal values, the first is largest."""
    bits = values.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ MAX_INT, bits)
    return (ordered.to(tl.int64) << 32) | (indices ^ MAX_INT).to(tl.int64)


@triton.jit
def _find_index(key):
    """Return the index from which `_make_keys` computed the key."""
    return (key & MAX_INT).to(tl.int32) ^ MAX_INT


@triton.jit
def _find_open_groups(
    ranking, indices, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, GROUP_BLOCK: tl.constexpr, TOP_GROUPS: tl.constexpr,
    SCORES_PER_GROUP: tl.constexpr,
):  # fmt: skip
    """Return True for each expert in one of the best groups."""
    groups, group_of = tl.arange(0, GROUP_BLOCK), indices // (EXPERTS // GROUPS)
    totals = tl.zeros((GROUP_BLOCK,), tl.float32)
    for group in tl.static_range(GROUPS):
        keys = tl.where(group_of == group, _make_keys(ranking, indices), MIN_KEY)
        for _ in tl.static_range(SCORES_PER_GROUP):
            best = tl.max(keys, 0)
            score = tl.sum(tl.where(keys == best, ranking, 0.0), 0)
            totals += tl.where(groups == group, score, 0.0)
            keys = tl.where(keys == best, MIN_KEY, keys)
    keys = tl.where(groups < GROUPS, _make_keys(totals, groups), MIN_KEY)
    is_open = indices < 0
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.max(keys, 0)
        is_open = is_open | (group_of == _find_index(best))
        keys = tl.where(keys == best, MIN_KEY, keys)
    return is_open


@triton.jit(do_not_specialize=["scale"])
def _route(
    experts, weights, logits, biases, scale, HAS_BIAS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
    TOP_K: tl.constexpr, TOP_K_BLOCK: tl.constexpr, IS_SOFTMAX: tl.constexpr, GROUPS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, TOP_GROUPS: tl.constexpr, SCORES_PER_GROUP: tl.constexpr, NORMALIZE: tl.constexpr,
    MIN_SUM: tl.constexpr,
):  # fmt: skip
    """Choose the experts of one token."""
    token, indices = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    is_expert = indices < EXPERTS
    logit = tl.load(logits + token * EXPERTS + indices, mask=is_expert, other=-float("inf")).to(tl.float32)
    if IS_SOFTMAX:
        powers = tl.exp(logit - tl.max(logit, 0))
        scores = powers / tl.sum(powers, 0)
    else:
        scores = 1.0 / (1.0 + tl.exp(-logit))
    ranking = scores
    if HAS_BIAS:
        ranking += tl.load(biases + indices, mask=is_expert, other=0.0)
    if TOP_GROUPS < GROUPS:
        is_open = _find_open_groups(ranking, indices, EXPERTS, GROUPS, GROUP_BLOCK, TOP_GROUPS, SCORES_PER_GROUP)
        ranking = tl.where(is_open, ranking, -float("inf"))
    keys = tl.where(is_expert, _make_keys(ranking, indices), MIN_KEY)
    choices = tl.arange(0, TOP_K_BLOCK)
    chosen, values = tl.zeros((TOP_K_BLOCK,), tl.int64), tl.zeros((TOP_K_BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        best = tl.max(keys, 0)
        is_best = keys == best
        chosen = tl.where(choices == choice, _find_index(best).to(tl.int64), chosen)
        values = tl.where(choices == choice, tl.sum(tl.where(is_best, scores, 0.0), 0), values)
        keys = tl.where(is_best, MIN_KEY, keys)
    if NORMALIZE:
        values = values / (tl.sum(values, 0) + MIN_SUM)
    offsets = token * TOP_K + choices
    tl.store(experts + offsets, chosen, mask=choices < TOP_K)
    tl.store(weights + offsets, values * scale, mask=choices < TOP_K)
