"""What decode and prefill attention share: how queries and keys become scores."""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from lorax_server.kernels.ops import AttentionSpec, LayerCache, PagedBatch

MIN_DOT = 16  # the smallest side of a product
NO_WINDOW = 2**31 - 1


def check_layout(q: torch.Tensor, cache: LayerCache, batch: PagedBatch) -> None:
    plain = *cache, batch.input_lengths, batch.cache_lengths
    if not all(x.is_contiguous() for x in plain) or q.stride(2) != 1 or batch.block_tables.stride(1) != 1:
        raise ValueError("attention needs caches, lengths, heads and block tables without gaps")


def window_of(spec: AttentionSpec) -> int:
    return NO_WINDOW if spec.window is None else spec.window


def fill_up(head_dim: int) -> int:
    """Return the power of two that a kernel computes with instead of the size of a head."""
    return max(MIN_DOT, int(triton.next_power_of_2(head_dim)))


def product_dtype(q: torch.Tensor, cache: torch.Tensor) -> tl.dtype:
    """Return the dtype that queries, keys, weights and values are multiplied in; the sums are float32."""
    # Triton's interpreter, which runs on a CPU, cannot multiply bfloat16.
    if q.is_cpu or (cache.dtype != q.dtype and cache.dtype.itemsize > 1):
        return tl.float32
    if is_rescaled(q, cache):
        return tl.float16
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[q.dtype]


def is_rescaled(q: torch.Tensor, cache: torch.Tensor) -> bool:
    """Return whether queries become float16, which one instruction makes of two numbers of a float8 cache."""
    return q.dtype == torch.bfloat16 and cache.dtype.itemsize == 1


class Scales(NamedTuple):
    """What products of queries and keys, and sums of values, are multiplied by. A score's weight is `2 ** score`."""

    inner: float  # before the soft cap, which is `1 - 2 / (1 + 2 ** x)`: the same as `tanh` of half of `log(2) * x`
    score: float
    value: float

    @classmethod
    def of(cls, cache: torch.Tensor, spec: AttentionSpec) -> "Scales":
        k_scale, v_scale = (spec.k_scale, spec.v_scale) if cache.dtype.itemsize == 1 else (1.0, 1.0)
        score = spec.scale * k_scale * math.log2(math.e)
        if spec.soft_cap is None:
            return cls(1.0, score, v_scale)
        return cls(2 * score / spec.soft_cap, spec.soft_cap * math.log2(math.e), v_scale)


@triton.jit
def load_query(places: tl.tensor, mask: tl.tensor, COMPUTE: tl.constexpr, IS_RESCALED: tl.constexpr) -> tl.tensor:
    """Return rows of queries, and a power of two that each was divided by so that float16 holds it."""
    query = tl.load(places, mask=mask, other=0.0)
    power = tl.full([query.shape[0]], 1.0, tl.float32)
    if IS_RESCALED:
        query = query.to(tl.float32)
        power = tl.exp2(tl.ceil(tl.log2(tl.maximum(tl.max(tl.abs(query), axis=1), 1e-30))))
        query = query / power[:, None]
    return query.to(COMPUTE), power


@triton.jit
def multiply_keys(
    query: tl.tensor,
    power: tl.tensor,
    keys: tl.tensor,
    inner: tl.tensor,
    IS_RESCALED: tl.constexpr,
    HAS_CAP: tl.constexpr,
) -> tl.tensor:
    """Return products of queries and keys, after the soft cap if there is one; `Scales` says how."""
    products = tl.dot(query, tl.trans(keys), input_precision="ieee")
    if IS_RESCALED:
        products *= power[:, None]
    if HAS_CAP:
        return 1.0 - 2.0 / (1.0 + tl.exp2(products * inner))
    return products
