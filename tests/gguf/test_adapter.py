"""GGUF adapters are converted to PEFT's format, with the same effect as the adapter in PEFT."""

import json
import warnings
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_tensors

from lorax_server.cli import main
from lorax_server.config import ModelConfig
from lorax_server.errors import AdapterError, LoraxError
from lorax_server.gguf.model_folder import find_model_folder
from lorax_server.models.registry import load_config
from lorax_server.weights.gguf_adapter import convert_adapter
from tests.gguf import writer
from tests.gguf.test_architectures import PROMPT, make_oracle, serve
from tests.gguf.test_serving import ATTENTION, LINEARS
from tests.lora import save_adapter
from tests.parity.adapters.cases import randomize
from tests.parity.adapters.served import load_adapters
from tests.parity.oracle import oracle_logits

CPU = torch.device("cpu")


def train(folder: Path, case: str, **settings: Any) -> Any:
    """Save a PEFT adapter, and return its base model with the adapter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns about tied embeddings
        fields: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": LINEARS, "task_type": "CAUSAL_LM"}
        model = get_peft_model(make_oracle(case), LoraConfig(**(fields | settings)))
        randomize(model)
        save_adapter(model, folder)
        return PeftModel.from_pretrained(make_oracle(case), folder).eval().get_base_model()


def write_adapter(path: Path, folder: Path, config: Any, *, alpha: float = 6.0, kind: Type = Type.F32) -> None:
    """Write a PEFT adapter as llama.cpp's `convert_lora_to_gguf.py` does."""
    new = start(path, writer.ARCHITECTURES.get(config.model_type, config.model_type), alpha)
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, lora_a in tensors.items():
        if "lora_A" not in name and "embedding_A" not in name:
            continue
        is_embedding = "embedding_A" in name
        lora_b = tensors[name.replace("lora_A", "lora_B").replace("embedding_A", "embedding_B")]
        module = name.removeprefix("base_model.model.").partition(".lora_")[0]
        (target,) = writer.to_gguf_names(config, {f"{module}.weight": None})
        factors = lora_a.T if is_embedding else lora_a, writer.convert(config, f"{module}.weight", lora_b)
        for factor, suffix in zip(factors, ("lora_a", "lora_b"), strict=True):
            # The package quantizes rows that are multiples of 32.
            own = kind if factor.shape[1] % 32 == 0 else Type.F32
            data = gguf.quants.quantize(np.ascontiguousarray(factor), own)
            new.add_tensor(f"{target}.{suffix}", data, raw_dtype=own)
    writer.save(new)


def start(path: Path, architecture: str, alpha: float = 6.0) -> gguf.GGUFWriter:
    new = gguf.GGUFWriter(path, architecture)
    new.add_type(gguf.GGUFType.ADAPTER)
    new.add_string(gguf.Keys.Adapter.TYPE, "lora")
    new.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    return new


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-head-dim": ("llama-head-dim", {"rank_pattern": {"layers.1.self_attn.q_proj": 2, "down_proj": 8}}),
    "llama-embedding": ("llama", {"target_modules": ["embed_tokens", "lm_head", *ATTENTION]}),
    "granite": ("granite", {}),
    "phi3": ("phi3", {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}),
    "qwen3": ("qwen3", {}),
    "starcoder2": ("starcoder2", {"target_modules": [*ATTENTION, "c_fc", "c_proj"]}),
}


@pytest.mark.parametrize("name", CASES)
def test_converted_adapter_matches_peft(name: str, tmp_path: Path) -> None:
    case, settings = CASES[name]
    adapted = train(tmp_path / "peft", case, **settings)
    write_adapter(tmp_path / "adapter.gguf", tmp_path / "peft", adapted.config)
    writer.write_model(tmp_path / "model.gguf", make_oracle(case))
    arguments = [str(tmp_path / "adapter.gguf"), str(tmp_path / "new"), "--model-id", str(tmp_path / "model.gguf")]
    assert main(["convert-adapter", *arguments]) == 0
    driver = serve(tmp_path / "model.gguf")
    arena = load_adapters(driver.model, [tmp_path / "new"], CPU)
    logits = driver.forward([(driver.add(1, len(PROMPT)), PROMPT)], arena)[0]
    expected = oracle_logits(adapted, PROMPT, len(PROMPT), {})
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()


