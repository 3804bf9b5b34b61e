from typing import Any

import torch
import torch.nn.functional as F

from lorax_server.kernels import AttentionSpec, reference
from lorax_server.layers.attention import KVCache, PagedContext, Seqlen
from lorax_server.models.contract.padded_forward import PaddedContext

SPEC = AttentionSpec(0.5)


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- Seqlen


def test_seqlen_stores_boundaries_and_maximums() -> None:
    boundaries = torch.tensor([0, 2, 5], dtype=torch.int32)
    seqlen = Seqlen(torch.tensor([2, 3]), torch.tensor([0, 4]), boundaries, 3, 7)
    assert seqlen.cu_seqlen_q is boundaries
    assert (seqlen.max_q, seqlen.max_k) == (3, 7)


# --- PagedContext


def paged(
    new: list[int],
    cached: list[int],
    *,
    prefill: bool,
    kv_cache: KVCache | None = None,
    stored: torch.Tensor | None = None,
    prompt_lengths: torch.Tensor | None = None,
) -> PagedContext:
    """Create a context with two consecutive blocks of 8 tokens per sequence."""
    tables = torch.arange(2 * len(new)).view(-1, 2)
    positions = [at for start, count in zip(cached, new, strict=True) for at in range(start, start + count)]
    rows = [row for row, count in enumerate(new) for _ in range(count)]
    slots = [row * 16 + at for row, at in zip(rows, positions, strict=True)]
    return PagedContext(
        block_tables=tables,
        input_lengths=torch.tensor(new),
        cache_lengths=torch.tensor(cached),
        slots=torch.tensor(slots) if stored is None else torch.tensor(slots)[stored],
        stored=stored,
        cu_seqlens=torch.tensor([0, *new]).cumsum(0).int() if prefill else None,
        ops=reference,
        kv_cache=kv_cache or [(torch.zeros(2 * len(new), 2, 8, 4), torch.zeros(2 * len(new), 2, 8, 4))],
        position_ids=torch.tensor(positions),
        max_position=max(count + start for count, start in zip(new, cached, strict=True)),
        prompt_lengths=prompt_lengths,
    )


def test_paged_attention_is_causal_within_each_sequence() -> None:
    q, k, v = (normal(7, 2, 4, seed=seed) for seed in range(3))
    out = paged([4, 3], [0, 0], prefill=True).attend(0, q, k, v, SPEC)
    for tokens in (slice(0, 4), slice(4, 7)):
        query, key, value = (x[tokens].transpose(0, 1) for x in (q, k, v))
        expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.5)
        expected = expected.transpose(0, 1).flatten(1)
        torch.testing.assert_close(out[tokens], expected, rtol=0, atol=1e-5)


def test_prefill_then_decode_equals_full_prefill() -> None:
    q, k, v = (normal(6, 2, 4, seed=seed) for seed in range(3))
    at_once = paged([6], [0], prefill=True).attend(0, q, k, v, SPEC)
    first = paged([4], [0], prefill=True)
    out = [first.attend(0, q[:4], k[:4], v[:4], SPEC)]
    for position in (4, 5):
        step = paged([1], [position], prefill=False, kv_cache=first.kv_cache)
        one = slice(position, position + 1)
        out.append(step.attend(0, q[one], k[one], v[one], SPEC))
    torch.testing.assert_close(torch.cat(out), at_once, rtol=0, atol=1e-5)


def test_only_selected_tokens_are_stored_in_cache() -> None:
    q, k, v = (normal(5, 2, 4, seed=seed) for seed in range(3))
    ctx = paged([5], [0], prefill=True, stored=torch.tensor([3, 4]))
    ctx.attend(0, q, k, v, SPEC)
    k_cache, v_cache = ctx.kv_cache[0]
    assert torch.equal(k_cache[0, :, 3:5].transpose(0, 1), k[3:])
    assert torch.equal(v_cache[0, :, 3:5].transpose(0, 1), v[3:])
    assert k_cache.count_nonzero() == v_cache.count_nonzero() == k[3:].numel()


def test_rope_lengths_are_per_sequence() -> None:
    assert paged([3, 1], [0, 6], prefill=True).rope_lengths().tolist() == [3, 3, 3, 7]
    known = paged([3, 1], [0, 6], prefill=True, prompt_lengths=torch.tensor([3, 5]))
    assert known.rope_lengths().tolist() == [3, 3, 3, 5]


def test_max_position_is_longest_sequence() -> None:
    assert paged([3, 1], [0, 6], prefill=True).max_position == 7


# --- PaddedContext


