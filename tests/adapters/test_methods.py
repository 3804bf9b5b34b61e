"""PEFT methods other than plain LoRA, and fully replaced modules: valid and damaged adapters."""

import json
from collections.abc import Callable, Mapping
from functools import cache
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from peft import IA3Config, LNTuningConfig, VeraConfig
from safetensors.torch import load_file
from torch.profiler import ProfilerActivity, profile

from lorax_server.adapters.checkpoint import read_header
from lorax_server.adapters.config import parse_config
from lorax_server.adapters.host import UNIT_BYTES, check_ranks, prepare
from lorax_server.adapters.methods import contents, matrices
from lorax_server.adapters.methods.size import count_elements
from lorax_server.adapters.target import AdapterTarget, TargetKind
from lorax_server.distributed import FakeGroup
from lorax_server.errors import AdapterError
from lorax_server.files.names import CONFIG_FILE, WEIGHTS_FILE
from lorax_server.kernels import Field
from lorax_server.layers.targets import collect_adapter_targets
from tests.adapters.test_checkpoint import write_tensors
from tests.builders import CPU
from tests.parity.adapters.cases import CASES, KASA, Case
from tests.parity.adapters.served import make_model, open_adapter
from tests.parity.variant import VOCAB

Tensors = dict[str, torch.Tensor]
Damage = Callable[[Tensors], Any] | Mapping[str, torch.Tensor]
LLAMA, GPT2, QWEN = "llama-gqa", "gpt2", "qwen3-head-norm"
LAYER = "base_model.model.model.layers.1."
Q, K, V = (f"{LAYER}self_attn.{name}_proj." for name in "qkv")
DOWN, NORM = f"{LAYER}mlp.down_proj.", f"{LAYER}input_layernorm."
FC, OUT = (f"base_model.model.transformer.h.1.mlp.{name}." for name in ("c_fc", "c_proj"))
A, B = "base_model.vera_A", "base_model.vera_B"
IA3 = Case("", LLAMA, method=IA3Config)
VERA = Case("", LLAMA, {"r": 3, "target_modules": ["q_proj", "down_proj"]}, method=VeraConfig)
VERA_WITHOUT_PROJECTION = Case("", LLAMA, VERA.settings | {"save_projection": False}, method=VeraConfig)
LN_TUNING = Case("", LLAMA, method=LNTuningConfig)
TWO_TARGETS = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
OF_KASA = Case("", LLAMA, TWO_TARGETS | KASA)
SAVED = Case("", LLAMA, TWO_TARGETS | {"modules_to_save": ["k_proj"]})
FUSED = Case("", GPT2, {"r": 4, "modules_to_save": ["c_fc"]})
HEADS = Case("", QWEN, TWO_TARGETS | {"modules_to_save": ["q_norm"]})
TIED = Case("", "llama-tied-head", CASES["weight-tying-rank-of-embedding"].settings)
GPT2_IA3 = Case("", GPT2, method=IA3Config)
BLOCKS = Case("", "llama-mha", CASES["bd-lora"].settings)


@cache
def targets_of(base: str, rank: int = 0, ranks: int = 1) -> dict[str, AdapterTarget]:
    return collect_adapter_targets(make_model(base, CPU, FakeGroup(rank, ranks)))


@cache
def write_and_load(number: int) -> tuple[str, Tensors]:
    with TemporaryDirectory() as folder:
        DAMAGED_CASES[number].write(Path(folder))
        return (Path(folder) / CONFIG_FILE).read_text(), load_file(Path(folder) / WEIGHTS_FILE)


DAMAGED_CASES = [IA3, VERA, VERA_WITHOUT_PROJECTION, LN_TUNING, OF_KASA, SAVED, FUSED, HEADS, TIED, GPT2_IA3, BLOCKS]


def store(folder: Path, case: Case, damage: Damage, changes: Mapping[str, Any]) -> None:
    """Store an adapter written by PEFT, with some tensors and config fields replaced."""
    config, tensors = write_and_load(DAMAGED_CASES.index(case))
    tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    if callable(damage):
        damage(tensors)
    else:
        tensors |= damage
    (folder / CONFIG_FILE).write_text(json.dumps(json.loads(config) | dict(changes)))
    write_tensors(folder / WEIGHTS_FILE, tensors)


def use(folder: Path, targets: Mapping[str, AdapterTarget]) -> None:
    prepare(open_adapter(folder, dict(targets), "acme/tuned"), targets, torch.float32, FakeGroup())