def test_fused_attention_adapter_is_split(tmp_path: Path) -> None:
    config = make_oracle("llama").config
    base = save_base(tmp_path, "llama")
    new = start(tmp_path / "a.gguf", "llama")
    rows = 16 * (4 + 2 + 2)
    lora_b = np.random.default_rng(0).normal(size=(rows, 3)).astype(np.float32)
    new.add_tensor("blk.2.attn_qkv.weight.lora_a", np.ones((3, 64), np.float32))
    new.add_tensor("blk.2.attn_qkv.weight.lora_b", lora_b)
    writer.save(new)
    convert_adapter(tmp_path / "a.gguf", base, tmp_path / "new")
    tensors = load_tensors(tmp_path / "new" / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.2.self_attn"
    parts = [tensors[f"{prefix}.{part}_proj.lora_B.weight"].numpy() for part in "qkv"]
    stored = np.split(lora_b, [64, 96])
    assert np.array_equal(writer.convert(config, "q_proj.weight", parts[0]), stored[0])
    assert np.array_equal(writer.convert(config, "k_proj.weight", parts[1]), stored[1])
    assert np.array_equal(parts[2], stored[2])


def save_base(folder: Path, case: str) -> Any:
    writer.write_model(folder / "model.gguf", make_oracle(case))
    return load_config(ModelConfig(find_model_folder(folder / "model.gguf")))


def test_alpha_zero_means_scale_one(tmp_path: Path) -> None:
    adapted = train(tmp_path / "peft", "llama", rank_pattern={"down_proj": 8})
    write_adapter(tmp_path / "a.gguf", tmp_path / "peft", adapted.config, alpha=0.0)
    convert_adapter(tmp_path / "a.gguf", adapted.config, tmp_path / "new")
    config = json.loads((tmp_path / "new" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 4)
    assert config["rank_pattern"] == config["alpha_pattern"]
    assert set(config["rank_pattern"].values()) == {8}


@pytest.mark.parametrize("kind", [Type.F16, Type.BF16, Type.Q8_0])
def test_factors_keep_half_precision(kind: Type, tmp_path: Path) -> None:
    adapted = train(tmp_path / "peft", "llama")
    write_adapter(tmp_path / "a.gguf", tmp_path / "peft", adapted.config, kind=kind)
    convert_adapter(tmp_path / "a.gguf", adapted.config, tmp_path / "new")
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    new, old = (load_tensors(tmp_path / each / "adapter_model.safetensors")[key] for each in ("new", "peft"))
    assert new.dtype == {Type.F16: torch.float16, Type.BF16: torch.bfloat16, Type.Q8_0: torch.float32}[kind]
    assert (new.float() - old).abs().max() < 0.01 * old.abs().max()


def test_invalid_adapters_are_rejected(tmp_path: Path) -> None:
    base, path = save_base(tmp_path, "llama"), tmp_path / "a.gguf"
    factor = np.ones((4, 64), np.float32)
    name = "blk.0.attn_q.weight"
    cases: list[tuple[str, str, dict[str, Any], str]] = [
        ("qwen2", "lora", {}, "the adapter is for 'qwen2' models, but the base model is 'llama'"),
        ("llama", "control", {}, "not a LoRA adapter"),
        ("llama", "lora", {}, "the adapter has no tensors"),
        ("llama", "lora", {f"{name}.lora_a": factor}, f"tensor '{name}' does not have two LoRA factors"),
        (
            "llama",
            "lora",
            {f"{name}.lora_a": factor, f"{name}.lora_b": factor.T.copy()[:, :3].copy()},
            "LoRA factors of ranks 4 and 3",
        ),
        ("llama", "lora", {"blk.0.attn_norm.weight": factor[0]}, "'blk.0.attn_norm.weight' is not a LoRA factor"),
        (
            "llama",
            "lora",
            {"blk.0.ffn_x.weight.lora_a": factor, "blk.0.ffn_x.weight.lora_b": factor.T.copy()},
            "tensor 'blk.0.ffn_x.weight' is not supported",
        ),
    ]
    for architecture, kind, tensors, message in cases:
        new = gguf.GGUFWriter(path, architecture)
        new.add_type(gguf.GGUFType.ADAPTER)
        new.add_string(gguf.Keys.Adapter.TYPE, kind)
        new.add_float32(gguf.Keys.Adapter.LORA_ALPHA, 1.0)
        for each, values in tensors.items():
            new.add_tensor(each, values)
        writer.save(new)
        with pytest.raises(LoraxError, match=message):
            convert_adapter(path, base, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_activated_lora_is_rejected(tmp_path: Path) -> None:
    base = save_base(tmp_path, "llama")
    new = start(tmp_path / "a.gguf", "llama")
    new.add_array(gguf.Keys.Adapter.ALORA_INVOCATION_TOKENS, [1, 2])
    new.add_tensor("blk.0.attn_q.weight.lora_a", np.ones((4, 64), np.float32))
    new.add_tensor("blk.0.attn_q.weight.lora_b", np.ones((64, 4), np.float32))
    writer.save(new)
    with pytest.raises(AdapterError, match="activated LoRA"):
        convert_adapter(tmp_path / "a.gguf", base, tmp_path / "new")
