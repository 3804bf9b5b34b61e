"""Peak memory while a mixture of experts is loaded."""

import gc
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from lorax_server.config import ModelConfig
from lorax_server.kernels import ExpertMatrices, Ops, reference
from lorax_server.kernels.ops import ExpertWeights
from lorax_server.models.registry import get_model
from lorax_server.weights import progress
from tests.builders import CPU, ops_of

NUM_EXPERTS = 32
CONFIG = Qwen3MoeConfig(  # type: ignore[call-arg]
    vocab_size=97,
    hidden_size=256,
    intermediate_size=256,
    moe_intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    num_experts=NUM_EXPERTS,
    num_experts_per_tok=4,
    max_position_embeddings=128,
    architectures=["Qwen3MoeForCausalLM"],
)
EXPERT_ELEMENTS = 3 * CONFIG.hidden_size * CONFIG.moe_intermediate_size
# Enough for temporary copies of one expert's matrices, but not for a layer's experts, even in 8 bits.
MAX_TEMPORARY_BYTES = 2**21


def write_model(folder: Path, *, is_fused: bool) -> None:
    torch.manual_seed(0)
    tensors = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16).state_dict()
    CONFIG.save_pretrained(folder)
    save_file(dict(tensors) if is_fused else split_experts(tensors), folder / "model.safetensors")


def split_experts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    split: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            split[name] = tensor
            continue
        prefix, _, matrix = name.rpartition(".")
        parts = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else ("down_proj",)
        for expert, both in enumerate(tensor):
            for part, value in zip(parts, both.chunk(len(parts)), strict=True):
                split[f"{prefix}.{expert}.{part}.weight"] = value.clone()
    return split


def measure_bytes(folder: Path, load: Callable[[], object]) -> tuple[int, int]:
    """Return the bytes that torch has allocated in `load`: at the peak, and afterwards. Exclude mapped files."""
    mapped_bytes = {path.stat().st_size for path in folder.iterdir()}
    gc.collect()  # tensors that are freed later would count as negative
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        loaded = load()
    assert loaded is not None
    peak = live = 0
    assert profiled.profiler is not None
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]" and abs(event.nbytes()) not in mapped_bytes:
            live += event.nbytes()
            peak = max(peak, live)
    return peak, live


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("ops", [reference, ops_of(CPU)], ids=["reference", "fastest"])
def test_experts_are_not_in_memory_twice(
    ops: Ops, is_fused: bool, dtype: str, quantize: str | None, tmp_path: Path
) -> None:
    write_model(tmp_path, is_fused=is_fused)
    peak, final = measure_bytes(
        tmp_path, lambda: get_model(ModelConfig(tmp_path, dtype=dtype, quantize=quantize), ops=ops)
    )
    assert peak - final < MAX_TEMPORARY_BYTES < NUM_EXPERTS * EXPERT_ELEMENTS


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_second_copy_is_detected(quantize: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_experts = reference.make_experts

    def collect_first(count: int, matrices: Iterable[ExpertMatrices], *args: Any) -> ExpertWeights:
        return make_experts(count, list(matrices), *args)

    monkeypatch.setattr(reference, "make_experts", collect_first)
    write_model(tmp_path, is_fused=False)
    settings = ModelConfig(tmp_path, dtype="bfloat16", quantize=quantize)
    peak, final = measure_bytes(tmp_path, lambda: get_model(settings, ops=ops_of(CPU)))
    assert peak - final > MAX_TEMPORARY_BYTES


def test_freed_memory_is_returned_while_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    monkeypatch.setattr(progress, "trim_malloc", lambda: calls.append(None))
    monkeypatch.setattr(progress, "TRIM_INTERVAL_BYTES", NUM_EXPERTS * EXPERT_ELEMENTS * 4 // 2)
    write_model(tmp_path, is_fused=False)
    get_model(ModelConfig(tmp_path, dtype="float32"))
    assert len(calls) == 2 * CONFIG.num_hidden_layers
