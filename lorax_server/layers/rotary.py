"""Rotary position embeddings (RoPE) and their scaling methods.

Dynamic NTK and LongRoPE scaling depend on the sequence length. The frequencies are chosen for each sequence, so results
do not depend on other sequences in the batch.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from lorax_server.errors import ConfigError
from lorax_server.kernels import CosSin
from lorax_server.layers.attention import PagedContext

# Larger values in a config are rejected as implausible.
MAX_ROPE_VALUES = {
    "rope_theta": 1e30,
    "partial_rotary_factor": 1.0,
    "factor": 1e30,
    "original_max_position_embeddings": 1e12,
    "attention_factor": 1e30,
}
# Positions in a new table. The table grows when a longer sequence arrives.
INITIAL_TABLE_ROWS = 8192


class RotaryEmbedding(nn.Module):
    """RoPE with fixed frequencies. Cosines and sines are cached in a table that grows on demand."""

    def __init__(
        self, inv_freq: torch.Tensor, max_positions: int, device: torch.device, attention_factor: float = 1.0
    ) -> None:
        super().__init__()
        self.inv_freq = inv_freq.to(device)
        self.attention_factor = attention_factor
        self.cos, self.sin = self._table(min(max_positions, INITIAL_TABLE_ROWS))

    def reserve(self, count: int) -> None:
        """Grow the table to at least `count` positions, so that its address stays valid for recorded graphs."""
        if count > len(self.cos):
            self.cos, self.sin = self._table(count)

    def forward(self, ctx: PagedContext) -> CosSin:
        if ctx.max_position > len(self.cos):
            self.cos, self.sin = self._table(max(ctx.max_position, 2 * len(self.cos)))
        ids = ctx.position_ids
        return self.cos.index_select(0, ids), self.sin.index_select(0, ids)

    def _table(self, count: int) -> CosSin:
        return _compute_angles(torch.arange(count, device=self.inv_freq.device), self.inv_freq, self.attention_factor)


class DynamicRotaryEmbedding(nn.Module):
    """RoPE with dynamic NTK scaling for sequences that are longer than the training length."""

    def __init__(self, dim: int, base: float, factor: float, max_positions: int, device: torch.device) -> None:
        super().__init__()
        self.dim, self.base, self.factor, self.max_positions = dim, base, factor, max_positions
        self.exponents = _compute_exponents(dim).to(device)

    def forward(self, ctx: PagedContext) -> CosSin:
        lengths = ctx.rope_lengths().clamp(min=self.max_positions)
        growth = self.factor * lengths / self.max_positions - (self.factor - 1)
        base = self.base * growth ** (self.dim / (self.dim - 2))  # [num_tokens]
        return _compute_angles(ctx.position_ids, 1.0 / base[:, None] ** self.exponents, 1.0)


class LongRotaryEmbedding(nn.Module):
    """LongRoPE. Sequences longer than the original length use the long frequencies. Other sequences use the short
    frequencies.
    """

    def __init__(
        self,
        short: torch.Tensor,
        long: torch.Tensor,
        original_length: int,
        attention_factor: float,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.inv_freq = torch.stack([short, long]).to(device)
        self.original_length = original_length
        self.attention_factor = attention_factor

    def forward(self, ctx: PagedContext) -> CosSin:
        chosen = self.inv_freq[(ctx.rope_lengths() > self.original_length).long()]
        return _compute_angles(ctx.position_ids, chosen, self.attention_factor)


def load_rotary(
    config: Any, head_dim: int, device: torch.device, *, partial: bool = False, layer_type: str | None = None
) -> nn.Module:
    """Build the rotary embedding that a config describes.

    `partial` allows configs that rotate only part of each head. `layer_type` selects the settings in configs that
    have separate settings per layer type.
    """
    parameters = rope_parameters(config, layer_type)
    if not partial and parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError("config field partial_rotary_factor is not supported by this architecture")
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    if not isinstance(rope_type, str) or rope_type not in ROPE_TYPES:
        raise ConfigError(f"config field rope_type = {rope_type!r} is not supported; use {', '.join(ROPE_TYPES)}")
    try:
        dim = partial_rotary_dim(config, head_dim, layer_type)
        if dim < 2 or dim % 2:
            raise ConfigError(f"the number of rotated dimensions must be even and positive (got {dim} of {head_dim})")
        return ROPE_TYPES[rope_type](parameters, config, dim, device)
    except KeyError as missing:
        raise ConfigError(f"config field rope_parameters lacks {missing} for rope_type {rope_type!r}") from missing
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:  # caused by implausible config values
        raise ConfigError(f"config field rope_parameters cannot be used: {error}") from error


def partial_rotary_dim(config: Any, head_dim: int, layer_type: str | None = None) -> int:
    """Return the number of dimensions per head that RoPE rotates."""
    return int(head_dim * rope_parameters(config, layer_type).get("partial_rotary_factor", 1.0))


def rope_parameters(config: Any, layer_type: str | None = None) -> dict[str, Any]:
    """Return the RoPE settings of a config, including legacy fields, as a dictionary with current names."""
    stored = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if isinstance(stored, Mapping) and layer_type in stored:
        stored = stored[layer_type]
    if not isinstance(stored, Mapping):
        raise ConfigError(f"config field rope_parameters = {stored!r} is not a dictionary")
    if any(isinstance(value, Mapping) for value in stored.values()):
        raise ConfigError("config field rope_parameters: settings per layer type are not supported")
    parameters = {key: value for key, value in stored.items() if value is not None or key == "truncate"}
    spellings = {
        "rope_theta": ("rope_theta", "rotary_emb_base"),
        "partial_rotary_factor": ("partial_rotary_factor", "rotary_pct"),
        "original_max_position_embeddings": ("original_max_position_embeddings",),
    }
    for key, fields in spellings.items():
        for field in fields:
            value = getattr(config, field, None)
            if value is None or (key == "partial_rotary_factor" and stored.get(key) is not None):
                continue  # some transformers versions add a default value; the stored value takes precedence
            if parameters.setdefault(key, value) != value:
                stored = parameters[key]
                raise ConfigError(f"config field {field} = {value!r} contradicts {stored!r} in rope_parameters")
    parameters.setdefault("rope_theta", 10000.0)
    for name, most in MAX_ROPE_VALUES.items():
        value = parameters.get(name)
        if name in parameters and not (isinstance(value, int | float) and 0 < value <= most):
            raise ConfigError(
                f"config field rope_parameters.{name} = {value!r} is not a positive number up to {most:g}"
            )
    return parameters


def _make_default_rope(parameters: Mapping[str, Any], config: Any, dim: int, device: torch.device) -> nn.Module:
    return RotaryEmbedding(_compute_frequencies(parameters, dim), config.max_position_embeddings, device)


def _make_linear_rope(parameters: Mapping[str, Any], config: Any, dim: int, device: torch.device) -> nn.Module:
    inv_freq = _compute_frequencies(parameters, dim) / parameters["factor"]
    return RotaryEmbedding(inv_freq, config.max_position_embeddings, device)


def _make_dynamic_ntk_rope(parameters: Mapping[str, Any], config: Any, dim: int, device: torch.device) -> nn.Module:
    base, factor = parameters["rope_theta"], parameters["factor"]
    return DynamicRotaryEmbedding(dim, base, factor, config.max_position_embeddings, device)


def _make_llama3_rope(parameters: Mapping[str, Any], config: Any, dim: int, device: torch.device) -> nn.Module:
    """Build Llama 3's RoPE.

    High frequencies stay unchanged, low frequencies are divided by a factor, and frequencies between them are
    interpolated.
    """
    inv_freq = _compute_frequencies(parameters, dim)
    low, high, factor = parameters["low_freq_factor"], parameters["high_freq_factor"], parameters["factor"]
    turns = _find_original_length(parameters, config) * inv_freq / (2 * math.pi)  # rotations within the original length
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    blended = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    return RotaryEmbedding(blended, config.max_position_embeddings, device)


def _make_yarn_rope(parameters: Mapping[str, Any], config: Any, dim: int, device: torch.device) -> nn.Module:
    """Build YaRN RoPE: keep high frequencies and divide low frequencies by a factor, with a linear ramp in between."""
    original = _find_original_length(parameters, config)
    if "factor" not in parameters and "original_max_position_embeddings" not in parameters:
        raise KeyError("factor")
    factor = parameters.get("factor") or config.max_position_embeddings / original
    fast, slow = parameters.get("beta_fast") or 32, parameters.get("beta_slow") or 1
    base = parameters["rope_theta"]

    def dimension(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(fast), dimension(slow)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2).float() - low) / (high - low or 0.001)).clamp(0, 1)
    inv_freq = _compute_frequencies(parameters, dim)
    blended = inv_freq / factor * ramp + inv_freq * (1 - ramp)
    attention_factor = parameters.get("attention_factor") or _yarn_attention_factor(parameters, factor)
    return RotaryEmbedding(blended, config.max_position_embeddings, device, attention_factor)


def _yarn_attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return mscale(parameters["mscale"]) / mscale(parameters["mscale_all_dim"])
    return mscale(1.0)


def _make_longrope(parameters: Mapping[str, Any], config: Any, dim: int, device: torch.device) -> nn.Module:
    original = _find_original_length(parameters, config)
    factor = parameters.get("factor") or config.max_position_embeddings / original
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    inv_freq = _compute_frequencies(parameters, dim)
    short, long = (torch.tensor(parameters[key], dtype=torch.float32) for key in ("short_factor", "long_factor"))
    for key, factors in (("short_factor", short), ("long_factor", long)):
        if factors.shape != (dim // 2,) or not bool((factors > 0).all()):
            raise ConfigError(f"config field rope_parameters.{key} is not a list of {dim // 2} positive numbers")
    return LongRotaryEmbedding(inv_freq / short, inv_freq / long, original, attention_factor, device)


ROPE_TYPES: dict[str, Callable[[Mapping[str, Any], Any, int, torch.device], nn.Module]] = {
    "default": _make_default_rope,
    "linear": _make_linear_rope,
    "dynamic": _make_dynamic_ntk_rope,
    "llama3": _make_llama3_rope,
    "yarn": _make_yarn_rope,
    "longrope": _make_longrope,
}


def _find_original_length(parameters: Mapping[str, Any], config: Any) -> int:
    return int(parameters.get("original_max_position_embeddings") or config.max_position_embeddings)


def _compute_exponents(dim: int) -> torch.Tensor:
    return torch.arange(0, dim, 2).float() / dim


def _compute_frequencies(parameters: Mapping[str, Any], dim: int) -> torch.Tensor:
    frequencies: torch.Tensor = 1.0 / (parameters["rope_theta"] ** _compute_exponents(dim))
    return frequencies


def _compute_angles(positions: torch.Tensor, inv_freq: torch.Tensor, attention_factor: float) -> CosSin:
    angles = positions.float()[:, None] * inv_freq
    return angles.cos() * attention_factor, angles.sin() * attention_factor
