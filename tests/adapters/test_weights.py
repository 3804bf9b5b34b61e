"""Open adapters written by PEFT, and reject damaged adapters with the tensor name."""

import json
import os
import time
import tracemalloc
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file

from lorax_server.adapters.config import parse_config
from lorax_server.adapters.host import prepare
from lorax_server.adapters.target import AdapterTarget
from lorax_server.adapters.tensor_reader import is_finite
from lorax_server.adapters.weights import StoredAdapter
from lorax_server.distributed import FakeGroup, ProcessGroup
from lorax_server.errors import AdapterError
from lorax_server.files.names import CONFIG_FILE, WEIGHTS_FILE
from lorax_server.files.regular_file import read_stamp
from lorax_server.layers.targets import collect_adapter_targets
from tests.adapters.test_checkpoint import write_tensors
from tests.builders import CPU
from tests.optional import present
from tests.parity.adapters.cases import Case
from tests.parity.adapters.served import make_model, open_adapter
from tests.parity.variant import VOCAB
from tests.ranks import RankPool

LLAMA, GPT2, NEOX = "llama-gqa", "gpt2", "neox-parallel"
Tensors = dict[str, torch.Tensor]
Damage = Callable[[Tensors], Any] | Mapping[str, torch.Tensor] | None
LAYER = "base_model.model.model.layers.1."
Q, DOWN, K = f"{LAYER}self_attn.q_proj.", f"{LAYER}mlp.down_proj.", f"{LAYER}self_attn.k_proj."
EMBED, HEAD, NORM = (f"base_model.model.{name}." for name in ("model.embed_tokens", "lm_head", "model.norm"))
GPT = "base_model.model.transformer."
C_ATTN = f"{GPT}h.2.attn.c_attn."
ROWS = f"{EMBED}token_adapter.trainable_tokens_delta"
TWO: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "down_proj"]}


@cache
def targets_of(base: str, rank: int = 0, ranks: int = 1) -> dict[str, AdapterTarget]:
    return collect_adapter_targets(make_model(base, CPU, FakeGroup(rank, ranks)))


@cache
def write_and_load(base: str, settings: str, vocab: int) -> tuple[str, Tensors]:
    with TemporaryDirectory() as folder:
        Case("", base, json.loads(settings), vocab).write(Path(folder))
        return (Path(folder) / CONFIG_FILE).read_text(), load_file(Path(folder) / WEIGHTS_FILE)


def store(
    folder: Path,
    settings: Mapping[str, Any] = TWO,
    damage: Damage = None,
    changes: Mapping[str, Any] | None = None,
    base: str = LLAMA,
    vocab: int = VOCAB,
) -> Path:
    """Store an adapter written by PEFT, with some tensors and config fields replaced."""
    config, tensors = write_and_load(base, json.dumps(settings), vocab)
    tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    if callable(damage):
        damage(tensors)
    else:
        tensors |= damage or {}
    (folder / CONFIG_FILE).write_text(json.dumps(json.loads(config) | dict(changes or {})))
    write_tensors(folder / WEIGHTS_FILE, tensors)
    return folder


