"""Merged adapters compared with PEFT's `add_weighted_adapter`."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.config import KasaConfig

from lorax_server.adapters.merge import MergedAdapter, module_seed
from lorax_server.distributed import FakeGroup
from lorax_server.errors import InputError
from lorax_server.layers.targets import collect_adapter_targets
from lorax_server.types import Merge
from tests.lora import fill_arena, save_adapter
from tests.paged import PagedDriver
from tests.parity.adapters.cases import CASES, Case, randomize
from tests.parity.adapters.served import make_model, open_adapter
from tests.parity.oracle import oracle_logits

LINEARS = ["q_proj", "v_proj", "down_proj"]
MERGES = {
    "linear": Merge((0.7, 0.4, -0.5)),
    "ties": Merge((0.7, 0.4, -0.5), "ties", 0.4),
    "ties-frequency": Merge((0.7, 0.4, 1.5), "ties", 0.6, "frequency"),
    "dare-linear": Merge((0.7, 0.4, -0.5), "dare_linear", 0.5, seed=3),
    "dare-ties": Merge((0.7, 0.4, -0.5), "dare_ties", 0.5, seed=4),
    "dare-ties-frequency": Merge((1.0, 1.0, 1.0), "dare_ties", 0.7, "frequency", seed=5),
    "ties-everything-kept": Merge((0.7, 0.4, -0.5), "ties", 1.0),
    "dare-everything-kept": Merge((0.7, 0.4, -0.5), "dare_linear", 1.0),
}


def write(folder: Path, settings: list[dict[str, Any]], base: str = "llama-gqa") -> list[Path]:
    """Save adapters with PEFT in separate folders, with different seeds."""
    folders = []
    for number, changes in enumerate(settings):
        folders.append(folder / f"adapter{number}")
        case = Case("", base, {"target_modules": LINEARS} | changes, make=partial(_save, seed=number))
        case.write(folders[-1])
    return folders


def _save(model: Any, case: Case, folder: Path, seed: int) -> None:
    peft_model = get_peft_model(model, case.config)
    randomize(peft_model)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 0.3)
    save_adapter(peft_model, folder)


def peft_merged(folders: list[Path], merge: Merge, base: str = "llama-gqa") -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(Case("", base).base_model(), folders[0], "adapter0")
        for folder in folders[1:]:
            model.load_adapter(folder, folder.name)
        kind = "cat" if merge.strategy == "linear" else merge.strategy
        names = [folder.name for folder in folders]
        options = {"density": merge.density, "majority_sign_method": merge.majority_sign_method}
        model.add_weighted_adapter(names, list(merge.weights), "merged", kind, **options)
        if merge.strategy.startswith("dare"):
            _merge_again_with_our_seeds(model, names, merge)
        model.set_adapter("merged")
    return model.eval().get_base_model()


def _merge_again_with_our_seeds(model: Any, names: list[str], merge: Merge) -> None:
    """Merge with one seed per module, as the server does. PEFT uses one random stream for all modules."""
    for module, layer in model.get_base_model().named_modules():
        if isinstance(layer, LoraLayer):
            torch.manual_seed(module_seed(merge.seed, module))
            lora_a, lora_b = model.base_model._generalized_task_arithmetic_weighted_adapter(
                merge.strategy, names, list(merge.weights), layer, merge.density, merge.majority_sign_method
            )
            layer.lora_A["merged"].weight.data, layer.lora_B["merged"].weight.data = lora_a, lora_b


@torch.no_grad()
def our_logits(folders: list[Path], merge: Merge, ids: list[int], device: torch.device, base: str) -> torch.Tensor:
    model = make_model(base, device)
    targets = collect_adapter_targets(model)
    merged = MergedAdapter([open_adapter(folder, targets, folder.name) for folder in folders], merge)
    arena = fill_arena(targets, [merged], device, FakeGroup())
    driver = PagedDriver(model)
    return driver.forward([(driver.add(1, len(ids)), ids)], arena)[0]


@pytest.mark.parametrize("name", MERGES)
def test_merged_adapters_match_peft(name: str, tmp_path: Path, device: torch.device) -> None:
    merge = MERGES[name]
    folders = write(tmp_path, [{}, {"lora_alpha": 3}, {"use_rslora": True, "lora_alpha": 2}])
    expected = oracle_logits(peft_merged(folders, merge).to(device), list(range(3, 20)), 17, {})
    logits = our_logits(folders, merge, list(range(3, 20)), device, "llama-gqa")
    assert (logits - expected).abs().max() < 1e-4
    assert torch.equal(logits, our_logits(folders, merge, list(range(3, 20)), device, "llama-gqa"))


def test_linear_merge_of_mixed_ranks_and_modules_matches_peft(tmp_path: Path, device: torch.device) -> None:
    merge = Merge((0.3, -1.2, 0.8))
    settings: list[dict[str, Any]]
    settings = [{"r": 3}, {"rank_pattern": {"q_proj": 9}}, {"target_modules": ["q_proj", "o_proj", "lm_head"]}]
    folders = write(tmp_path, settings)
    expected = oracle_logits(peft_merged(folders, merge).to(device), list(range(3, 20)), 17, {})
    assert (our_logits(folders, merge, list(range(3, 20)), device, "llama-gqa") - expected).abs().max() < 1e-4


def test_gpt2_merge_matches_peft(tmp_path: Path, device: torch.device) -> None:
    merge = Merge((0.6, 0.6), "ties", 0.5)
    folders = write(tmp_path, [{"target_modules": ["c_attn"]}] * 2, "gpt2")
    expected = oracle_logits(peft_merged(folders, merge, "gpt2").to(device), list(range(3, 20)), 17, {})
    assert (our_logits(folders, merge, list(range(3, 20)), device, "gpt2") - expected).abs().max() < 1e-4


@pytest.mark.parametrize("strategy", ["ties", "dare_linear", "dare_ties"])
def test_factor_merge_of_different_ranks_is_rejected(strategy: str, tmp_path: Path) -> None:
    folders = write(tmp_path, [{"r": 4}, {"r": 8}])
    with pytest.raises(InputError, match=r"adapter0,adapter1.*ranks \[4, 8\].*linear does not"):
        our_logits(folders, Merge((1.0, 1.0), strategy, 0.5), [3, 4], torch.device("cpu"), "llama-gqa")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"use_dora": True}, "lora_magnitude_vector"),
        ({"lora_bias": True}, r"lora_B\.bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [4]}, "trainable_tokens_delta"),
        ({"kasa_config": KasaConfig()}, "lora_diag"),
        ({"modules_to_save": ["o_proj"]}, "modules_to_save"),
        ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens"),
    ],
)
def test_merge_rejects_dora_bias_and_saved_modules(settings: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folders = write(tmp_path, [{}, settings])
    with pytest.raises(InputError, match=f"adapter1.*cannot be merged.*{reason}"):
        our_logits(folders, Merge((1.0, 1.0)), [3, 4], torch.device("cpu"), "llama-gqa")


@pytest.mark.parametrize("name", ["ia3", "vera", "llama-gqa-ln-tuning"])
def test_non_lora_methods_are_not_merged(name: str, tmp_path: Path) -> None:
    folders = [*write(tmp_path, [{}]), tmp_path / name]
    CASES[name].write(folders[1])
    kind = CASES[name].config.peft_type.value
    with pytest.raises(InputError, match=f"{name}.*cannot be merged.*peft_type = {kind}"):
        our_logits(folders, Merge((1.0, 1.0)), [3, 4], torch.device("cpu"), "llama-gqa")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"weights": ()}, "not empty"),
        ({"weights": (1.0, float("nan"))}, "finite"),
        ({"weights": (1.0,), "strategy": "svd"}, "merge_strategy"),
        ({"weights": (1.0,), "strategy": "ties", "density": 0.0}, "density"),
        ({"weights": (1.0,), "strategy": "dare_ties", "density": 1.5}, "density"),
        ({"weights": (1.0,), "strategy": "ties", "density": float("nan")}, "density"),
        ({"weights": (1.0,), "strategy": "ties", "density": 0.5, "majority_sign_method": "loudest"}, "majority_sign"),
    ],
)
def test_invalid_merge_parameters_are_rejected(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        Merge(**arguments)


def test_merge_identity_depends_on_all_parameters() -> None:
    merge = Merge((0.5, 0.5), "dare_ties", 0.5, seed=1)
    same = Merge((0.5, 0.5), "dare_ties", 0.5, seed=1)
    others = [
        Merge((0.5, 0.4), "dare_ties", 0.5, seed=1),
        Merge((0.5, 0.5), "ties", 0.5, seed=1),
        Merge((0.5, 0.5), "dare_ties", 0.4, seed=1),
        Merge((0.5, 0.5), "dare_ties", 0.5, "frequency", seed=1),
        Merge((0.5, 0.5), "dare_ties", 0.5, seed=2),
    ]
    assert merge.identity(["a", "b"]) == same.identity(["a", "b"])
    assert len({merge.identity(["a", "b"]), merge.identity(["b", "a"]), *(m.identity(["a", "b"]) for m in others)}) == 7