def drop(key: str) -> Damage:
    return lambda tensors: tensors.pop(key)


def set_nan(key: str) -> Damage:
    return lambda tensors: tensors[key].view(-1)[-1:].fill_(torch.nan)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def widen(rank: int) -> Damage:
    """Change the rank of all `v_proj` factors."""

    def damage(tensors: Tensors) -> None:
        for key, tensor in tensors.items():
            if "v_proj" in key:
                shape = [rank if size == 4 else size for size in tensor.shape]
                tensors[key] = torch.ones(shape)

    return damage


NO_FF: dict[str, Any] = {"feedforward_modules": []}
DAMAGED: dict[str, tuple[Case, Damage, Mapping[str, Any], str]] = {
    "IA3: NaN": (IA3, set_nan(K + "ia3_l"), {}, f"'{K}ia3_l' has non-finite values"),
    "IA3: NaN of inputs": (IA3, set_nan(DOWN + "ia3_l"), {}, f"'{DOWN}ia3_l' has non-finite values"),
    "IA3: missing": (IA3, drop(K + "ia3_l"), {}, "'model.layers.1.self_attn.k_proj' is targeted but has no tensors"),
    "IA3: untargeted": (IA3, {Q + "ia3_l": zeros(32, 1)}, {}, "trained tensors for module 'model.layers.1.*q_proj'"),
    "IA3: a norm": (IA3, {NORM + "ia3_l": zeros(32, 1)}, {}, "trained tensors for module 'model.layers.1.input_lay"),
    "IA3: flat": (IA3, {K + "ia3_l": zeros(16)}, {}, rf"'{K}ia3_l' has shape \(16,\), expected \(16, 1\)"),
    "IA3: turned": (IA3, {K + "ia3_l": zeros(1, 16)}, {}, rf"'{K}ia3_l' has shape \(1, 16\), expected"),
    "IA3: long": (IA3, {DOWN + "ia3_l": zeros(1, 49)}, {}, rf"'{DOWN}ia3_l' has shape .* expected \(1, 48\)"),
    "IA3: not of inputs": (IA3, {}, NO_FF, r"down_proj.ia3_l' has shape \(1, 48\), expected \(32, 1\)"),
    "IA3: other inputs": (IA3, {}, {"feedforward_modules": ["k_proj"]}, "k_proj.ia3_l' scales inputs, .* only for"),
    "IA3: with factors": (IA3, {V + "lora_A.weight": zeros(4, 32)}, {}, "lora_A.weight' does not belong to IA3"),
    "IA3: a field of LoRA": (IA3, {}, {"use_dora": True}, "config field use_dora = True is unknown"),
    "IA3: fields of names": (IA3, {}, {"feedforward_modules": 5}, "config field feedforward_modules = 5 must be"),
    "IA3: a place that is no module": (
        *(GPT2_IA3, {f"{OUT[:-1]}:input.weight": zeros(128)}, {}),
        "mlp.c_proj:input.weight' targets a module that this base model does not have",
    ),
    "VeRA: no A": (VERA, drop(A), {}, f"save_projection is true, but the file has no tensor '{A}'"),
    "VeRA: no B": (VERA, drop(B), {}, f"save_projection is true, but the file has no tensor '{B}'"),
    "VeRA: A unasked": (VERA, {}, {"save_projection": False}, f"is false, but the file has a tensor '{A}'"),
    "VeRA: narrow A": (VERA, {A: zeros(3, 47)}, {}, rf"'{A}' has shape \(3, 47\), expected \(3, 48\)"),
    "VeRA: short B": (VERA, {B: zeros(31, 3)}, {}, rf"'{B}' has shape \(31, 3\), expected \(32, 3\)"),
    "VeRA: A twice": (VERA, {A + ".default": zeros(3, 48)}, {}, f"'{A}' and '{A}.default' are duplicates"),
    "VeRA: NaN in A": (VERA, set_nan(A), {}, f"'{A}' has non-finite values"),
    "VeRA: NaN": (VERA, set_nan(Q + "vera_lambda_d"), {}, f"'{Q}vera_lambda_d' has non-finite values"),
    "VeRA: no lambda_d": (VERA, drop(Q + "vera_lambda_d"), {}, f"'{Q}vera_lambda_b' has no counterpart"),
    "VeRA: no lambda_b": (VERA, drop(Q + "vera_lambda_b"), {}, f"'{Q}vera_lambda_d' has no counterpart"),
    "VeRA: long lambda_b": (VERA, {Q + "vera_lambda_b": zeros(33)}, {}, f"'{Q}vera_lambda_b' has shape"),
    "VeRA: another r": (VERA, {}, {"r": 4}, r"vera_lambda_d' has shape \(3,\), expected \(4,\)"),
    "VeRA: no r": (VERA, {}, {"r": None}, "config field r = None"),
    "VeRA: a bias of LoRA": (VERA, {}, {"bias": "lora_only"}, "bias = 'lora_only' must be one of none, all and vera"),
    "VeRA: no seed": (
        VERA_WITHOUT_PROJECTION,
        {},
        {"projection_prng_key": "7"},
        "config field projection_prng_key = '7' must be",
    ),
    "VeRA: a wide seed": (
        VERA_WITHOUT_PROJECTION,
        {},
        {"projection_prng_key": 2**64},
        "config field projection_prng_key",
    ),
    "VeRA: no flag": (VERA, {}, {"save_projection": 1}, "config field save_projection = 1 must be true or false"),
    "VeRA: projections of LoRA": (SAVED, {A: zeros(4, 32)}, {}, f"'{A}' is unknown"),
    "LN: NaN": (LN_TUNING, set_nan(NORM + "ln_tuning_layers.weight"), {}, "ln_tuning_layers.weight' has non-finite"),
    "LN: missing": (
        LN_TUNING,
        drop(NORM + "ln_tuning_layers.weight"),
        {},
        "'model.layers.1.input_layernorm' is targeted",
    ),
    "LN: untargeted": (
        LN_TUNING,
        {},
        {"target_modules": ["norm"]},
        "trained tensors for module 'model.layers.0.input_lay",
    ),
    "LN: long": (LN_TUNING, {NORM + "ln_tuning_layers.weight": zeros(33)}, {}, r"has shape \(33,\), expected \(32,"),
    "LN: a bias": (LN_TUNING, {NORM + "ln_tuning_layers.bias": zeros(32)}, {}, "is a bias for a module without a bias"),
    "LN: twice": (LN_TUNING, {NORM + "weight": zeros(32)}, {}, f"duplicates '{NORM}weight'"),
    "LN: of LoRA": (SAVED, {V + "ln_tuning_layers.weight": zeros(16, 32)}, {}, "weight' does not belong to LORA"),
    "KaSA: no diagonal": (OF_KASA, drop(Q + "lora_diag"), {}, f"'{Q}lora_A.weight' has no lora_diag"),
    "KaSA: long diagonal": (OF_KASA, {Q + "lora_diag": zeros(5)}, {}, rf"'{Q}lora_diag' has shape \(5,\)"),
    "KaSA: NaN": (OF_KASA, set_nan(Q + "lora_diag"), {}, f"'{Q}lora_diag' has non-finite values"),
    "KaSA: not enabled": (OF_KASA, {}, {"kasa_config": None}, "lora_diag' is unexpected: the config does not enable"),
    "KaSA: with DoRA": (OF_KASA, {}, {"use_dora": True}, "config field kasa_config = .* combined with use_dora"),
    "KaSA: all values": (
        OF_KASA,
        widen(16),
        {"rank_pattern": {"v_proj": 16}},
        "v_proj' must be smaller than the matrix size 16",
    ),
    "linear: missing": (SAVED, drop(K + "weight"), {}, "'model.layers.1.self_attn.k_proj' has no weight in the file"),
    "linear: turned": (SAVED, {K + "weight": zeros(32, 16)}, {}, rf"'{K}weight' has shape .* expected \(16, 32\)"),
    "linear: NaN": (SAVED, set_nan(K + "weight"), {}, f"'{K}weight' has non-finite values"),
    "linear: with factors": (
        *(SAVED, {V + "weight": zeros(16, 32)}, {"modules_to_save": ["k_proj", "s.1.self_attn.v_proj"]}),
        f"'{V}weight' replaces a linear layer that other tensors",
    ),
    "linear: GPT-2's turned": (FUSED, {FC + "weight": zeros(128, 32)}, {}, r"c_fc.weight' has .* \(32, 128\)"),
    "linear: GPT-2's bias": (FUSED, drop(FC + "bias"), {}, "'transformer.h.1.mlp.c_fc' has no bias in the file"),
    "norm of heads: missing": (HEADS, drop(f"{LAYER}self_attn.q_norm.weight"), {}, "q_norm' has no weight in the file"),
    "norm of heads: of all heads": (
        *(HEADS, {f"{LAYER}self_attn.q_norm.weight": zeros(64)}, {}),
        r"q_norm.weight' has shape \(64,\), expected \(16,\)",
    ),
    "tied: another rank": (
        *(TIED, {"base_model.model.lm_head.lora_A.weight": zeros(8, 32)}, {}),
        r"lm_head.lora_A.weight' has shape \(8, 32\), expected \(5, 32\)",
    ),
}


