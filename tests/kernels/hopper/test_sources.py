"""Compile the CUDA sources with NVRTC, without a GPU."""

import ctypes
from pathlib import Path

import pytest
import torch

from lorax_server.kernels.hopper import sources
from lorax_server.kernels.hopper.linear_settings import ONE_BLOCK_STAGES, TWO_BLOCK_STAGES, find_quantized_setting
from lorax_server.kernels.hopper.sampling import LOGITS_CUDA_TYPES, SampleVariant
from lorax_server.kernels.hopper.sources import (
    ACTIVATIONS,
    HEIGHTS,
    MAX_SHARED_BYTES,
    AddLoraVariant,
    DequantizeVariant,
    GateVariant,
    LinearVariant,
    NormVariant,
    PackedFormat,
    PlanVariant,
    PromptLoraVariant,
    QuantizedVariant,
    RoundVariant,
    UnpackVariant,
    Variant,
)

pytest.importorskip("cuda.bindings", reason="needs cuda-core")
from lorax_server.kernels.hopper.compiler import Compiler
from lorax_server.kernels.hopper.decode_attention import DecodePlanVariant, DecodeVariant
from lorax_server.kernels.hopper.prefill_attention import HEAD_DIMS, PrefillVariant

BF16, FP16 = torch.bfloat16, torch.float16
ZEROS = PackedFormat("int4", 1, has_float_scales=False, shift="zeros")
LEVELS = PackedFormat("levels4", 2, has_float_scales=True, shift="none")
FLOATS = PackedFormat("float8", 2, has_float_scales=True, shift="none")
OFFSETS = PackedFormat("int8", 4, has_float_scales=True, shift="offsets")
PACKED_FORMATS = [ZEROS, LEVELS, FLOATS, OFFSETS, PackedFormat("int4", 4, has_float_scales=False, shift="none")]
VARIANTS: list[Variant] = [PlanVariant(), LinearVariant(BF16, 8, 11, 2, True), PromptLoraVariant(FP16, "expand_prompt")]
MORE_VARIANTS: list[Variant] = [
    LinearVariant(FP16, 16, 6, 1, True),
    LinearVariant(BF16, 128, 6, 2, False),
    AddLoraVariant(BF16),
    NormVariant(FP16, 2),
    *(GateVariant(BF16, name) for name in ACTIVATIONS),
    PromptLoraVariant(BF16, "sum_parts"),
    *(PromptLoraVariant(BF16, step) for step in ("expand_prompt", "add_prompt")),
    *(PromptLoraVariant(BF16, "gate_prompt", name) for name in ACTIVATIONS),
    *(SampleVariant(dtype, step) for dtype in LOGITS_CUDA_TYPES for step in ("apply_penalties", "sample")),
    PrefillVariant(FP16, 128, False),  # test_prefill_attention.py compiles the bfloat16 variants
    DecodePlanVariant(),
    *(
        DecodeVariant(BF16, is_float8, head_dim, tiles)
        for is_float8 in (False, True)
        for head_dim in HEAD_DIMS
        for tiles in (1, 2)
    ),
    DecodeVariant(FP16, False, 128, 1),
    QuantizedVariant(BF16, ZEROS, 8, False, 2, 5, 8, True),
    QuantizedVariant(FP16, LEVELS, 16, False, 2, 3, 4, True),
    QuantizedVariant(BF16, FLOATS, 32, True, 1, 4, 1, True),
    QuantizedVariant(FP16, ZEROS, 64, True, 1, 4, 4, True),
    QuantizedVariant(BF16, LEVELS, 128, True, 1, 4, 2, False),
    QuantizedVariant(BF16, OFFSETS, 64, False, 1, 3, 4, True),
    *(DequantizeVariant(BF16, packed) for packed in PACKED_FORMATS),
    UnpackVariant(),
    *(RoundVariant(dtype, is_wide) for dtype in (BF16, FP16) for is_wide in (False, True)),
]


@pytest.mark.slow
@pytest.mark.parametrize("variant", [*VARIANTS, *MORE_VARIANTS], ids=str)
def test_variant_compiles(variant: Variant, tmp_path: Path) -> None:
    assert Compiler("sm_90a", tmp_path).compile(variant.source)[:4] == b"\x7fELF"


@pytest.mark.parametrize("height", HEIGHTS)
def test_stages_fit_in_shared_memory(height: int) -> None:
    assert LinearVariant(BF16, height, ONE_BLOCK_STAGES[height], 1, True).shared_bytes <= MAX_SHARED_BYTES
    if height < 128:
        assert LinearVariant(BF16, height, TWO_BLOCK_STAGES[height], 1, True).blocks_per_sm == 2


@pytest.mark.parametrize("packed", PACKED_FORMATS, ids=str)
@pytest.mark.parametrize("height", HEIGHTS)
def test_quantized_settings_are_valid(height: int, packed: PackedFormat) -> None:
    for num_sms in (78, 132):
        for outputs in (8, 128, 136, 384, 4096, 28672, 128256):
            for inputs in (64, 576, 4096, 14336):
                setting = find_quantized_setting(packed, inputs, outputs, height, num_sms)
                variant = QuantizedVariant(BF16, packed, height, *setting[:4], True)
                assert setting.stages >= 3
                if setting.uses_wgmma:  # WGMMA blocks must have at least one step
                    steps = -(-inputs // 128)
                    assert -(-steps // setting.cluster) * (setting.cluster - 1) < steps
                assert variant.shared_bytes <= MAX_SHARED_BYTES
                assert variant.ring_bytes >= height * (variant.columns + 4) * 4  # the sums fit
                assert setting.lora_blocks % setting.cluster == 0
                assert 0 < setting.lora_blocks <= num_sms * variant.blocks_per_sm  # all can run at the same time


def test_struct_layout_mismatch_fails_to_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class GateArgs(ctypes.Structure):
        _fields_ = (("out", ctypes.c_void_p), ("gate_up", ctypes.c_void_p), ("n", ctypes.c_int))

    monkeypatch.setattr(sources, "GateArgs", GateArgs)
    with pytest.raises(Exception, match="Python has another layout of GateArgs"):
        Compiler("sm_90a", tmp_path).compile(GateVariant(BF16, "silu").source)


def test_compiled_kernel_is_cached_on_disk(tmp_path: Path) -> None:
    first, second = Compiler("sm_90a", tmp_path), Compiler("sm_90a", tmp_path)
    cubin = first.compile(PlanVariant().source)
    assert second.compile(PlanVariant().source) == cubin
    assert (first.num_compiled, second.num_compiled) == (1, 0)
    assert Compiler("sm_90", tmp_path).compile(PlanVariant().source) != cubin


def test_damaged_cache_entry_is_recompiled(tmp_path: Path) -> None:
    cubin = Compiler("sm_90a", tmp_path).compile(PlanVariant().source)
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(kept.read_bytes()[:-1])
    again = Compiler("sm_90a", tmp_path)
    assert again.compile(PlanVariant().source) == cubin
    assert again.num_compiled == 1
    (kept,) = tmp_path.iterdir()


def test_unwritable_cache_still_compiles(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    Compiler("sm_90a", tmp_path / "file").compile(PlanVariant().source)
    assert "cannot write to the cache" in caplog.text
