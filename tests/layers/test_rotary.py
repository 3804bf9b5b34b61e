import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GPTNeoXConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from lorax_server.errors import ConfigError
from lorax_server.kernels import CosSin
from lorax_server.layers.rotary import RotaryEmbedding, load_rotary, rope_parameters

CPU = torch.device("cpu")
HEAD_DIM, MAX_POSITIONS = 16, 64
EIGHT_POSITIONS = [1.0, 1.1, 1.3, 1.7, 2.0, 2.5, 3.0, 4.0]


@dataclass
class PositionContext:
    """Token positions and sequence lengths."""

    position_ids: torch.Tensor
    lengths: torch.Tensor

    @property
    def max_position(self) -> int:
        return int(self.position_ids.max()) + 1

    def rope_lengths(self) -> torch.Tensor:
        return self.lengths


def at(positions: Sequence[int], length: int | Sequence[int] = MAX_POSITIONS) -> PositionContext:
    lengths = [length] * len(positions) if isinstance(length, int) else list(length)
    return PositionContext(torch.tensor(positions), torch.tensor(lengths))


def llama_config(parameters: dict[str, Any], **fields: Any) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=HEAD_DIM * 2,
        num_attention_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_theta": 10000.0, **parameters},
        **fields,
    )


def check_angles(found: CosSin, positions: Sequence[int], inv_freq: torch.Tensor, factor: float) -> None:
    angles = torch.tensor(positions).float()[:, None] * inv_freq
    torch.testing.assert_close(found[0], angles.cos() * factor, rtol=0, atol=1e-4)
    torch.testing.assert_close(found[1], angles.sin() * factor, rtol=0, atol=1e-4)


# --- Rotary table


def test_growing_table_keeps_existing_rows() -> None:
    rotary = load_rotary(llama_config({"rope_type": "default"}), HEAD_DIM, CPU)
    short = list(range(MAX_POSITIONS))
    before = [part.clone() for part in rotary(at(short))]
    for longer in (MAX_POSITIONS, 3 * MAX_POSITIONS, 10 * MAX_POSITIONS):
        cos, sin = rotary(at([0, longer]))
        inv_freq = 10000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        check_angles((cos, sin), [0, longer], inv_freq, 1.0)
    for old, new in zip(before, rotary(at(short)), strict=True):
        assert torch.equal(old, new)


def test_int32_positions_are_supported() -> None:
    rotary = RotaryEmbedding(torch.tensor([1.0, 0.1]), 8, CPU)
    cos, _ = rotary(PositionContext(torch.tensor([3, 0], dtype=torch.int32), torch.tensor([4, 4])))
    assert cos[:, 0].tolist() == pytest.approx([math.cos(3), 1.0])


# --- Comparison with transformers

SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "llama3 that blends": {
        "rope_type": "llama3",
        "rope_theta": 100.0,
        "factor": 4.0,
        "low_freq_factor": 0.5,
        "high_freq_factor": 8.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn, a wide ramp": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 4.0,
        "beta_slow": 0.25,
    },
    "yarn, not truncated": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 32,
        "truncate": False,
    },
    "yarn with an attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "attention_factor": 0.75,
    },
    "yarn with mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
    },
    "yarn, its factor from the lengths": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16},
    "yarn that shrinks": {"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 16},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "dynamic, of another base": {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 500.0},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "short_factor": EIGHT_POSITIONS,
        "long_factor": EIGHT_POSITIONS[::-1],
        "original_max_position_embeddings": 16,
    },
    "longrope, its factor from the lengths": {
        "rope_type": "longrope",
        "short_factor": EIGHT_POSITIONS,
        "long_factor": EIGHT_POSITIONS[::-1],
        "original_max_position_embeddings": 16,
    },
    "longrope with an attention factor": {
        "rope_type": "longrope",
        "factor": 4.0,
        "attention_factor": 0.5,
        "short_factor": EIGHT_POSITIONS,
        "long_factor": EIGHT_POSITIONS[::-1],
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("length", [8, 16, 17, 64, 65, 200])
def test_rope_scaling_matches_transformers(scaling: str, length: int) -> None:
    config: Any = llama_config(SCALINGS[scaling])
    inv_freq, factor = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, CPU, seq_len=length)
    positions = [0, 1, length // 2, length - 1]
    check_angles(load_rotary(config, HEAD_DIM, CPU)(at(positions, length)), positions, inv_freq, factor)


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_default_rope_matches_transformers(theta: float) -> None:
    config = llama_config({"rope_type": "default", "rope_theta": theta})
    theirs = LlamaRotaryEmbedding(config)
    positions = [0, 1, 31, 63]
    check_angles(load_rotary(config, HEAD_DIM, CPU)(at(positions)), positions, theirs.inv_freq, 1.0)


@pytest.mark.parametrize("scaling", [{}, {"rope_type": "linear", "factor": 2.0}])
@pytest.mark.parametrize("rotary_pct", [0.25, 0.5, 1.0])
def test_partial_rope_matches_transformers(scaling: dict[str, Any], rotary_pct: float) -> None:
    parameters = {"rope_theta": 5000.0, "partial_rotary_factor": rotary_pct, "rope_type": "default", **scaling}
    config = GPTNeoXConfig(
        hidden_size=64, num_attention_heads=2, max_position_embeddings=MAX_POSITIONS, rope_parameters=parameters
    )
    positions = [0, 1, 31, 63]
    theirs = GPTNeoXRotaryEmbedding(config).inv_freq
    assert len(theirs) == int(32 * rotary_pct) // 2
    check_angles(load_rotary(config, 32, CPU, partial=True)(at(positions)), positions, theirs, 1.0)


# --- Independence of other sequences


@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_rope_angles_do_not_depend_on_other_sequences(scaling: str) -> None:
    rotary = load_rotary(llama_config(SCALINGS[scaling]), HEAD_DIM, CPU)
    lengths = {10: [3, 9], 17: [3, 16], 64: [3, 63], 65: [3, 64], 300: [3, 299]}
    alone = {length: rotary(at(positions, length)) for length, positions in lengths.items()}
    positions = [position for of_one in lengths.values() for position in of_one]
    cos, sin = rotary(at(positions, [length for length in lengths for _ in range(2)]))
    for row, length in enumerate(lengths):
        own = slice(2 * row, 2 * row + 2)
        torch.testing.assert_close((cos[own], sin[own]), alone[length], rtol=0, atol=0)
    # The first and last must differ, otherwise the test is meaningless.
    assert not torch.allclose(cos[0], cos[8], atol=1e-3)


# --- Config formats


def spelled(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(max_position_embeddings=MAX_POSITIONS, **fields)


SPELLINGS: dict[str, tuple[SimpleNamespace, SimpleNamespace]] = {
    "GPT-NeoX": (
        spelled(rotary_pct=0.25, rotary_emb_base=5000.0),
        spelled(rope_parameters={"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.25}),
    ),
    "base": (
        spelled(rope_theta=500.0, rope_scaling=None),
        spelled(rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
    ),
    "base that is not given": (spelled(), spelled(rope_parameters={"rope_type": "default", "rope_theta": 10000.0})),
    "null": (
        spelled(rope_parameters={"rope_type": None, "rope_theta": None, "factor": None, "partial_rotary_factor": None}),
        spelled(rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
    ),
    "null beside": (
        spelled(rope_parameters=None, rope_theta=None, partial_rotary_factor=None, rotary_pct=None),
        spelled(rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
    ),
    "partial": (
        spelled(rope_theta=500.0, partial_rotary_factor=0.5),
        spelled(rope_parameters={"rope_theta": 500.0, "partial_rotary_factor": 0.5}),
    ),
    "scaling by `type`": (
        spelled(rope_theta=500.0, rope_scaling={"type": "linear", "factor": 3.0}),
        spelled(rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}),
    ),
    "scaling by `rope_type`": (
        spelled(rope_theta=500.0, rope_scaling={"rope_type": "dynamic", "factor": 3.0}),
        spelled(rope_parameters={"rope_type": "dynamic", "rope_theta": 500.0, "factor": 3.0}),
    ),
    "original length beside": (
        spelled(
            rope_scaling={"type": "longrope", "short_factor": EIGHT_POSITIONS, "long_factor": EIGHT_POSITIONS[::-1]},
            original_max_position_embeddings=16,
        ),
        spelled(
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": EIGHT_POSITIONS,
                "long_factor": EIGHT_POSITIONS[::-1],
                "original_max_position_embeddings": 16,
            }
        ),
    ),
}


@pytest.mark.parametrize(("old", "new"), SPELLINGS.values(), ids=SPELLINGS.keys())
def test_legacy_fields_and_null_are_equivalent(old: SimpleNamespace, new: SimpleNamespace) -> None:
    positions = at([0, 1, 30, 63, 99], 100)
    ours, theirs = (load_rotary(config, HEAD_DIM, CPU, partial=True)(positions) for config in (old, new))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_rope_parameters_take_precedence_and_config_is_unchanged() -> None:
    parameters = {"rope_type": "linear", "rope_theta": 77.0, "factor": 2.0}
    config = spelled(rope_parameters=parameters, rope_theta=77.0, rope_scaling={"type": "dynamic"}, rotary_pct=0.5)
    assert rope_parameters(config) == {**parameters, "partial_rotary_factor": 0.5}
    assert parameters == {"rope_type": "linear", "rope_theta": 77.0, "factor": 2.0}


# --- Unsupported configs


def test_contradicting_rope_fields_are_rejected() -> None:
    config = spelled(rope_parameters={"rope_type": "default", "rope_theta": 77.0}, rope_theta=500.0)
    with pytest.raises(ConfigError, match=r"rope_theta = 500\.0 contradicts 77\.0 in rope_parameters"):
        rope_parameters(config)


@pytest.mark.parametrize("truncate", [False, None])
def test_yarn_without_truncation_matches_transformers(truncate: bool | None) -> None:
    """Treat null as false, as transformers does."""
    parameters = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    rotary: Any = load_rotary(spelled(rope_parameters=parameters | {"truncate": truncate}), HEAD_DIM, CPU)
    truncated: Any = load_rotary(spelled(rope_parameters=parameters), HEAD_DIM, CPU)
    theirs, _ = ROPE_INIT_FUNCTIONS["yarn"](llama_config(parameters | {"truncate": truncate}), CPU)
    torch.testing.assert_close(rotary.inv_freq, theirs)
    assert not torch.equal(rotary.inv_freq, truncated.inv_freq)


@pytest.mark.parametrize("kind", ["proportional", "axial", "nope", "su"])
def test_unknown_rope_type_error_names_type(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"rope_type = '{kind}' is not supported; use default, linear"):
        load_rotary(spelled(rope_scaling={"type": kind, "factor": 2.0}), HEAD_DIM, CPU)


@pytest.mark.parametrize(
    ("parameters", "lacking"),
    [
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "dynamic"}, "factor"),
        ({"rope_type": "yarn"}, "factor"),
        ({"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}, "low_freq_factor"),
        ({"rope_type": "longrope", "long_factor": EIGHT_POSITIONS}, "short_factor"),
        ({"rope_type": "longrope", "short_factor": EIGHT_POSITIONS}, "long_factor"),
    ],
)
def test_error_names_missing_rope_parameter(parameters: dict[str, Any], lacking: str) -> None:
    with pytest.raises(ConfigError, match=f"rope_parameters lacks '{lacking}' for rope_type"):
        load_rotary(spelled(rope_parameters=parameters), HEAD_DIM, CPU)


@pytest.mark.parametrize("key", ["short_factor", "long_factor"])
@pytest.mark.parametrize("count", [0, 7, 9])
def test_longrope_factors_with_wrong_length_are_rejected(key: str, count: int) -> None:
    parameters: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": EIGHT_POSITIONS,
        "long_factor": EIGHT_POSITIONS,
    }
    parameters[key] = [1.0] * count
    with pytest.raises(ConfigError, match=rf"rope_parameters\.{key} is not a list of 8 positive numbers"):
        load_rotary(spelled(rope_parameters=parameters), HEAD_DIM, CPU)


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"rope_type": "linear", "factor": None}, "lacks 'factor'"),
        ({"rope_type": "linear", "factor": "two"}, r"rope_parameters\.factor = 'two'"),
        ({"rope_type": "linear", "factor": 0}, r"rope_parameters\.factor = 0 is not a positive number"),
        ({"rope_type": "linear", "factor": -2.0}, r"rope_parameters\.factor = -2\.0 is not a positive number"),
        ({"rope_type": "dynamic", "factor": "two"}, r"rope_parameters\.factor = 'two'"),
        ({"rope_type": "dynamic", "factor": 0.0}, r"rope_parameters\.factor = 0\.0 is not a positive number"),
        ({"rope_type": "yarn", "factor": 0, "original_max_position_embeddings": 16}, r"rope_parameters\.factor = 0"),
        ({"rope_type": "default", "rope_theta": "many"}, r"rope_parameters\.rope_theta = 'many'"),
        ({"rope_type": "default", "rope_theta": 0}, r"rope_parameters\.rope_theta = 0"),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": "many"}, "original_max_position"),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}, "original_max_position"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": -1.0}, "rope_parameters cannot be used"),
        ({"rope_type": "default", "partial_rotary_factor": "half"}, r"partial_rotary_factor = 'half' is not"),
        ({"rope_type": "default", "partial_rotary_factor": -1.0}, r"partial_rotary_factor = -1\.0 is not"),
        ({"rope_type": "default", "partial_rotary_factor": 2.0}, r"partial_rotary_factor = 2\.0 is not"),
        ({"rope_type": ["linear"], "factor": 2.0}, "rope_type = .* is not supported"),
        ({"rope_type": "default", "rope_theta": 10**400}, "rope_theta = .* is not a positive number"),
        (
            {"rope_type": "longrope", "short_factor": [0.0] * 8, "long_factor": EIGHT_POSITIONS},
            "short_factor is not a list",
        ),
        (
            {"rope_type": "longrope", "short_factor": ["a"] * 8, "long_factor": EIGHT_POSITIONS},
            "rope_parameters cannot be used",
        ),
        ({"rope_type": "longrope", "short_factor": 2.0, "long_factor": EIGHT_POSITIONS}, "short_factor is not a list"),
    ],
)
def test_implausible_rope_values_are_rejected(parameters: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        load_rotary(spelled(rope_parameters=parameters), HEAD_DIM, CPU)
