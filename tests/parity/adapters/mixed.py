"""Adapters with different methods and ranks for one base model, for mixed batches."""

from dataclasses import replace
from pathlib import Path

from tests.parity.adapters.cases import ATTENTION, EMBEDDING, LAYER_1_V, Case
from tests.parity.variant import VOCAB

NORM = {"gpt2": "ln_1", "neox": "input_layernorm", "opt": "self_attn_layer_norm"}


# Base model weight scale. Small, because rounding errors grow per layer and batches are compared to five digits.
SPREAD = 0.12


def mixed_cases(base: str) -> list[Case]:
    return [
        replace(case, spread=SPREAD, settings=case.settings | {"lora_alpha": case.settings.get("r", 8) * 0.4})
        for case in _cases(base)
    ]


def _cases(base: str) -> list[Case]:
    family = base.split("-", maxsplit=1)[0]
    attention, embedding = ATTENTION[family], EMBEDDING.get(family, "embed_tokens")
    norm, both = NORM.get(family, "input_layernorm"), {"target_modules": [embedding, "lm_head"]}
    return [
        Case("LoRA", base),
        Case("rsLoRA", base, {"use_rslora": True}),
        Case("rank_pattern", base, {"rank_pattern": {attention[0]: 3}}),
        Case("alpha_pattern", base, {"alpha_pattern": {attention[-1]: 1}}),
        Case("layers_to_transform", base, {"layers_to_transform": [0, 2]}),
        Case("all-linear", base, {"target_modules": "all-linear", "r": 16}),
        Case("one module", base, {"target_modules": LAYER_1_V, "r": 4}),
        Case("head", base, {"target_modules": [attention[0], "lm_head"]}),
        Case("embedding", base, {"target_modules": [attention[0], embedding], "r": 5}),
        Case("embedding and head", base, both),
        Case("saved head", base, {"modules_to_save": ["lm_head"]}),
        Case("saved embedding", base, {"modules_to_save": [embedding]}),
        Case("saved norms", base, {"modules_to_save": [norm], "r": 2}),
        Case("tokens", base, {"trainable_token_indices": [5, 90, 17]}),
        Case("added tokens", base, vocab=VOCAB + 5),
        Case("added tokens, DoRA", base, both | {"use_dora": True}, vocab=VOCAB + 2),
        Case("fewer tokens", base, vocab=VOCAB - 6),
        Case("DoRA", base, {"target_modules": "all-linear", "use_dora": True}),
        Case("bias", base, {"bias": "all"}),
        Case("LoRA bias", base, {"lora_bias": True}),
        Case("rank 1", base, {"r": 1}),
        Case("rank 33", base, {"r": 33}),
    ]


def write_mixed(base: str, folder: Path) -> list[tuple[Case, Path]]:
    cases = mixed_cases(base)
    folders = [folder / f"{number:02}-{case.kind.replace(' ', '-')}" for number, case in enumerate(cases)]
    for case, place in zip(cases, folders, strict=True):
        case.write(place)
    return list(zip(cases, folders, strict=True))
