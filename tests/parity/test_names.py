"""Checkpoints without the tensor name prefix or with tied weights stored as head, and legacy configs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lorax_server.config import ModelConfig
from lorax_server.models import get_model
from lorax_server.models.registry import build_model
from tests.paged import PagedDriver
from tests.parity.other_variants import LATENT_YARN, OTHER_VARIANTS
from tests.parity.variant import LONG
from tests.parity.variants import VARIANTS, checkpoint, make_oracle, make_weights

CPU = torch.device("cpu")
IDS = [5, 9, 33, 60, 7, 7, 81, 12]


# New fields are None, and legacy fields are set.
LONGROPE = {"type": "longrope", "short_factor": LONG["short_factor"], "long_factor": LONG["long_factor"]}
OLD_CONFIGS: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": None, "n_embed": 32, "n_head": None, "num_attention_heads": 4},
    "phi3-longrope-within": {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": LONGROPE},
    "llama-rope-linear": {
        "rope_parameters": None,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "linear", "factor": 4.0},
    },
    "phi": {"rope_parameters": None, "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "glm4": {"rope_parameters": None, "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "gptj": {},
    "mixtral": {"rope_parameters": None, "rope_theta": 1000000.0},
    "qwen3moe": {"rope_parameters": None, "rope_theta": 10000.0},
    "deepseek2-yarn": {
        "rope_parameters": None,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "yarn", "mscale": 0.8, "mscale_all_dim": 1.0, **LATENT_YARN},
    },
    "deepseek3": {"rope_parameters": None, "rope_theta": 10000.0},
    "glm4moe": {"rope_parameters": None, "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}


def run(name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return compute_logits(build_model(VARIANTS[name].config(), make_weights(tensors, CPU)))


def compute_logits(model: Any) -> torch.Tensor:
    driver = PagedDriver(model)
    return driver.forward([(driver.add(), IDS)])[0]


@pytest.mark.parametrize("name", [name for name in OTHER_VARIANTS if "-" not in name])
def test_checkpoints_with_alternative_tensor_names_match(name: str) -> None:
    tensors = checkpoint(name, make_oracle(name))
    expected = run(name, tensors)
    short = {key.removeprefix("model.").removeprefix("transformer."): tensor for key, tensor in tensors.items()}
    assert short.keys() != tensors.keys()
    assert torch.equal(run(name, short), expected)
    if "lm_head.weight" in tensors:
        return
    (embedding,) = (
        key for key in tensors if key.endswith(("embed_tokens.weight", "wte.weight", "word_embeddings.weight"))
    )
    renamed = {"lm_head.weight" if key == embedding else key: tensor for key, tensor in tensors.items()}
    assert torch.equal(run(name, renamed), expected)


@pytest.mark.parametrize("name", OLD_CONFIGS)
def test_configs_from_older_transformers_match_current_configs(name: str, tmp_path: Path) -> None:
    tensors = checkpoint(name, make_oracle(name))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = VARIANTS[name].config().to_dict() | OLD_CONFIGS[name]
    config = {field: value for field, value in config.items() if value is not None}
    config.pop("transformers_version")
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    assert torch.equal(compute_logits(get_model(ModelConfig(tmp_path, dtype="float32"))), run(name, tensors))