def padded(mask: list[list[int]], num_new: int, **fields: Any) -> PaddedContext:
    attention_mask = torch.tensor(mask)
    num_seqs, total = attention_mask.shape
    positions = torch.arange(total - num_new, total).expand(num_seqs, -1).reshape(-1)
    return PaddedContext(num_seqs, num_new, positions, attention_mask, fields.pop("past", None), None, total, **fields)


def test_padding_only_row_has_no_nan() -> None:
    q, k, v = (normal(6, 2, 4, seed=seed) for seed in range(3))
    out = padded([[0, 0, 0], [1, 1, 1]], 3).attend(0, q, k, v, SPEC)
    assert out.isfinite().all()


def test_left_padding_does_not_change_attention() -> None:
    q, k, v = (normal(8, 2, 4, seed=seed) for seed in range(3))
    out = padded([[1, 1, 1, 1], [0, 0, 1, 1]], 4).attend(0, q, k, v, SPEC)
    assert out.shape == (8, 8)
    assert out.isfinite().all()
    torch.testing.assert_close(out[:4], padded([[1, 1, 1, 1]], 4).attend(0, q[:4], k[:4], v[:4], SPEC))
    torch.testing.assert_close(out[6:], padded([[1, 1]], 2).attend(0, q[6:], k[6:], v[6:], SPEC))


def test_padded_attention_matches_torch() -> None:
    q, k, v = (normal(5, 2, 4, seed=seed) for seed in range(3))
    out = padded([[1] * 5], 5).attend(0, q, k, v, SPEC)
    query, key, value = (x.transpose(0, 1) for x in (q, k, v))
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.5).transpose(0, 1).flatten(1)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


def test_past_keys_and_values_are_used_and_returned() -> None:
    q, k, v = (normal(10, 2, 4, seed=seed) for seed in range(3))
    whole = padded([[1] * 5, [0, 1, 1, 1, 1]], 5)
    expected = whole.attend(0, q, k, v, SPEC)
    first = torch.tensor([0, 1, 2, 5, 6, 7])
    begun = padded([[1] * 3, [0, 1, 1]], 3)
    begun.attend(0, q[first], k[first], v[first], SPEC)
    rest = torch.tensor([3, 4, 8, 9])
    continued = padded([[1] * 5, [0, 1, 1, 1, 1]], 2, past=begun.present)
    out = continued.attend(0, q[rest], k[rest], v[rest], SPEC)
    torch.testing.assert_close(out, expected[rest], rtol=0, atol=1e-6)
    for ours, theirs in zip(continued.present[0], whole.present[0], strict=True):
        assert torch.equal(ours, theirs)


def test_masked_head_has_no_effect() -> None:
    q, k, v = (normal(3, 2, 4, seed=seed) for seed in range(3))
    plain = padded([[1] * 3], 3).attend(0, q, k, v, SPEC)
    out = padded([[1] * 3], 3, head_mask=torch.tensor([[1.0, 0.0]])).attend(0, q, k, v, SPEC)
    assert torch.equal(out[:, :4], plain[:, :4])
    assert torch.equal(out[:, 4:], torch.zeros(3, 4))


def test_attentions_are_returned_only_on_request() -> None:
    q, k, v = (normal(6, 2, 4, seed=seed) for seed in range(3))
    quiet, keeping = padded([[1] * 3] * 2, 3), padded([[1] * 3] * 2, 3, keep_attentions=True)
    for ctx in (quiet, keeping):
        ctx.attend(0, q, k, v, SPEC)
    assert quiet.attentions == []
    assert keeping.attentions[0].shape == (2, 2, 3, 3)
    torch.testing.assert_close(keeping.attentions[0].sum(-1), torch.ones(2, 2, 3))


def test_rope_lengths_exclude_padding() -> None:
    assert padded([[1, 1, 1], [0, 0, 1]], 3).rope_lengths().tolist() == [3, 3, 3, 1, 1, 1]
    assert padded([[1, 1, 1], [0, 1, 1]], 1).rope_lengths().tolist() == [3, 2]


def test_soft_cap_is_equal_in_padded_and_paged_attention() -> None:
    spec = AttentionSpec(SPEC.scale, soft_cap=0.7)
    q, k, v = (3 * normal(5, 2, 4, seed=seed) for seed in range(3))
    out = padded([[1] * 5], 5).attend(0, q, k, v, spec)
    torch.testing.assert_close(out, paged([5], [0], prefill=True).attend(0, q, k, v, spec), rtol=0, atol=1e-5)
    assert (out - padded([[1] * 5], 5).attend(0, q, k, v, SPEC)).abs().max() > 0.1
