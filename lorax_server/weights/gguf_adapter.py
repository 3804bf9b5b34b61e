"""Convert GGUF LoRA adapters, as llama.cpp's `convert_lora_to_gguf.py` writes them, to PEFT's format."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from lorax_server.errors import AdapterError, ConfigError
from lorax_server.files.names import CONFIG_FILE, WEIGHTS_FILE
from lorax_server.gguf.architectures import (
    ARCHITECTURES,
    MISTRAL_ARCHITECTURE,
    GGUFArchitecture,
    TensorSource,
    map_tensor,
)
from lorax_server.gguf.container import GGUFFile, TensorEntry, read_gguf
from lorax_server.weights.gguf import FLOAT_DTYPES, GGUFTensor

FACTOR_SUFFIXES = (".lora_a", ".lora_b")
EMBEDDING_TENSOR = "token_embd.weight"
INVOCATION_KEY = "adapter.alora.invocation_tokens"  # activated LoRA, which applies to a part of the prompt


def convert_adapter(path: Path, base: Any, folder: Path) -> None:
    """Convert the adapter in a GGUF file to a PEFT adapter. `base` is its base model's config."""
    file = read_gguf(path)
    arch, head_dim = _check(file, base.model_type), getattr(base, "head_dim", None)
    config = {
        "head_dim": head_dim or base.hidden_size // base.num_attention_heads,
        **{f"num_{each}": getattr(base, f"num_{each}") for each in ("hidden_layers", "attention_heads")},
        "num_key_value_heads": getattr(base, "num_key_value_heads", None) or base.num_attention_heads,
    }
    tensors: dict[str, torch.Tensor] = {}
    ranks: dict[str, int] = {}
    for name, (entry_a, entry_b) in _pair_factors(file).items():
        lora_a = _read(TensorSource(entry_a, entry_a.shape))
        for target, source in map_tensor(file, arch, config, name, entry_b):
            module, lora_b = target.removesuffix(".weight"), _read(source)
            factors = {"lora_A.weight": lora_a, "lora_B.weight": lora_b}
            if name == EMBEDDING_TENSOR:
                factors = {"lora_embedding_A": lora_a.t().contiguous(), "lora_embedding_B": lora_b}
            tensors |= {f"base_model.model.{module}.{key}": value.clone() for key, value in factors.items()}
            ranks[module] = lora_b.shape[1]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG_FILE).write_text(json.dumps(_make_config(file, ranks), indent=2))
        save_file(tensors, folder / WEIGHTS_FILE)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from error


def _check(file: GGUFFile, model_type: str) -> GGUFArchitecture:
    """Return the architecture of the adapter's base model. Reject files that cannot be converted."""
    kind = file.get("general.type", str), file.get("adapter.type", str)
    if kind != ("adapter", "lora"):
        raise AdapterError(f"{file.path}: not a LoRA adapter (general.type = {kind[0]!r}, adapter.type = {kind[1]!r})")
    name = file.require("general.architecture", str)
    arch = MISTRAL_ARCHITECTURE if (name, model_type) == ("llama", "mistral") else ARCHITECTURES.get(name)
    if arch is None or arch.model_type != model_type:
        raise AdapterError(
            f"{file.path}: the adapter is for {name[:40]!r} models, but the base model is {model_type!r}"
        )
    if model_type == "gpt2":  # llama.cpp's converter transposes the factors
        raise AdapterError(f"{file.path}: GGUF adapters for GPT-2 are not supported")
    if INVOCATION_KEY in file.metadata:
        raise AdapterError(f"{file.path}: activated LoRA ({INVOCATION_KEY}) is not supported")
    return arch


def _pair_factors(file: GGUFFile) -> dict[str, tuple[TensorEntry, TensorEntry]]:
    """Return a map from base model tensor name to LoRA A and B."""
    names = {name.removesuffix(suffix) for name in file.tensors for suffix in FACTOR_SUFFIXES if name.endswith(suffix)}
    other_tensors = set(file.tensors) - {f"{name}{suffix}" for name in names for suffix in FACTOR_SUFFIXES}
    if other_tensors:
        raise AdapterError(f"{file.path}: tensor {min(other_tensors)!r} is not a LoRA factor, which is not supported")
    pairs = {}
    for name in sorted(names):
        factors = [file.tensors.get(f"{name}{suffix}") for suffix in FACTOR_SUFFIXES]
        a, b = factors
        if a is None or b is None or len(a.shape) != 2 or len(b.shape) != 2:
            raise AdapterError(f"{file.path}: tensor {name!r} does not have two LoRA factors")
        rank = a.shape[1] if name == EMBEDDING_TENSOR else a.shape[0]
        if rank != b.shape[1]:
            raise AdapterError(f"{file.path}: tensor {name!r} has LoRA factors of ranks {rank} and {b.shape[1]}")
        pairs[name] = a, b
    if not pairs:
        raise AdapterError(f"{file.path}: the adapter has no tensors")
    return pairs


def _read(source: TensorSource) -> torch.Tensor:
    tensor = GGUFTensor(source)
    return tensor[()].to(FLOAT_DTYPES.get(tensor.format, torch.float32))


def _make_config(file: GGUFFile, ranks: Mapping[str, int]) -> dict[str, Any]:
    """Return PEFT's config. As in llama.cpp, the scale is alpha / rank, or 1 if alpha is 0."""
    alpha = file.require("adapter.lora.alpha", float)
    rank = Counter(ranks.values()).most_common(1)[0][0]
    rank_pattern = {module: each for module, each in ranks.items() if each != rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha or rank,
        "rank_pattern": rank_pattern,
        "alpha_pattern": {} if alpha else rank_pattern,
        "target_modules": sorted(ranks),
        "base_model_name_or_path": None,
    }