@pytest.mark.parametrize(("case", "damage", "changes", "message"), DAMAGED.values(), ids=DAMAGED)
def test_invalid_tensors_are_rejected_on_every_rank(
    case: Case, damage: Damage, changes: Mapping[str, Any], message: str, tmp_path: Path
) -> None:
    store(tmp_path, case, damage, changes)
    refusals = set()
    for rank, ranks in ((0, 1), (0, 2), (1, 2)):
        with pytest.raises(AdapterError, match=f"^adapter 'acme/tuned'.*{message}") as refusal:
            use(tmp_path, targets_of(case.base, rank, ranks))
        refusals.add(str(refusal.value))
    assert len(refusals) == 1


@pytest.mark.parametrize("case", DAMAGED_CASES, ids=lambda case: f"{case.method.__name__}-{case.base}")
def test_valid_adapters_are_accepted(case: Case, tmp_path: Path) -> None:
    store(tmp_path, case, {}, {})
    use(tmp_path, targets_of(case.base))
    adapter = open_adapter(tmp_path, targets_of(case.base))
    half = prepare(adapter, targets_of(case.base), torch.bfloat16, FakeGroup())
    whole = prepare(adapter, targets_of(case.base), torch.float32, FakeGroup())
    assert (half.table[:, :4] >= 0).equal(whole.table[:, :4] >= 0)