def remove(key: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(key)


def use(folder: Path, targets: Mapping[str, AdapterTarget]) -> StoredAdapter:
    """Run all checks and conversions that precede the first request."""
    adapter = open_adapter(folder, dict(targets), "acme/tuned")
    prepare(adapter, targets, torch.float32, FakeGroup())
    return adapter


# --- valid adapters

WRITTEN = {
    "llama": (LLAMA, TWO),
    "llama rsLoRA": (LLAMA, TWO | {"use_rslora": True, "rank_pattern": {"q_proj": 3}, "alpha_pattern": {"1.mlp": 5}}),
    "llama DoRA": (LLAMA, TWO | {"use_dora": True}),
    "gpt2": (GPT2, {"r": 4, "target_modules": ["c_attn", "c_fc"], "lora_bias": True}),
    "gpt2 biases": (GPT2, {"r": 4, "target_modules": ["c_attn", "wte"], "bias": "all"}),
}


@pytest.mark.parametrize(("base", "settings"), WRITTEN.values(), ids=WRITTEN)
def test_factors_and_scales_match_peft(base: str, settings: dict[str, Any], tmp_path: Path) -> None:
    adapter = use(store(tmp_path, settings, base=base), targets_of(base))
    oracle = Case("", base, settings).oracle(tmp_path)
    adapted = {name: module for name, module in oracle.named_modules() if isinstance(module, LoraLayer)}
    assert {name for name in adapter.modules if adapter.load(name).lora_a is not None} == set(adapted)
    for name, module in adapted.items():
        result = adapter.load(name)
        factors: Any = (
            (module.lora_embedding_A, module.lora_embedding_B) if "wte" in name else (module.lora_A, module.lora_B)
        )
        for ours, theirs in zip((result.lora_a, result.lora_b), factors, strict=True):
            assert torch.equal(present(ours), getattr(theirs["default"], "weight", theirs["default"]))
        assert result.scale == module.scaling["default"]
        assert (result.magnitude is not None) == module.use_dora["default"]
        assert (result.lora_bias is not None) == settings.get("lora_bias", False)
    assert adapter.vocab_size == VOCAB


@pytest.mark.parametrize(
    ("base", "settings", "damage", "changes"),
    [
        (NEOX, {"target_modules": ["lm_head"]}, "embed_out", {"target_modules": ["embed_out"]}),
        (LLAMA, {"target_modules": "all-linear", "exclude_modules": ["q_proj"]}, "", {"target_modules": "all-linear"}),
        (GPT2, {"target_modules": ["c_attn", "wte"], "ensure_weight_tying": True}, "", {}),
    ],
    ids=["the old name of NeoX's head", "all-linear but some", "GPT-2 with ensure_weight_tying"],
)
def test_unusual_adapters_are_accepted(base: str, settings: Any, damage: str, changes: Any, tmp_path: Path) -> None:
    def rename(tensors: Tensors) -> None:
        for key in [key for key in tensors if damage and "lm_head" in key]:
            tensors[key.replace("lm_head", damage)] = tensors.pop(key)

    use(store(tmp_path, settings, rename, changes, base), targets_of(base))


# --- damaged adapters


def drop(*keys: str) -> Damage:
    return lambda tensors: [tensors.pop(key) for key in keys]


def set_nan(key: str, number: float) -> Damage:
    return lambda tensors: tensors[key].view(-1)[-1:].fill_(number)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


A, B, MAGNITUDE, DELTA = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector", "trainable_tokens_delta"
DORA, BIASED = TWO | {"use_dora": True}, TWO | {"lora_bias": True}
TOKENS, SAVED = TWO | {"trainable_token_indices": [1, 5]}, TWO | {"modules_to_save": ["lm_head", "embed_tokens"]}
BLOCKS = {"use_bdlora": {"target_modules_bd_a": ["q_proj"], "target_modules_bd_b": [], "nblocks": 2}}
FUSED = {"r": 4, "target_modules": ["c_attn"]}


def blocks(nblocks: int, rank: int) -> tuple[Any, Damage, Any, str]:
    """Return a case where the number of blocks does not divide the matrix."""

    def damage(tensors: Tensors) -> None:
        tensors |= {key: torch.ones(rank, 32 // nblocks) for key in tensors if key.endswith(A)}

    bdlora = {"use_bdlora": {"target_modules_bd_a": ["q_proj"], "target_modules_bd_b": [], "nblocks": nblocks}}
    return {"r": rank, "target_modules": ["q_proj"]}, damage, bdlora, "blocks .*'model.layers.0.self_attn.q_proj'"


def token_ids(message: str, **ids: list[int]) -> tuple[Any, Damage, Any, str]:
    named = {name.replace("__", "."): tokens for name, tokens in ids.items()}
    return TOKENS, {}, {"trainable_token_indices": named}, message


DAMAGED: dict[str, tuple[Any, Damage, Any, str]] = {
    "no lora_A": (TWO, drop(Q + A), {}, f"'{Q}{B}' has no counterpart"),
    "no lora_B": (TWO, drop(DOWN + B), {}, f"'{DOWN}{A}' has no counterpart"),
    "no factors": (TWO, drop(Q + A, Q + B), {}, "'model.layers.1.self_attn.q_proj' is targeted but has no tensors"),
    "empty": (TWO, dict.clear, {}, "has no tensors"),
    "more targets": (TWO, {}, {"target_modules": [*TWO["target_modules"], "k_proj"]}, "'model.layers.0.*k_proj'"),
    "all-linear": (TWO, {}, {"target_modules": "all-linear"}, "'model.layers.0.self_attn.k_proj' is targeted"),
    "fewer targets": (
        TWO,
        {},
        {"target_modules": ["q_proj"]},
        "trained tensors for module 'model.layers.0.mlp.down_proj'",
    ),
    "pattern": (
        TWO,
        {},
        {"target_modules": r".*[02]\.\w+\.(q|down)_proj"},
        "trained tensors for module 'model.layers.1.*'",
    ),
    "excluded": (
        TWO,
        {},
        {"exclude_modules": ["q_proj"]},
        "trained tensors for module 'model.layers.0.self_attn.q_proj'",
    ),
    "fewer layers": (
        TWO,
        {},
        {"layers_to_transform": [0, 2]},
        "trained tensors for module 'model.layers.1.self_attn.q_proj'",
    ),
    "saved": (TWO, {}, {"modules_to_save": ["mlp"]}, "trained tensors for module 'model.layers.0.mlp.down_proj'"),
    "norm": (TWO, {NORM + A: zeros(4, 32), NORM + B: zeros(32, 4)}, {"target_modules": None}, "module 'model.norm'"),
    "rank of A": (TWO, {Q + A: zeros(5, 32)}, {}, rf"'{Q}{A}' has shape \(5, 32\), expected \(4, 32\)"),
    "rank of B": (TWO, {Q + B: zeros(32, 3)}, {}, rf"'{Q}{B}' has shape \(32, 3\), expected \(32, 4\)"),
    "inputs": (TWO, {DOWN + A: zeros(4, 32)}, {}, rf"'{DOWN}{A}' has shape \(4, 32\), expected \(4, 48\)"),
    "outputs": (TWO, {Q + B: zeros(16, 4)}, {}, rf"'{Q}{B}' has shape \(16, 4\), expected \(32, 4\)"),
    "scalar": (TWO, {Q + A: torch.tensor(1.0)}, {}, f"'{Q}{A}' has shape"),
    "another r": (TWO, {}, {"r": 8}, r"has shape \(4, \d+\), expected \(8, "),
    "another pattern": (TWO, {}, {"rank_pattern": {"1.mlp.*": 2}}, rf"'{DOWN}{A}' has shape .* \(2, 48\)"),
    "NaN": (TWO, set_nan(Q + A, torch.nan), {}, f"'{Q}{A}' has non-finite values"),
    "infinity": (TWO, set_nan(DOWN + B, -torch.inf), {}, f"'{DOWN}{B}' has non-finite values"),
    "too large": (TWO, {Q + A: zeros(4, 32).double() + 1e300}, {}, f"'{Q}{A}' has non-finite values"),
    "magnitude not enabled": (DORA, {}, {"use_dora": False}, "lora_magnitude_vector.* is unexpected"),
    "no magnitude": (TWO, {}, {"use_dora": True}, "lora_A.weight' has no lora_magnitude_vector"),
    "one magnitude less": (DORA, drop(Q + MAGNITUDE), {}, f"'{Q}{A}' has no lora_magnitude_vector"),
    "long magnitude": (DORA, {Q + MAGNITUDE: zeros(33)}, {}, f"'{Q}{MAGNITUDE}' has shape"),
    "bias not enabled": (BIASED, {}, {"lora_bias": False}, "lora_B.bias' is unexpected"),
    "no lora_B.bias": (TWO, {}, {"lora_bias": True}, r"lora_A.weight' has no lora_B.bias"),
    "magnitude alone": (DORA, {K + MAGNITUDE: zeros(16)}, {}, f"'{K}{MAGNITUDE}' requires lora_A"),
    "lora_B.bias alone": (BIASED, {K + "lora_B.bias": zeros(16)}, {}, f"'{K}lora_B.bias' requires lora_A"),
    "bias without a base bias": (
        TWO,
        {Q + "base_layer.bias": zeros(32)},
        {},
        f"'{Q}base_layer.bias' is a bias .* without a bias",
    ),
    "whole linear": (
        TWO,
        {K + "weight": zeros(16, 32)},
        {},
        "k_proj.weight' replaces a linear layer .* not in modules_to_save",
    ),
    "unknown key": (TWO, {Q + "lora_C.weight": zeros(1)}, {}, f"'{Q}lora_C.weight' targets a module that"),
    "another layer": (TWO, {Q.replace(".1.", ".3.") + A: zeros(4, 32)}, {}, r"layers.3.*that this base model does not"),
    "tokens in embedding": (SAVED, {EMBED + "weight": zeros(99, 32)}, {}, "99 rows at 'model.embed_tokens' and 97"),
    "tokens in head": (SAVED, {HEAD + "weight": zeros(99, 32)}, {}, "97 rows at 'model.embed_tokens' and 99 rows at"),
    "saved head missing": (SAVED, remove(HEAD + "weight"), {}, "module 'lm_head' has no weight in the file"),
    "saved rows missing": (TOKENS, remove(ROWS), {}, "module 'model.embed_tokens' has no trainable_tokens_delta"),
    "wide head": (SAVED, {HEAD + "weight": zeros(97, 33)}, {}, f"'{HEAD}weight' has shape"),
    "wide embedding": (SAVED, {EMBED + "weight": zeros(97, 31)}, {}, f"'{EMBED}weight' has shape"),
    "more token ids": (TOKENS, {}, {"trainable_token_indices": [1, 5, 6]}, rf"'{ROWS}' has shape .* \(3, 32\)"),
    "no token ids": (TOKENS, {}, {"trainable_token_indices": None}, rf"'{ROWS}' has shape .* \(0, 32\)"),
    "gap": (TOKENS, {}, {"trainable_token_indices": [97, 99]}, f"'{ROWS}' does not cover tokens 97 to 99"),
    "gap at once": (TOKENS, {}, {"trainable_token_indices": [1, 98]}, "does not cover tokens 97 to 98"),
    "trained tokens": (TOKENS, {}, {"trainable_token_indices": [97, 98]}, "99 rows at 'model.embed_tokens' and 97"),
    "GPT-2: no lora_A": (FUSED, drop(C_ATTN + A), {}, f"'{C_ATTN}{B}' has no counterpart"),
    "GPT-2: turned": (FUSED, {C_ATTN + A: zeros(4, 96)}, {}, rf"'{C_ATTN}{A}' has shape .* expected \(4, 32\)"),
    "GPT-2: bias": (FUSED, {C_ATTN + "bias": zeros(32)}, {}, rf"'{C_ATTN}bias' has shape .* expected \(96,\)"),
    "GPT-2: positions": (FUSED, {f"{GPT}wpe.weight": zeros(128, 32)}, {}, "wpe.weight' .* does not support adapters"),
    "GPT-2: norm": (FUSED, {f"{GPT}ln_f.bias": zeros(31)}, {}, "ln_f.bias' has shape"),
    "GPT-2: infinity": (FUSED, set_nan(C_ATTN + B, torch.inf), {}, f"'{C_ATTN}{B}' has non-finite values"),
    "bias of o_proj": (
        TWO,
        {f"{LAYER}self_attn.o_proj.bias": zeros(32)},
        {},
        "o_proj.bias' is a bias .* without a bias",
    ),
    "scalar head": (TWO, {HEAD + "weight": torch.tensor(1.0)}, {}, f"'{HEAD}weight' has shape"),
    "head without rows": (TWO, {HEAD + "weight": zeros(0, 32)}, {}, f"'{HEAD}weight' has shape"),
    "token rows of a linear": (TOKENS, {Q + DELTA: zeros(2, 32)}, {}, f"'{Q}{DELTA}'"),
    "token rows of a norm": (TOKENS, {NORM + DELTA: zeros(2, 32)}, {}, f"'{NORM}{DELTA}'"),
    "token ids of another module": token_ids("trainable_token_indices names 'q_proj'", q_proj=[1, 5]),
    "token ids of the head": token_ids("module 'lm_head' has no trainable_tokens_delta", lm_head=[1, 5]),
    "token ids twice": token_ids("trainable_token_indices", embed_tokens=[1, 5], model__embed_tokens=[2, 6]),
    "token ids twice, turned": token_ids("trainable_token_indices", model__embed_tokens=[2, 6], embed_tokens=[1, 5]),
    "a scale that float32 cannot hold": (TWO, {}, {"lora_alpha": 1e300}, "config field lora_alpha"),
    "BD-LoRA: 3 blocks of 32 inputs": blocks(3, 3),
    "BD-LoRA: 4 blocks of rank 2": blocks(4, 2),
    "BD-LoRA: 64 blocks of 32 inputs": blocks(64, 2),
    "whole A of BD-LoRA": (TWO, {}, BLOCKS, r"q_proj.lora_A.weight' has shape \(4, 32\), expected \(4, 16\)"),
}


@pytest.mark.parametrize(("settings", "damage", "changes", "message"), DAMAGED.values(), ids=DAMAGED)
def test_invalid_tensors_are_rejected_on_every_rank(
    settings: Any, damage: Damage, changes: Any, message: str, tmp_path: Path
) -> None:
    base = GPT2 if settings is FUSED else LLAMA
    store(tmp_path, settings, damage, changes, base)
    refusals = set()
    for rank, ranks in ((0, 1), (0, 2), (1, 2)):
        with pytest.raises(AdapterError, match=f"^adapter 'acme/tuned'.*{message}") as refusal:
            use(tmp_path, targets_of(base, rank, ranks))
        refusals.add(str(refusal.value))
    assert len(refusals) == 1


HEADED = {"r": 4, "target_modules": ["q_proj", "lm_head"], "lora_bias": True}


def test_lora_bias_on_resized_head_is_rejected(tmp_path: Path) -> None:
    use(store(tmp_path, HEADED), targets_of(LLAMA))
    for vocab in (VOCAB + 4, VOCAB - 4):
        store(tmp_path, HEADED, {EMBED + "weight": zeros(vocab, 32)}, vocab=vocab)
        for rank in range(2):
            with pytest.raises(AdapterError, match=f"adapter 'acme/tuned': tensor '{HEAD}lora_B.bias' .* vocabulary"):
                use(tmp_path, targets_of(LLAMA, rank, 2))


@pytest.mark.parametrize("rank", [0, 1])
def test_bias_shape_is_checked_on_every_rank(rank: int, tmp_path: Path) -> None:
    base, key = "llama-attention-bias", f"{LAYER}self_attn.o_proj.base_layer.bias"
    settings, targets = {"target_modules": ["o_proj"], "bias": "all"}, targets_of(base, rank, 2)
    target = targets["model.layers.1.self_attn.o_proj"]
    assert target.bias is not None
    assert target.adds_bias is (rank == 0)
    use(store(tmp_path, settings, base=base), targets)
    with pytest.raises(AdapterError, match=f"adapter 'acme/tuned': tensor '{key}' has shape"):
        use(store(tmp_path, settings, {key: zeros(31)}, base=base), targets)


@pytest.mark.parametrize(("base", "other"), [(LLAMA, GPT2), (GPT2, LLAMA), (NEOX, GPT2), ("opt-pre-norm", LLAMA)])
def test_adapter_for_different_architecture_is_rejected(base: str, other: str, tmp_path: Path) -> None:
    store(tmp_path, {}, base=base)
    with pytest.raises(AdapterError, match=r"'acme/tuned': tensor .* that this base model does not have"):
        use(tmp_path, targets_of(other))


@pytest.mark.parametrize("token", [300_000, 10**18])
def test_large_token_id_allocates_little_memory(token: int, tmp_path: Path) -> None:
    store(tmp_path, TOKENS, changes={"trainable_token_indices": [1, token]})
    tracemalloc.start()
    try:
        with pytest.raises(AdapterError, match="does not cover"):
            use(tmp_path, targets_of(LLAMA))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("later", [Path.unlink, lambda path: path.write_bytes(b""), lambda x: write_tensors(x, {})])
def test_file_changed_after_opening_is_rejected(later: Callable[[Path], Any], tmp_path: Path) -> None:
    adapter = open_adapter(store(tmp_path), targets_of(LLAMA), "acme/tuned")
    later(adapter.path)
    with pytest.raises(AdapterError, match="acme/tuned"):
        adapter.load(adapter.modules[0])


def test_file_truncated_during_use_raises_error(tmp_path: Path) -> None:
    """Reading past the end of a mapped file would kill the process."""
    adapter = open_adapter(store(tmp_path, TWO), targets_of(LLAMA), "acme/tuned")
    adapter.load(adapter.modules[0])
    os.truncate(adapter.path, 4096)
    with pytest.raises(AdapterError, match=r"acme/tuned.*(truncated|changed)"):
        adapter.load(adapter.modules[-1])


def test_mismatched_file_stamp_is_rejected(tmp_path: Path) -> None:
    path = store(tmp_path) / WEIGHTS_FILE
    config = parse_config(json.loads((tmp_path / CONFIG_FILE).read_text()), "acme/tuned")
    chosen = read_stamp(path)
    identity = StoredAdapter(tmp_path, config, targets_of(LLAMA), chosen).compute_identity()
    content = path.read_bytes()
    # Same size and time, replaced or written in place.
    (tmp_path / "new").write_bytes(content)
    for change in (lambda: os.replace(tmp_path / "new", path), lambda: path.write_bytes(content)):
        time.sleep(0.02)  # one tick of the file system clock
        change()
        os.utime(path, ns=(chosen[2], chosen[2]))
        with pytest.raises(AdapterError, match=r"acme/tuned.*safetensors changed after it was resolved; try again"):
            StoredAdapter(tmp_path, config, targets_of(LLAMA), chosen)
        chosen = read_stamp(path)
        assert StoredAdapter(tmp_path, config, targets_of(LLAMA), chosen).compute_identity() == identity


def prepare_half(group: ProcessGroup, folder: Path) -> str:
    targets = collect_adapter_targets(make_model(LLAMA, CPU, group))
    try:
        prepare(open_adapter(folder, targets, "acme/tuned"), targets, torch.float16, group)
    except AdapterError as error:
        return str(error)
    return "accepted"


def test_all_ranks_reject_adapter_if_one_rank_rejects_it(tmp_path: Path, ranks: RankPool) -> None:
    """If only one rank failed, the other ranks would block in the next all-reduce."""
    settings = {"r": 4, "target_modules": ["q_proj", "o_proj"], "use_dora": True}
    rows = zeros(32, 4)
    rows[-1] = 1e6  # only on the last rank, and too large for float16
    store(tmp_path, settings, {f"{LAYER}self_attn.q_proj.lora_B.weight": rows})
    replies = ranks.run(2, prepare_half, tmp_path)
    assert "another tensor-parallel rank rejected it" in replies[0]
    assert "q_proj' has values that overflow torch.float16" in replies[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_is_finite_detects_all_non_finite_values(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    for numbers in ([], [-1.0], [0.0, -0.0], [limits.max, limits.min], [limits.tiny, -limits.smallest_normal]):
        assert is_finite(torch.tensor(numbers, dtype=dtype))
    for number in (torch.inf, -torch.inf, torch.nan, -torch.nan):
        tensor = torch.linspace(-3, 3, 60, dtype=dtype).view(12, 5)
        assert is_finite(tensor)
        tensor[7, 2] = number
        assert not is_finite(tensor)
        assert not is_finite(tensor.t())
        assert not is_finite(torch.full((1,), number, dtype=dtype))
