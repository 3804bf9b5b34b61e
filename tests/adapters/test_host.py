"""Compare prepared adapters for one rank with direct computations on full matrices."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lorax_server.adapters import host as host_module
from lorax_server.adapters.host import UNIT_BYTES, HostAdapter, check_ranks, empty_table, prepare
from lorax_server.adapters.target import AdapterTarget, TargetKind
from lorax_server.adapters.weights import ModuleWeights
from lorax_server.distributed import FakeGroup, ProcessGroup, make_full_shard, shard_evenly, shard_vocab
from lorax_server.errors import AdapterError
from lorax_server.kernels import NUM_OFFSETS, Field
from lorax_server.layers.linear import TensorParallelAdapterRowLinear
from lorax_server.weights import Weights
from tests.builders import CPU, adapter_batch, weight_options
from tests.lora import GivenAdapter, fill_arena
from tests.optional import present
from tests.ranks import RankPool

VOCAB, SIZE, RANK, SCALE = 11, 6, 2, 0.75
HALF = [torch.bfloat16, torch.float16]
ALONE, *TWO_RANKS = FakeGroup(), FakeGroup(0, 2), FakeGroup(1, 2)


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


BASE, BIAS = normal(VOCAB, SIZE, seed=1), normal(VOCAB, seed=2)  # linear layer from `SIZE` to `VOCAB`


def make_target(kind: TargetKind, group: ProcessGroup = ALONE, dtype: torch.dtype = torch.float32) -> AdapterTarget:
    """Return a target for one rank: sharded embedding, head or linear layer, or an unsharded norm."""
    shard = shard_vocab(group, VOCAB)
    weight, columns = shard.select(BASE, 0).to(dtype), slice(0, shard.size)
    if kind is TargetKind.EMBEDDING:
        return AdapterTarget("x", kind, shard, make_full_shard(SIZE), slice(0, SIZE), weight, None, group.rank() == 0)
    if kind is TargetKind.NORM:
        return AdapterTarget(
            "x",
            kind,
            make_full_shard(SIZE),
            make_full_shard(SIZE),
            slice(0, SIZE),
            BASE[0].to(dtype),
            BASE[1].to(dtype),
        )
    bias = shard.select(BIAS, 0).to(dtype) if kind is TargetKind.LINEAR else None
    return AdapterTarget("x", kind, make_full_shard(SIZE), shard, columns, weight, bias)


def factors(kind: TargetKind, vocab_size: int = VOCAB, *, dora: bool = False) -> ModuleWeights:
    inputs, outputs = (vocab_size, SIZE) if kind is TargetKind.EMBEDDING else (SIZE, vocab_size)
    magnitude = normal(outputs, seed=5) if dora else None
    return ModuleWeights(normal(RANK, inputs, seed=3), normal(outputs, RANK, seed=4), SCALE, magnitude)


class Prepared:
    """One prepared adapter at one target module, with accessors for its buffer."""

    def __init__(
        self,
        weights: ModuleWeights,
        target: AdapterTarget,
        dtype: torch.dtype = torch.float32,
        group: ProcessGroup = ALONE,
    ) -> None:
        self.host = prepare(GivenAdapter({"x": weights}, VOCAB), {"x": target}, dtype, group)
        self.fields = dict(zip(Field, self.host.table[0].tolist(), strict=True))

    def piece(self, field: Field, *shape: int) -> torch.Tensor:
        offset, size = self.fields[field], torch.Size(shape).numel()
        assert offset >= 0, f"{field.name} is missing"
        return self.host.buffer[offset : offset + size].view(shape)

    def row_ids(self) -> list[int]:
        count, itemsize = self.fields[Field.NUM_ROWS], self.host.buffer.itemsize
        return self.piece(Field.ROW_IDS, count * 4 // itemsize).view(torch.int32).tolist() if count else []

    def rows(self) -> torch.Tensor:
        return self.piece(Field.ROWS, self.fields[Field.NUM_ROWS], SIZE)

    def new_rows(self) -> torch.Tensor:
        return self.piece(Field.NEW_ROWS, self.fields[Field.NUM_NEW_ROWS], SIZE)

    def present(self) -> set[Field]:
        return {field for field in Field if field < NUM_OFFSETS and self.fields[field] >= 0}


def merged_rows(base: torch.Tensor, weights: ModuleWeights, kind: TargetKind) -> torch.Tensor:
    """Return the equivalent full matrix for an adapted embedding, head or linear layer."""
    rows = base if weights.weight is None else weights.weight
    if weights.token_rows is not None:
        rows = F.pad(rows, (0, 0, 0, max(0, max(weights.token_ids) + 1 - len(rows)))).clone()
        for token, row in zip(weights.token_ids, weights.token_rows, strict=True):
            rows[token] = row
    if weights.lora_a is not None:
        delta = weights.scale * (present(weights.lora_b) @ weights.lora_a)
        rows = rows + (delta.t() if kind is TargetKind.EMBEDDING else delta)
    if weights.magnitude is None:
        return rows
    norms = rows.norm(dim=0, keepdim=True) if kind is TargetKind.EMBEDDING else rows.norm(dim=1, keepdim=True)
    result: torch.Tensor = rows / norms * weights.magnitude.view(norms.shape)
    return result


# --- ranks


@pytest.mark.parametrize("kind", [TargetKind.LINEAR, TargetKind.HEAD])
def test_rank_above_kernel_limit_is_rejected(kind: TargetKind) -> None:
    adapter, targets = GivenAdapter({"x": factors(kind)}, VOCAB), {"x": make_target(kind)}
    with pytest.raises(
        AdapterError, match=f"module 'x' has rank {RANK}, but the kernels for this device support at most 1"
    ):
        check_ranks(adapter, targets, RANK - 1)
    check_ranks(adapter, targets, RANK)
    check_ranks(adapter, targets, None)
    assert prepare(adapter, targets, torch.float32, ALONE).table[0, Field.RANK] == RANK


def test_embeddings_have_no_rank_limit() -> None:
    adapter = GivenAdapter({"x": factors(TargetKind.EMBEDDING)}, VOCAB)
    targets = {"x": make_target(TargetKind.EMBEDDING)}
    check_ranks(adapter, targets, 1)
    assert prepare(adapter, targets, torch.float32, ALONE).table[0, Field.RANK] == RANK


# --- layout


def all_module_weights() -> tuple[dict[str, AdapterTarget], dict[str, ModuleWeights]]:
    grown = torch.cat([BASE + 1, normal(3, SIZE, seed=6)])
    tokens: dict[str, Any] = {"token_ids": (VOCAB + 1, 4), "token_rows": normal(2, SIZE, seed=7)}
    targets = {kind.value: replace(make_target(kind), name=kind.value) for kind in TargetKind}
    return targets | {"other": replace(targets["linear"], name="other")}, {
        "head": replace(factors(TargetKind.HEAD, VOCAB + 3, dora=True), weight=grown, **tokens),
        "embedding": replace(factors(TargetKind.EMBEDDING, VOCAB + 3, dora=True), weight=grown, **tokens),
        "linear": replace(factors(TargetKind.LINEAR, dora=True), bias=BIAS + 1),
        "norm": ModuleWeights(weight=normal(SIZE, seed=8), bias=normal(SIZE, seed=9)),
    }


def extents(adapter: HostAdapter, targets: Mapping[str, AdapterTarget]) -> list[tuple[int, int]]:
    """Return the start and end offsets of each tensor from the table."""
    result = []
    for target, values in zip(targets.values(), adapter.table.tolist(), strict=True):
        fields = dict(zip(Field, values, strict=True))
        size = target.outputs.size if target.kind is TargetKind.EMBEDDING else target.inputs.size
        sizes = {
            Field.A: fields[Field.RANK] * target.inputs.size,
            Field.B: fields[Field.RANK] * target.outputs.size,
            Field.OUTPUT_SCALE: target.outputs.size,
            Field.OUTPUT_BIAS: target.outputs.size,
            Field.ROW_IDS: fields[Field.NUM_ROWS] * 4 // adapter.buffer.itemsize,
            Field.ROWS: fields[Field.NUM_ROWS] * size,
            Field.NEW_ROWS: fields[Field.NUM_NEW_ROWS] * size,
        }
        result += [(fields[field], fields[field] + count) for field, count in sizes.items() if fields[field] >= 0]
    return sorted(result)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_tensors_are_aligned_without_overlap(dtype: torch.dtype) -> None:
    targets, modules = all_module_weights()
    adapter = prepare(GivenAdapter(modules, VOCAB + 3), targets, dtype, ALONE)
    pieces = extents(adapter, targets)
    assert (
        len(pieces) == 2 * 6 + 4 + 2
    )  # embedding and head have no output bias, linear has no rows, norm has two vectors
    for start, _ in pieces:
        assert start * dtype.itemsize % UNIT_BYTES == 0
    stops = [0, *(stop for _, stop in pieces)]
    for (start, _), before in zip([*pieces, (adapter.buffer.numel(), 0)], stops, strict=True):
        assert before <= start < before + UNIT_BYTES // dtype.itemsize  # no unused units
        assert not adapter.buffer[before:start].any()
    assert adapter.buffer.dtype == dtype
    assert adapter.units * UNIT_BYTES == adapter.buffer.nbytes
    assert adapter.vocab_size == VOCAB + 3


def test_module_without_tensors_has_empty_fields() -> None:
    targets, modules = all_module_weights()
    adapter = prepare(GivenAdapter({"linear": modules["linear"]}, VOCAB), targets, torch.float32, ALONE)
    index = list(targets).index("linear")
    assert torch.equal(adapter.table[index + 1 :], empty_table(len(targets) - index - 1))
    assert torch.equal(adapter.table[:index], empty_table(index))
    assert adapter.scales.tolist() == [SCALE if name == "linear" else 0 for name in targets]
    nothing = prepare(GivenAdapter({}, VOCAB), targets, torch.float32, ALONE)
    assert (nothing.units, bool(nothing.buffer.any())) == (1, False)
    assert torch.equal(nothing.table, empty_table(len(targets)))


def test_prepare_does_not_modify_inputs() -> None:
    targets, modules = all_module_weights()
    tensors = [value for weights in modules.values() for value in vars(weights).values() if torch.is_tensor(value)]
    tensors += [
        tensor for target in targets.values() for tensor in (target.weight, target.bias) if torch.is_tensor(tensor)
    ]
    before = [tensor.clone() for tensor in tensors]
    prepare(GivenAdapter(modules, VOCAB + 3), targets, torch.float32, ALONE)
    assert all(map(torch.equal, tensors, before))


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("kind", [TargetKind.LINEAR, TargetKind.HEAD, TargetKind.EMBEDDING])
@pytest.mark.parametrize("group", [ALONE, *TWO_RANKS], ids=["whole", "first", "second"])
def test_factors_are_sharded_and_cast(kind: TargetKind, group: FakeGroup, dtype: torch.dtype) -> None:
    target, weights = make_target(kind, group, dtype), factors(kind)
    result = Prepared(weights, target, dtype, group)
    lora_a, lora_b = target.shard_factors(present(weights.lora_a), present(weights.lora_b))
    assert torch.equal(result.piece(Field.A, *lora_a.shape), lora_a.to(dtype))
    assert torch.equal(result.piece(Field.B, *lora_b.shape), lora_b.to(dtype))
    assert result.fields[Field.RANK] == RANK
    assert result.host.scales.tolist() == [SCALE]
    assert result.present() == {Field.A, Field.B}


@pytest.mark.parametrize("stored", HALF)
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("kind", [TargetKind.LINEAR, TargetKind.HEAD, TargetKind.EMBEDDING])
def test_half_precision_factors_match_float32(kind: TargetKind, dora: bool, stored: torch.dtype) -> None:
    weights = factors(kind, dora=dora)
    half = replace(weights, lora_a=present(weights.lora_a).to(stored), lora_b=present(weights.lora_b).to(stored))
    full = replace(half, lora_a=present(half.lora_a).float(), lora_b=present(half.lora_b).float())
    for dtype in (torch.float32, *HALF):
        target = make_target(kind, ALONE, dtype)
        actual, expected = Prepared(half, target, dtype).host, Prepared(full, target, dtype).host
        assert torch.equal(actual.buffer, expected.buffer)
        assert torch.equal(actual.table, expected.table)


@pytest.mark.parametrize("rank", [1, 5, 300, 20000])
def test_factors_are_transposed_for_all_shapes(rank: int) -> None:
    """Include matrices that are copied in several blocks with a shorter last block."""
    generator = torch.Generator().manual_seed(rank)
    a, b = torch.randn(rank, SIZE, generator=generator), torch.randn(SIZE, rank, generator=generator)
    result = Prepared(ModuleWeights(a, b, 1.0), make_target(TargetKind.LINEAR), torch.float32)
    assert torch.equal(result.piece(Field.A, rank, SIZE), a)
    assert torch.equal(result.piece(Field.B, rank, SIZE), b.t())


# --- output scales and output biases


@pytest.fixture(params=[4, 1024], ids=["in pieces", "at once"])
def norm_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "NORM_BLOCK_ROWS", request.param)


@pytest.mark.parametrize("bias", [None, BIAS * 3 - 1], ids=["base bias", "own bias"])
@pytest.mark.parametrize("group", [ALONE, *TWO_RANKS], ids=["whole", "first", "second"])
@pytest.mark.usefixtures("norm_rows")
def test_dora_becomes_output_scale_and_bias(group: FakeGroup, bias: torch.Tensor | None) -> None:
    target, weights = make_target(TargetKind.LINEAR, group), replace(factors(TargetKind.LINEAR, dora=True), bias=bias)
    result = Prepared(weights, target, group=group)
    delta = SCALE * present(weights.lora_b) @ present(weights.lora_a)
    factor = present(weights.magnitude) / (BASE + delta).norm(dim=1)
    shift = (BIAS if bias is None else bias) - BIAS * factor
    size = target.outputs.size
    torch.testing.assert_close(result.piece(Field.OUTPUT_SCALE, size), target.outputs.select(factor, 0))
    torch.testing.assert_close(result.piece(Field.OUTPUT_BIAS, size), target.outputs.select(shift, 0))


def test_bias_becomes_output_bias() -> None:
    new, added, target = normal(VOCAB, seed=6), normal(VOCAB, seed=7), make_target(TargetKind.LINEAR)
    alone = Prepared(ModuleWeights(bias=new), target)
    assert alone.present() == {Field.OUTPUT_BIAS}
    torch.testing.assert_close(alone.piece(Field.OUTPUT_BIAS, VOCAB), new - BIAS)
    low_rank = Prepared(replace(factors(TargetKind.LINEAR), lora_bias=added), replace(target, bias=None))
    torch.testing.assert_close(low_rank.piece(Field.OUTPUT_BIAS, VOCAB), added * SCALE)
    both = Prepared(replace(factors(TargetKind.LINEAR), lora_bias=added, bias=new), target)
    torch.testing.assert_close(both.piece(Field.OUTPUT_BIAS, VOCAB), new - BIAS + added * SCALE)


def test_only_one_rank_adds_output_bias() -> None:
    target = replace(make_target(TargetKind.LINEAR), bias=None, adds_bias=False)
    weights = replace(factors(TargetKind.LINEAR), bias=BIAS, lora_bias=BIAS)
    assert Prepared(weights, target).present() == {Field.A, Field.B}


@pytest.mark.parametrize("bias", [None, BASE[3]], ids=["base bias", "own bias"])
def test_norm_weight_becomes_output_scale(bias: torch.Tensor | None) -> None:
    result = Prepared(ModuleWeights(weight=BASE[2], bias=bias), make_target(TargetKind.NORM))
    assert result.present() == {Field.OUTPUT_SCALE, Field.OUTPUT_BIAS}
    x = normal(SIZE, seed=6)
    adapted = (x * BASE[0] + BASE[1]) * result.piece(Field.OUTPUT_SCALE, SIZE) + result.piece(Field.OUTPUT_BIAS, SIZE)
    torch.testing.assert_close(adapted, x * BASE[2] + (BASE[1] if bias is None else bias), rtol=1e-5, atol=1e-5)


GROWN = torch.cat([BASE, normal(3, SIZE, seed=6)])
CHANGED = torch.cat([BASE[:4], BASE[4:9] + 1, GROWN[9:]])
VOCABULARIES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "tokens replaced": {"token_ids": (9, 2), "token_rows": normal(2, SIZE, seed=7)},
    "tokens added": {"token_ids": (VOCAB, 2, VOCAB + 1), "token_rows": normal(3, SIZE, seed=7)},
    "matrix replaced": {"weight": CHANGED[:VOCAB]},
    "matrix grown": {"weight": CHANGED},
    "matrix grown and tokens added": {
        "weight": CHANGED,
        "token_ids": (VOCAB + 3, 5, VOCAB),
        "token_rows": normal(3, SIZE, seed=7),
    },
}


def with_vocabulary(name: str, kind: TargetKind, *, low_rank: bool, dora: bool) -> tuple[ModuleWeights, int]:
    """Return an adapter that changes the vocabulary, and the new size."""
    changes = VOCABULARIES[name]
    vocab_size = max(len(changes.get("weight", BASE)), 1 + max(changes.get("token_ids", (0,))))
    return replace(factors(kind, vocab_size, dora=dora) if low_rank else ModuleWeights(), **changes), vocab_size


@pytest.mark.parametrize("kind", [TargetKind.HEAD, TargetKind.EMBEDDING])
@pytest.mark.parametrize("name", VOCABULARIES)
@pytest.mark.usefixtures("norm_rows")
def test_dora_scales_embedding_and_head(name: str, kind: TargetKind) -> None:
    weights, vocab_size = with_vocabulary(name, kind, low_rank=True, dora=True)
    actual = Prepared(weights, make_target(kind))
    norms = merged_rows(BASE, replace(weights, magnitude=None), kind).norm(dim=0 if kind is TargetKind.EMBEDDING else 1)
    size = SIZE if kind is TargetKind.EMBEDDING else VOCAB
    torch.testing.assert_close(actual.piece(Field.OUTPUT_SCALE, size), (weights.magnitude / norms)[:size])
    assert actual.fields[Field.NUM_NEW_ROWS] == vocab_size - VOCAB
    if vocab_size > VOCAB:
        expected = merged_rows(BASE, weights, kind)[VOCAB:]
        torch.testing.assert_close(actual.new_rows(), expected, rtol=1e-5, atol=1e-5)


# --- rows


@pytest.mark.parametrize("kind", [TargetKind.HEAD, TargetKind.EMBEDDING])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("group", [ALONE, *TWO_RANKS], ids=["whole", "first", "second"])
def test_only_changed_rows_are_stored(kind: TargetKind, dtype: torch.dtype, group: FakeGroup) -> None:
    result = Prepared(ModuleWeights(weight=CHANGED), make_target(kind, group, dtype), dtype, group)
    start, stop = shard_vocab(group, VOCAB).ranges[0]
    mine = [token for token in range(4, 9) if start <= token < stop]
    assert result.row_ids() == [token - start for token in mine]
    assert torch.equal(result.rows(), CHANGED[mine].to(dtype))
    assert torch.equal(result.new_rows(), CHANGED[VOCAB:].to(dtype))
    assert result.present() == {Field.ROW_IDS, Field.ROWS, Field.NEW_ROWS}


@pytest.mark.parametrize("group", TWO_RANKS, ids=["first", "second"])
def test_trained_token_rows_override_matrix_rows(group: FakeGroup) -> None:
    rows = normal(4, SIZE, seed=7)
    weights = ModuleWeights(weight=CHANGED, token_ids=(VOCAB + 1, 10, 5, 0), token_rows=rows)
    actual = Prepared(weights, make_target(TargetKind.HEAD, group), group=group)
    expected = [{0: rows[3], 4: CHANGED[4], 5: rows[2]}, {0: CHANGED[6], 1: CHANGED[7], 2: CHANGED[8], 4: rows[1]}]
    assert actual.row_ids() == list(expected[group.rank()])
    assert torch.equal(actual.rows(), torch.stack(list(expected[group.rank()].values())))
    assert torch.equal(actual.new_rows(), torch.stack([CHANGED[VOCAB], rows[0], CHANGED[VOCAB + 2]]))


@pytest.mark.parametrize("group", TWO_RANKS, ids=["first", "second"])
@pytest.mark.parametrize("kind", [TargetKind.HEAD, TargetKind.EMBEDDING])
@pytest.mark.parametrize("rows", [5, 8])
def test_smaller_vocabulary_adds_no_rows(kind: TargetKind, rows: int, group: FakeGroup) -> None:
    weights = replace(factors(kind, rows), weight=CHANGED[:rows])
    target = make_target(kind, group)
    result = Prepared(weights, target, group=group)
    start, stop = shard_vocab(group, VOCAB).ranges[0]
    assert result.row_ids() == [token - start for token in range(4, rows) if start <= token < stop]
    assert result.fields[Field.NUM_NEW_ROWS] == 0
    lora_a, lora_b = present(weights.lora_a), present(weights.lora_b)
    field, of_tokens = (Field.A, lora_a.t()) if kind is TargetKind.EMBEDDING else (Field.B, lora_b)
    full = F.pad(of_tokens, (0, 0, 0, VOCAB - rows))[start:stop]
    local = result.piece(field, *(full.shape if kind is TargetKind.EMBEDDING else full.t().shape))
    assert torch.equal(local if kind is TargetKind.EMBEDDING else local.t(), full)


@pytest.mark.parametrize("dtype", HALF)
def test_row_ids_are_exact_in_half_precision(dtype: torch.dtype) -> None:
    """Use token IDs whose bits are infinity, NaN or subnormal as a float."""
    ids = [1, 31744, 31745, 32385, 32640, 32641, 65408, 65535, 98689]
    target = AdapterTarget(
        "x", TargetKind.HEAD, make_full_shard(1), make_full_shard(99000), slice(0, 99000), torch.zeros(99000, 1), None
    )
    adapter = GivenAdapter({"x": ModuleWeights(token_ids=tuple(ids), token_rows=torch.ones(len(ids), 1))}, 99000)
    arena = fill_arena({"x": target}, [adapter], CPU, ALONE, dtype)
    assert arena.head_rows(1, "x").row_ids.tolist() == ids


# --- rejected adapters


@pytest.mark.parametrize("number", [1e6, -1e6, float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["lora_a", "lora_b", "bias", "lora_bias", "token_rows", "weight"])
def test_overflowing_values_are_rejected(part: str, number: float) -> None:
    kind = TargetKind.HEAD if part in ("token_rows", "weight") else TargetKind.LINEAR
    weights = replace(factors(kind), bias=BIAS, lora_bias=BIAS, token_ids=(3,), token_rows=BASE[:1])
    weights = replace(weights, weight=BASE if kind is TargetKind.HEAD else None)
    wrong = getattr(weights, part).clone()
    wrong[0] = number
    for dtype in HALF:
        target, given = make_target(kind, ALONE, dtype), replace(weights, **{part: wrong})
        if dtype == torch.bfloat16 and abs(number) == 1e6:
            Prepared(given, target, dtype)
            continue
        with pytest.raises(AdapterError, match=f"module 'x' has values that overflow {dtype}"):
            Prepared(given, target, dtype)


def test_overflowing_weight_difference_is_rejected() -> None:
    """The base matrix and the replacement are representable, but their difference is not."""
    for dtype, large in ((torch.float16, 4e4), (torch.bfloat16, 3e38)):
        target = replace(
            make_target(TargetKind.LINEAR, dtype=dtype), weight=torch.full((VOCAB, SIZE), large, dtype=dtype)
        )
        Prepared(ModuleWeights(weight=torch.zeros(VOCAB, SIZE)), target, dtype)
        with pytest.raises(AdapterError, match=f"module 'x' has values that overflow {dtype}"):
            Prepared(ModuleWeights(weight=torch.full((VOCAB, SIZE), -large)), target, dtype)


def test_overflowing_factors_are_rejected() -> None:
    target = replace(make_target(TargetKind.NORM, dtype=torch.float16), weight=torch.full((SIZE,), 1e-4).half())
    with pytest.raises(AdapterError, match="overflow"):
        Prepared(ModuleWeights(weight=torch.full((SIZE,), 100.0)), target, torch.float16)


@pytest.mark.parametrize("kind", [TargetKind.LINEAR, TargetKind.HEAD, TargetKind.EMBEDDING])
def test_dora_with_zero_norm_is_rejected(kind: TargetKind) -> None:
    target = make_target(kind)
    weight = target.read().clone()
    weight[:, 2] = weight[2] = 0
    weights = factors(kind, dora=True)
    zero = replace(weights, lora_b=torch.zeros_like(present(weights.lora_b)))
    with pytest.raises(AdapterError, match=r"'given': module 'x' .* norm of the adapted matrix contains zeros"):
        Prepared(zero, replace(target, weight=weight))
    Prepared(weights, replace(target, weight=weight))  # the LoRA delta makes the norm nonzero


def test_dora_with_zero_added_row_is_rejected() -> None:
    weights = replace(factors(TargetKind.HEAD, VOCAB + 1, dora=True), weight=F.pad(BASE, (0, 0, 0, 1)))
    present(weights.lora_b)[-1] = 0
    with pytest.raises(AdapterError, match="norm of an added row contains zeros"):
        Prepared(weights, make_target(TargetKind.HEAD))


def test_zero_norm_weight_is_rejected() -> None:
    target = replace(make_target(TargetKind.NORM), weight=torch.tensor([1.0, 2, 0, 1, 1, 1]))
    with pytest.raises(AdapterError, match="base model's norm weight contains zeros"):
        Prepared(ModuleWeights(weight=BASE[2]), target)


# --- tensor parallelism


def run_row_linear(group: ProcessGroup, x: torch.Tensor, adapters: list[ModuleWeights]) -> torch.Tensor:
    weights = Weights({"x.weight": BASE, "x.bias": BIAS}, **(weight_options() | {"process_group": group}))
    shard = shard_evenly(group, SIZE, "inputs")
    layer = TensorParallelAdapterRowLinear(weights, "x", shard, VOCAB, bias=True)
    given = [GivenAdapter({"x": adapter}, VOCAB) for adapter in adapters]
    arena = fill_arena({"x": layer.targets[0]}, given, CPU, group)
    out: torch.Tensor = layer(shard.select(x, 1), adapter_batch([2, 0, 1, 1, *[2] * 12], arena))
    return out


def test_row_parallel_dora_sums_norms_and_adds_bias_once(ranks: RankPool) -> None:
    """Norms need a sum over ranks, and only one rank adds the output bias."""
    plain = factors(TargetKind.LINEAR, dora=True)
    own_bias = replace(plain, lora_a=present(plain.lora_a) + 1, bias=BIAS + 2)
    x = normal(16, SIZE, seed=6)
    base = x @ BASE.t() + BIAS
    first = x @ merged_rows(BASE, plain, TargetKind.LINEAR).t() + BIAS
    second = x @ merged_rows(BASE, own_bias, TargetKind.LINEAR).t() + BIAS + 2
    expected = torch.cat([second[:1], base[1:2], first[2:4], second[4:]])
    args = x, [plain, own_bias]
    for out in (run_row_linear(ALONE, *args), *ranks.run(2, run_row_linear, *args)):
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