def test_ia3_direction_is_inferred_from_shape(tmp_path: Path) -> None:
    store(tmp_path, IA3, {}, {"feedforward_modules": None})
    use(tmp_path, targets_of(LLAMA))


def test_kasa_on_large_matrices_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(tmp_path, OF_KASA, {}, {})
    monkeypatch.setattr(contents, "MAX_KASA_WORK", 3 * (32**3 + 16**3))
    use(tmp_path, targets_of(LLAMA))
    monkeypatch.setattr(contents, "MAX_KASA_WORK", 3 * (32**3 + 16**3) - 1)
    with pytest.raises(AdapterError, match=r"'acme/tuned': KaSA at 6 modules of size up to 32 .* merge_and_unload"):
        use(tmp_path, targets_of(LLAMA))


def test_kasa_work_limit_counts_input_gram_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Column-parallel ranks must use the input Gram matrix, which is larger for `v_proj`."""
    store(tmp_path, OF_KASA, {}, {})
    monkeypatch.setattr(contents, "MAX_KASA_WORK", 6 * 32**3)
    open_adapter(tmp_path, targets_of(LLAMA, 1, 2))
    monkeypatch.setattr(contents, "MAX_KASA_WORK", 6 * 32**3 - 1)
    open_adapter(tmp_path, targets_of(LLAMA))
    with pytest.raises(AdapterError, match="KaSA at 6 modules of size up to 32"):
        open_adapter(tmp_path, targets_of(LLAMA, 1, 2))


@pytest.mark.parametrize("rows", [5, 1024])
@pytest.mark.parametrize("module", ["self_attn.k_proj", "self_attn.q_proj", "mlp.up_proj", "mlp.down_proj"])
def test_smallest_singular_components_use_smaller_gram_matrix(
    module: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This model stores query and key rows in another order than the checkpoint."""
    monkeypatch.setattr(matrices, "BLOCK_ROWS", rows)
    target = targets_of("cohere")[f"model.layers.1.{module}"]
    assert target.outputs.is_whole == (module[-6] not in "qk")
    pauses: list[None] = []
    lora_a, lora_b = matrices.compute_smallest_components(target, 3, FakeGroup(), lambda: pauses.append(None))
    left, values, right = torch.linalg.svd(target.read().double(), full_matrices=False)
    expected = left[:, -3:] * values[-3:] @ right[-3:]
    assert torch.allclose((lora_b.t() @ lora_a).double(), expected, atol=1e-5)
    assert matrices.find_gram_size(target) == len(values)
    assert len(pauses) >= 2 * -(-target.outputs.full // rows)


def test_full_linear_weight_above_rank_limit_is_rejected(tmp_path: Path) -> None:
    store(tmp_path, SAVED, {}, {})
    for ranks, rank in ((1, 16), (2, 8)):  # the smaller dimension of the local shard
        targets = targets_of(LLAMA, 0, ranks)
        adapter = open_adapter(tmp_path, targets)
        check_ranks(adapter, targets, rank)
        with pytest.raises(
            AdapterError, match=rf"k_proj' has rank {rank}, .* support at most {rank - 1}\. .* full rank"
        ):
            check_ranks(adapter, targets, rank - 1)


@pytest.mark.parametrize(
    "case",
    [VERA, VERA_WITHOUT_PROJECTION, OF_KASA, SAVED, FUSED, TIED, IA3],
    ids=lambda case: f"{case.method.__name__}-{case.base}",
)
def test_ranks_are_known_without_reading_tensors(case: Case, tmp_path: Path) -> None:
    store(tmp_path, case, {}, {})
    targets = targets_of(case.base)
    adapter = open_adapter(tmp_path, targets)
    known = [adapter.find_rank(name) if name in adapter.modules else 0 for name in targets]
    assert known == prepare(adapter, targets, torch.float32, FakeGroup()).table[:, Field.RANK].tolist()


@pytest.mark.parametrize("case", DAMAGED_CASES, ids=lambda case: f"{case.method.__name__}-{case.base}")
def test_count_elements_is_upper_bound(case: Case, tmp_path: Path) -> None:
    store(tmp_path, case, {}, {})
    targets = targets_of(case.base)
    config = parse_config(json.loads((tmp_path / CONFIG_FILE).read_text()), "x")
    inputs = max(target.inputs.full for target in targets.values() if target.kind is TargetKind.LINEAR)
    expected = count_elements(config, read_header(tmp_path / WEIGHTS_FILE, "x"), inputs)
    host = prepare(open_adapter(tmp_path, targets), targets, torch.float32, FakeGroup())
    gaps = (host.table[:, :7] >= 0).sum() * (UNIT_BYTES // 4)  # tensors are aligned to units
    assert host.buffer.numel() <= expected + gaps


@pytest.mark.parametrize("modules", [["q_proj", "down_proj"], ["model.layers.1.mlp.down_proj"]], ids=["six", "one"])
def test_vera_memory_grows_with_rank(modules: list[str], tmp_path: Path) -> None:
    """The file stores one value per rank, but memory needs a float32 row per rank and matrix."""
    rank, targets = 3000, targets_of(LLAMA)

    def widen_and_leave_out(tensors: Tensors) -> None:
        for key in [key for key in tensors if not any(f"{name}." in key for name in modules)]:
            del tensors[key]
        tensors.update({key: torch.ones(rank) for key in tensors if key.endswith("lambda_d")})

    store(tmp_path, VERA_WITHOUT_PROJECTION, widen_and_leave_out, {"r": rank, "target_modules": modules})
    adapter = open_adapter(tmp_path, targets)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        prepare(adapter, targets, torch.bfloat16, FakeGroup())
    changes = [event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    peak = max(accumulate(changes))
    counted = count_elements(adapter.config, read_header(tmp_path / WEIGHTS_FILE, "x"), 48) * torch.bfloat16.itemsize
    assert 0.6 * counted < peak < 1.01 * counted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bd_lora_memory_grows_with_blocks(dtype: torch.dtype, tmp_path: Path) -> None:
    """The file stores only diagonal blocks of B, but memory also needs the zeros."""
    rank, blocks, targets = 8 * VOCAB, VOCAB, targets_of("llama-mha")
    head = targets["lm_head"]

    def leave_only_the_head(tensors: Tensors) -> None:
        tensors.clear()
        tensors["base_model.model.lm_head.lora_A.weight"] = torch.ones(rank, head.inputs.full, dtype=dtype)
        tensors["base_model.model.lm_head.lora_B.weight"] = torch.ones(VOCAB, rank // blocks, dtype=dtype)

    config = {"target_modules_bd_a": [], "target_modules_bd_b": ["lm_head"], "nblocks": blocks}
    changes = {"r": rank, "target_modules": ["lm_head"], "use_bdlora": config}
    store(tmp_path, BLOCKS, leave_only_the_head, changes)
    adapter = open_adapter(tmp_path, targets)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        host = prepare(adapter, targets, torch.bfloat16, FakeGroup())
    allocations = [event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    peak, tensors = max(accumulate(allocations)), read_header(tmp_path / WEIGHTS_FILE, "x")
    counted = count_elements(adapter.config, tensors, 48) * torch.bfloat16.itemsize
    stored = sum(info.stop - info.start for info in tensors.values())
    assert host.buffer.nbytes < peak < counted + stored
