"""Attention over whole sequences without a KV cache. It uses torch's fused attention on all devices."""

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F

from lorax_server.kernels.ops import AttentionSpec

MAX_FLASH_HEAD_DIM = 256
QUERY_CHUNK = 512  # queries per call if scores need a mask, which limits the mask's memory


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int], spec: AttentionSpec
) -> torch.Tensor:
    """Return attention outputs. Results do not depend on the batch: sequences are independent in the variable-length
    kernel, and computed one at a time otherwise.
    """
    if _can_use_flash_attention(q, spec):
        return _attend_all(q, k, v, lengths, spec)
    out, start = torch.empty_like(q, memory_format=torch.contiguous_format), 0
    for length in lengths:
        tokens = slice(start, start + length)
        queries, keys, values = (x[tokens].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out[tokens] = _attend_one(queries, keys, values, spec)[0].transpose(0, 1)
        start += length
    return out


def _can_use_flash_attention(q: torch.Tensor, spec: AttentionSpec) -> bool:
    is_supported = q.is_cuda and q.dtype in (torch.float16, torch.bfloat16)
    is_plain = spec.slopes is None and spec.position_bias is None
    return is_supported and is_plain and len(q) > 0 and q.shape[2] % 8 == 0 and q.shape[2] <= MAX_FLASH_HEAD_DIM


def _attend_all(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int], spec: AttentionSpec
) -> torch.Tensor:
    """Return attention outputs for all sequences in one launch of torch's flash attention."""
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(q.device)
    longest = max(lengths)
    reach = spec.window_or_max - 1 if spec.window_or_max < longest else -1  # -1: no limit
    out: torch.Tensor
    out, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, bounds, bounds, longest, longest, 0.0, spec.is_causal, False,
        scale=spec.scale, window_size_left=reach, window_size_right=0 if spec.is_causal else reach,
    )  # fmt: skip
    return out


def _attend_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Return attention outputs for one sequence, `[1, heads, tokens, head_dim]`."""
    length, window, shares_keys = q.shape[2], spec.window_or_max, q.shape[1] != k.shape[1]
    if spec.slopes is None and spec.position_bias is None and window >= length:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=spec.is_causal and length > 1, scale=spec.scale, enable_gqa=shares_keys
        )
    pieces = []
    for start in range(0, length, QUERY_CHUNK):
        stop = min(start + QUERY_CHUNK, length)
        first = max(0, start - window + 1)
        last = stop if spec.is_causal else min(length, stop + window - 1)
        mask = make_mask(range(start, stop), range(first, last), spec, q.device).to(q.dtype)
        keys, values = k[:, :, first:last], v[:, :, first:last]
        piece = F.scaled_dot_product_attention(
            q[:, :, start:stop], keys, values, attn_mask=mask, scale=spec.scale, enable_gqa=shares_keys
        )
        pieces.append(piece)
    return torch.cat(pieces, dim=2)


def make_mask(queries: range, keys: range, spec: AttentionSpec, device: torch.device) -> torch.Tensor:
    """Return the values that are added to attention scores, float32 `[heads or 1, queries, keys]`."""
    positions = torch.arange(keys.start, keys.stop, device=device)
    distances = positions - torch.arange(queries.start, queries.stop, device=device)[:, None]
    mask = torch.zeros(1, *distances.shape, device=device)
    if spec.slopes is not None:
        mask = mask + spec.slopes[:, None, None] * distances
    if spec.position_bias is not None:
        mask = mask + spec.position_bias[:, distances + spec.position_bias.shape[1] // 2]
    hidden = distances.abs() >= spec.window_or_max
    return mask.masked_fill_(hidden | (distances > 0) if spec.is_causal else hidden, -torch.inf)
