"""Attention over whole sequences against the reference op."""

from dataclasses import replace

import pytest
import torch

from lorax_server.kernels import AttentionSpec, reference, select_ops, whole_sequences

HEADS, HEAD_DIM = 4, 16
LENGTHS = [1, 7, 40, 3]
SPECS = {
    "bidirectional": AttentionSpec(0.25, is_causal=False),
    "causal": AttentionSpec(0.25),
    "window": AttentionSpec(0.25, window=5, is_causal=False),
    "causal window": AttentionSpec(0.25, window=5),
    "slopes": AttentionSpec(0.25, slopes=torch.tensor([0.5, 0.25, 0.1, 0.05])),
    "bias": AttentionSpec(0.25, is_causal=False, position_bias=torch.randn(HEADS, 2 * 64 + 1)),
    "soft cap": AttentionSpec(0.25, soft_cap=1.0),
}


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_whole_sequence_attention_matches_reference(
    spec: AttentionSpec, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_sequences, "QUERY_CHUNK", 16)  # several chunks per sequence
    count = sum(LENGTHS)
    heads = torch.randn(count, HEADS + 2 * kv_heads, HEAD_DIM)
    turns = torch.randn(count, HEAD_DIM // 2)
    angles = turns.cos(), turns.sin()
    results = []
    for ops in (reference, select_ops(torch.device("cpu"))):
        q, k, v = heads.clone().split([HEADS, kv_heads, kv_heads], dim=1)
        results.append(ops.attend_sequences(q, k, v, angles, LENGTHS, spec))
    assert (results[0] - results[1]).abs().max() < 1e-5


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_chunked_reference_matches_unchunked_reference(spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = torch.randn(sum(LENGTHS), 3 * HEADS, HEAD_DIM)
    q, k, v = heads.chunk(3, dim=1)
    whole = reference.attend_sequences(q, k, v, None, LENGTHS, spec)
    monkeypatch.setattr(reference, "MAX_SCORE_ELEMENTS", HEADS * 40 * 6)  # six queries of the longest sequence
    chunked = reference.attend_sequences(q, k, v, None, LENGTHS, spec)
    assert (whole - chunked).abs().max() < 1e-6


@pytest.mark.parametrize("other", [replace(SPECS["bidirectional"], is_causal=True), SPECS["window"], SPECS["bias"]])
def test_each_attention_setting_changes_result(other: AttentionSpec) -> None:
    q, k, v = (torch.randn(40, HEADS, HEAD_DIM) for _ in range(3))
    first, second = (whole_sequences.attend(q, k, v, [40], spec) for spec in (SPECS["bidirectional"], other))
    assert (first - second).abs().max() > 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("name", SPECS)
def test_gpu_attention_matches_reference(name: str, kv_heads: int, dtype: torch.dtype) -> None:
    lengths, spec, device = [1, 70, 300, 3, 129], SPECS[name], torch.device("cuda", 0)
    bias = None if spec.position_bias is None else torch.randn(HEADS, 2 * 512 + 1, device=device)
    slopes = None if spec.slopes is None else spec.slopes.to(device)
    spec = replace(spec, position_bias=bias, slopes=slopes)
    heads = torch.randn(sum(lengths), HEADS + 2 * kv_heads, 64, device=device).to(dtype)
    q, k, v = heads.split([HEADS, kv_heads, kv_heads], dim=1)
    expected = reference.attend_sequences(q.float(), k.float(), v.float(), None, lengths, spec)
    ops = select_ops(device)
    got = ops.attend_sequences(q, k, v, None, lengths, spec)
    assert (got.float() - expected).abs().max() < (1e-3 if dtype == torch.float32 else 0.03)
    alone = ops.attend_sequences(q[71:371], k[71:371], v[71:371], None, [300], spec)
    assert torch.equal(alone, got[71:371])
