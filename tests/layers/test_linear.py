"""Sharded linear layers: the shards of all ranks combine to the full layer."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lorax_server.adapters.batch import AdapterBatchData
from lorax_server.adapters.target import TargetKind
from lorax_server.adapters.weights import ModuleWeights
from lorax_server.distributed import (
    FakeGroup,
    Shard,
    make_full_shard,
    shard_evenly,
    shard_kv_heads,
    shard_units,
    shard_vocab,
)
from lorax_server.errors import WeightsError
from lorax_server.layers.embedding import TensorParallelEmbedding
from lorax_server.layers.linear import (
    MultiAdapterHead,
    TensorParallelAdapterRowLinear,
    TensorParallelMultiAdapterLinear,
)
from lorax_server.layers.norm import LayerNorm, RMSNorm
from lorax_server.layers.targets import collect_adapter_targets
from tests.adapters.test_host import merged_rows
from tests.builders import CPU, adapter_batch, memory_weights
from tests.lora import Factors, GivenAdapter, fill_arena, make_arena
from tests.optional import present

INPUTS, TOKENS = 12, [1, 1, 0, 2, 2, 2, 2, 2, 2, 2, 2, 2, 0, 1, 3]


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


Adapters = list[tuple[Factors, float]]  # with the scale of each adapter


def lora(inputs: int, outputs: int, rank: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return normal(rank, inputs, seed=seed), normal(outputs, rank, seed=seed + 1)


def adapted_batch(layer: nn.Module, adapters: Adapters) -> AdapterBatchData:
    return adapter_batch(TOKENS, make_arena(collect_adapter_targets(layer), adapters, CPU))


def with_lora(x: torch.Tensor, base: torch.Tensor, adapters: Adapters, target: str) -> torch.Tensor:
    """Return the unsharded layer's output with each token's adapter."""
    out = base.clone()
    for row, index in enumerate(TOKENS):
        factors, scale = adapters[index - 1] if index else ({}, 0.0)
        if target in factors:
            lora_a, lora_b = factors[target]
            out[row] += lora_b @ (lora_a @ x[row]) * scale
    return out


def place(parts: Sequence[torch.Tensor], shards: Sequence[Shard]) -> torch.Tensor:
    """Assemble the full dimension from the shards of all ranks."""
    full = torch.full((len(parts[0]), shards[0].full), torch.nan)
    for part, shard in zip(parts, shards, strict=True):
        full[:, [at for start, stop in shard.ranges for at in range(start, stop)]] = part
    return full


# --- plain


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("fan_in_fan_out", [False, True])
def test_column_shards_concatenate_to_full_output(ranks: int, bias: bool, fan_in_fan_out: bool) -> None:
    weight, added, x = normal(24, INPUTS, seed=1), normal(24, seed=2), normal(5, INPUTS, seed=3)
    tensors = {"fc.weight": weight.t().contiguous() if fan_in_fan_out else weight, "fc.bias": added}
    # Three fused matrices, sharded separately.
    shards = [shard_units(FakeGroup(rank, ranks), [(4, 2)] * 3, "heads") for rank in range(ranks)]
    parts = []
    for rank, shard in enumerate(shards):
        weights = memory_weights(tensors, rank=rank, ranks=ranks)
        layer = TensorParallelMultiAdapterLinear(
            weights, ["fc"], INPUTS, [shard], bias=bias, fan_in_fan_out=fan_in_fan_out
        )
        parts.append(layer(x))
    expected = F.linear(x, weight, added if bias else None)
    torch.testing.assert_close(place(parts, shards), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("fan_in_fan_out", [False, True])
def test_row_shards_sum_to_full_output(ranks: int, bias: bool, fan_in_fan_out: bool) -> None:
    weight, added, x = normal(10, INPUTS, seed=1), normal(10, seed=2), normal(5, INPUTS, seed=3)
    tensors = {"fc.weight": weight.t().contiguous() if fan_in_fan_out else weight, "fc.bias": added}
    total = torch.zeros(5, 10)
    for rank in range(ranks):
        weights = memory_weights(tensors, rank=rank, ranks=ranks)
        shard = shard_evenly(weights.process_group, INPUTS, "inputs")
        layer = TensorParallelAdapterRowLinear(weights, "fc", shard, 10, bias=bias, fan_in_fan_out=fan_in_fan_out)
        total += layer(shard.select(x, dim=1))
    torch.testing.assert_close(total, F.linear(x, weight, added if bias else None), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vocab_size", [5, 12, 13])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_sharded_head_covers_full_vocabulary(vocab_size: int, ranks: int) -> None:
    weight, x = normal(vocab_size, INPUTS, seed=1), normal(3, INPUTS, seed=2)
    shards = [shard_vocab(FakeGroup(rank, ranks), vocab_size) for rank in range(ranks)]
    parts = []
    for rank, shard in enumerate(shards):
        weights = memory_weights({"lm_head.weight": weight}, rank=rank, ranks=ranks)
        logits, speculative = MultiAdapterHead.load(weights, "lm_head", INPUTS, vocab_size)(x)
        assert logits.shape == (3, vocab_size)
        assert speculative is None
        parts.append(logits[:, : shard.size])
    torch.testing.assert_close(place(parts, shards), x @ weight.t(), rtol=1e-5, atol=1e-5)


class LoopGroup:
    """A process group that gathers the shards of all ranks within one process."""

    def __init__(self, rank: int, parts: list[torch.Tensor]) -> None:
        self.parts = parts
        self._rank = rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return 4

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a head does not sum")

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        self.parts.append(x)
        return torch.cat([*self.parts, *[torch.zeros_like(x)] * (4 - len(self.parts))], dim=dim)


@pytest.mark.parametrize("vocab_size", [5, 12, 13])
def test_gathered_logits_keep_vocabulary_order(vocab_size: int) -> None:
    """Unequal shards are padded before the all-gather, and the padding is removed afterwards."""
    weight, x = normal(vocab_size, INPUTS, seed=1), normal(3, INPUTS, seed=2)
    parts: list[torch.Tensor] = []
    for rank in range(4):
        weights = memory_weights({"lm_head.weight": weight})
        weights.process_group = LoopGroup(rank, parts)
        logits, _ = MultiAdapterHead.load(weights, "lm_head", INPUTS, vocab_size)(x)
    torch.testing.assert_close(logits, x @ weight.t(), rtol=1e-5, atol=1e-5)


# --- Adapters


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_adapters_on_fused_columns_match_lora_formula(ranks: int) -> None:
    """Llama's query, key and value: 8 query heads and 2 key heads, which are replicated if there are more ranks."""
    sizes = {"q": 32, "k": 8, "v": 8}
    tensors = {f"{name}.weight": normal(size, INPUTS, seed=size) for name, size in sizes.items()}
    tensors |= {f"{name}.bias": normal(size, seed=size + 1) for name, size in sizes.items()}
    adapters: Adapters = [
        ({"q": lora(INPUTS, 32, 3, 10), "v": lora(INPUTS, 8, 1, 12)}, 3.5),
        ({"q": lora(INPUTS, 32, 16, 14), "k": lora(INPUTS, 8, 2, 16), "v": lora(INPUTS, 8, 4, 18)}, 0.5),
        ({"k": lora(INPUTS, 8, 5, 20)}, 2.0),
    ]
    x = normal(len(TOKENS), INPUTS, seed=3)
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in sizes}
    shards: dict[str, list[Shard]] = {name: [] for name in sizes}
    for rank in range(ranks):
        weights = memory_weights(tensors, rank=rank, ranks=ranks)
        group = weights.process_group
        outputs = [shard_units(group, [(8, 4)], "heads"), shard_kv_heads(group, 2, 4), shard_kv_heads(group, 2, 4)]
        layer = TensorParallelMultiAdapterLinear(weights, list(sizes), INPUTS, outputs, bias=True)
        out = layer(x, adapted_batch(layer, adapters))
        for name, shard, part in zip(sizes, outputs, out.split([shard.size for shard in outputs], dim=1), strict=True):
            parts[name].append(part)
            shards[name].append(shard)
    for name in sizes:
        base = F.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"])
        expected = with_lora(x, base, adapters, name)
        torch.testing.assert_close(place(parts[name], shards[name]), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_adapters_on_fused_transposed_matrix_match_lora_formula(ranks: int) -> None:
    """GPT-2's c_attn: one matrix and one adapter target with three sharded parts."""
    weight, added = normal(INPUTS, 36, seed=1), normal(36, seed=2)
    adapters: Adapters = [({"c_attn": lora(INPUTS, 36, rank, 10 + rank)}, 0.5 + rank) for rank in (3, 16, 1)]
    x = normal(len(TOKENS), INPUTS, seed=3)
    shards = [shard_units(FakeGroup(rank, ranks), [(4, 3)] * 3, "heads") for rank in range(ranks)]
    parts = []
    for rank, shard in enumerate(shards):
        weights = memory_weights({"c_attn.weight": weight, "c_attn.bias": added}, rank=rank, ranks=ranks)
        layer = TensorParallelMultiAdapterLinear(weights, ["c_attn"], INPUTS, [shard], bias=True, fan_in_fan_out=True)
        parts.append(layer(x, adapted_batch(layer, adapters)))
    expected = with_lora(x, x @ weight + added, adapters, "c_attn")
    torch.testing.assert_close(place(parts, shards), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("fan_in_fan_out", [False, True])
def test_adapters_on_row_parallel_linear_match_lora_formula(ranks: int, fan_in_fan_out: bool) -> None:
    weight, added = normal(10, INPUTS, seed=1), normal(10, seed=2)
    tensors = {"proj.weight": weight.t().contiguous() if fan_in_fan_out else weight, "proj.bias": added}
    adapters: Adapters = [
        ({"proj": lora(INPUTS, 10, 3, 10)}, 3.5),
        ({"proj": lora(INPUTS, 10, 16, 12)}, 0.5),
        ({}, 1.0),
    ]
    x = normal(len(TOKENS), INPUTS, seed=3)
    total = torch.zeros(len(TOKENS), 10)
    for rank in range(ranks):
        weights = memory_weights(tensors, rank=rank, ranks=ranks)
        shard = shard_evenly(weights.process_group, INPUTS, "inputs")
        layer = TensorParallelAdapterRowLinear(weights, "proj", shard, 10, bias=True, fan_in_fan_out=fan_in_fan_out)
        total += layer(shard.select(x, dim=1), adapted_batch(layer, adapters))
    expected = with_lora(x, F.linear(x, weight, added), adapters, "proj")
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_dora_and_biases_on_fused_columns_match_reference(ranks: int) -> None:
    """The delta is added before the factor multiplies, and the bias is not multiplied."""
    sizes = {"q": 8, "k": 4}
    base = {name: normal(size, INPUTS, seed=size) for name, size in sizes.items()}
    bias = {name: normal(size, seed=size + 1) for name, size in sizes.items()}
    tensors = {f"{name}.weight": base[name] for name in sizes} | {f"{name}.bias": bias[name] for name in sizes}
    low_rank = {
        name: ModuleWeights(*lora(INPUTS, size, 3, 10), 0.5, normal(size, seed=7)) for name, size in sizes.items()
    }
    given = [
        {"q": low_rank["q"], "k": ModuleWeights(bias=normal(4, seed=8))},
        {"q": replace(low_rank["q"], bias=normal(8, seed=9)), "k": low_rank["k"]},
        {},
    ]
    x = normal(len(TOKENS), INPUTS, seed=3)
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in sizes}
    shards = {
        name: [shard_evenly(FakeGroup(rank, ranks), size, "x") for rank in range(ranks)] for name, size in sizes.items()
    }
    for rank in range(ranks):
        weights = memory_weights(tensors, rank=rank, ranks=ranks)
        outputs = [shards[name][rank] for name in sizes]
        layer = TensorParallelMultiAdapterLinear(weights, list(sizes), INPUTS, outputs, bias=True)
        adapters = [GivenAdapter(modules, 0) for modules in given]
        arena = fill_arena(collect_adapter_targets(layer), adapters, CPU, weights.process_group)
        out = layer(x, adapter_batch(TOKENS, arena))
        for name, part in zip(sizes, out.split([shard.size for shard in outputs], dim=1), strict=True):
            parts[name].append(part)
    for name in sizes:
        got = place(parts[name], shards[name])
        for row, index in enumerate(TOKENS):
            adapter = given[index - 1].get(name, ModuleWeights()) if index else ModuleWeights()
            matrix = merged_rows(base[name], adapter, TargetKind.LINEAR)
            expected = matrix @ x[row] + (bias[name] if adapter.bias is None else adapter.bias)
            torch.testing.assert_close(got[row], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("vocab_size", [5, 13])
@pytest.mark.parametrize("ranks", [1, 4])
def test_adapters_on_tied_head_match_lora_formula(vocab_size: int, ranks: int) -> None:
    weight = normal(vocab_size, INPUTS, seed=1)
    adapters: Adapters = [
        ({"lm_head": lora(INPUTS, vocab_size, 3, 10)}, 3.5),
        ({}, 1.0),
        ({"lm_head": lora(INPUTS, vocab_size, 8, 12)}, 0.5),
    ]
    x = normal(len(TOKENS), INPUTS, seed=3)
    shards = [shard_vocab(FakeGroup(rank, ranks), vocab_size) for rank in range(ranks)]
    parts = []
    for rank, shard in enumerate(shards):
        weights = memory_weights({"wte.weight": weight}, rank=rank, ranks=ranks)
        head = MultiAdapterHead.load(weights, "wte", INPUTS, vocab_size, target_name="lm_head")
        parts.append(head(x, adapted_batch(head, adapters))[0][:, : shard.size])
    expected = with_lora(x, x @ weight.t(), adapters, "lm_head")
    torch.testing.assert_close(place(parts, shards), expected, rtol=1e-4, atol=1e-4)


def test_base_model_tokens_are_bitwise_unchanged() -> None:
    weights = memory_weights({"fc.weight": normal(10, INPUTS, seed=1)})
    layer = TensorParallelMultiAdapterLinear(weights, ["fc"], INPUTS, [make_full_shard(10)], bias=False)
    data = adapted_batch(layer, [({"fc": lora(INPUTS, 10, 3, 10)}, 3.5)] * 3)
    x = normal(len(TOKENS), INPUTS, seed=3)
    plain, adapted = layer(x), layer(x, data)
    for row, adapter in enumerate(TOKENS):
        assert torch.equal(plain[row], adapted[row]) == (adapter == 0)
    assert torch.equal(plain, layer(x, adapter_batch([0] * len(TOKENS), data.arena)))


def test_collect_adapter_targets_finds_all_modules() -> None:
    tensors = {
        "wte.weight": normal(6, 4, seed=0),
        "q.weight": normal(8, 4, seed=1),
        "k.weight": normal(4, 4, seed=2),
        "k.bias": normal(4, seed=6),
        "q.bias": normal(8, seed=7),
        "o.weight": normal(4, 8, seed=3),
        "lm_head.weight": normal(6, 4, seed=5),
        "norm.weight": normal(4, seed=8),
        "ln.weight": normal(4, seed=9),
        "ln.bias": normal(4, seed=10),
    }
    weights = memory_weights(tensors)
    model = nn.ModuleList(
        [
            TensorParallelEmbedding(weights, "wte", 6, 4, target_name="embed_tokens"),
            TensorParallelMultiAdapterLinear(
                weights, ["q", "k"], 4, [make_full_shard(8), make_full_shard(4)], bias=True
            ),
            TensorParallelAdapterRowLinear(weights, "o", make_full_shard(8), 4, bias=False),
            RMSNorm("norm", weights, 4),
            RMSNorm("norm", weights, 4, is_adaptable=False),
            LayerNorm("ln", weights, 4),
            MultiAdapterHead.load(weights, "lm_head", 4, 6),
        ]
    )
    targets = collect_adapter_targets(model)
    assert {name: (target.kind, target.inputs.full, target.outputs.full) for name, target in targets.items()} == {
        "embed_tokens": (TargetKind.EMBEDDING, 6, 4),
        "q": (TargetKind.LINEAR, 4, 8),
        "k": (TargetKind.LINEAR, 4, 4),
        "o": (TargetKind.LINEAR, 8, 4),
        "norm": (TargetKind.NORM, 4, 4),
        "ln": (TargetKind.NORM, 4, 4),
        "lm_head": (TargetKind.HEAD, 4, 6),
    }
    assert (targets["q"].columns, targets["k"].columns) == (slice(0, 8), slice(8, 12))
    for name, target in targets.items():
        stored = {"embed_tokens": "wte"}.get(name, name)
        assert torch.equal(target.read(), tensors[f"{stored}.weight"])
        assert (target.bias is None) == (f"{stored}.bias" not in tensors)
        assert target.bias is None or torch.equal(target.bias, tensors[f"{stored}.bias"])
        assert target.adds_bias


def test_only_first_rank_adds_bias() -> None:
    tensors = {"o.weight": normal(4, 8, seed=1), "o.bias": normal(4, seed=2), "wte.weight": normal(6, 4, seed=3)}
    for rank in range(2):
        weights = memory_weights(tensors, rank=rank, ranks=2)
        shard = shard_evenly(weights.process_group, 8, "inputs")
        row = TensorParallelAdapterRowLinear(weights, "o", shard, 4, bias=True).targets[0]
        assert torch.equal(row.read(), shard.select(tensors["o.weight"], 1))
        assert row.adds_bias == (rank == 0)
        assert torch.equal(present(row.bias), tensors["o.bias"])
        embedding = TensorParallelEmbedding(weights, "wte", 6, 4).targets[0]
        assert embedding.inputs == shard_vocab(weights.process_group, 6)
        assert embedding.adds_bias == (rank == 0)


# --- Invalid checkpoints


@pytest.mark.parametrize("bias", [(10,), (9,)])
def test_tensor_shape_mismatch_is_rejected(bias: tuple[int]) -> None:
    inputs = INPUTS + 1 if bias == (10,) else INPUTS
    weights = memory_weights({"fc.weight": torch.zeros(10, INPUTS), "fc.bias": torch.zeros(bias)})
    with pytest.raises(WeightsError, match=r"'fc\.(weight|bias)' has shape"):
        TensorParallelMultiAdapterLinear(weights, ["fc"], inputs, [make_full_shard(10)], bias=True)
    with pytest.raises(WeightsError, match=r"'fc\.(weight|bias)' has shape"):
        TensorParallelAdapterRowLinear(weights, "fc", make_full_shard(inputs), 10, bias=True)


def test_transposed_matrix_is_rejected() -> None:
    weights = memory_weights({"fc.weight": torch.zeros(INPUTS, 10)})
    with pytest.raises(WeightsError, match=r"\(12, 10\), expected \(10, 12\)"):
        TensorParallelMultiAdapterLinear(weights, ["fc"], INPUTS, [make_full_shard(10)], bias=False)


def test_missing_bias_is_rejected_on_all_ranks() -> None:
    weights = memory_weights({"fc.weight": torch.zeros(10, INPUTS)}, rank=1, ranks=2)
    shard = shard_evenly(weights.process_group, INPUTS, "inputs")
    # Rank 1 does not add the bias, but must reject a checkpoint without it.
    with pytest.raises(WeightsError, match=r"'fc.bias' is missing"):
        TensorParallelAdapterRowLinear(weights, "fc", shard, 10, bias=True)
