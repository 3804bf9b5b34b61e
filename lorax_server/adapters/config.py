"""Parses PEFT's `adapter_config.json`, and rejects settings that the server does not support."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lorax_server.adapters.methods.fields import GENERATIVE_TASK, POOLING_TASKS, BlockDiagonal, ConfigReader, Method
from lorax_server.adapters.patterns import PatternMatcher
from lorax_server.errors import AdapterError


@dataclass(frozen=True)
class AdapterConfig:
    """The settings in `adapter_config.json`. The methods accept the module names that transformers uses."""

    name: str
    r: int = 0
    alpha: float = 0.0
    method: Method = Method.LORA
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    use_dora: bool = False
    use_kasa: bool = False
    lora_bias: bool = False
    block_diagonal: BlockDiagonal | None = None
    modules_to_save: tuple[str, ...] = ()
    invocation_tokens: tuple[int, ...] = ()  # aLoRA: the adapter applies from these prompt tokens on
    token_indices: tuple[int, ...] | Mapping[str, tuple[int, ...]] = ()
    ensure_weight_tying: bool = False
    target_modules: tuple[str, ...] | str | None = None
    target_parameters: tuple[str, ...] = ()
    exclude_modules: tuple[str, ...] | str = ()
    layers_to_transform: tuple[int, ...] | None = None
    layers_pattern: tuple[str, ...] = ()
    feedforward_modules: tuple[str, ...] | str | None = None  # IA3 only
    projection_seed: int | None = None  # VeRA only; None if the projections are in the file
    base_model_name: str | None = None
    base_model_class: str | None = None
    task_type: str | None = None

    def rank(self, module: str) -> int:
        return self.rank_pattern.get(self._find_pattern(self.rank_pattern, module), self.r)

    def scale(self, module: str) -> float:
        alpha = self.alpha_pattern.get(self._find_pattern(self.alpha_pattern, module), self.alpha)
        rank = self.rank(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def count_blocks(self, module: str) -> tuple[int, int]:
        """Return the number of diagonal blocks in LoRA A and in LoRA B. Both are 1 unless the adapter is a BD-LoRA
        adapter.
        """
        blocks = self.block_diagonal
        if blocks is not None and any(name in module for name in blocks.a):
            return blocks.blocks, 1
        if blocks is not None and any(name in module for name in blocks.b):
            return 1, blocks.blocks
        return 1, 1

    def is_target(self, module: str) -> bool | None:
        """Return True if PEFT adapts this module, or None if PEFT's defaults for the model type decide."""
        if self._is_excluded(module):
            return False
        if self.target_modules is None and self.target_parameters:
            return False
        if self.target_modules is None or self.target_modules == "all-linear":
            return None
        if isinstance(self.target_modules, str):
            return self._pattern_matcher.fullmatch(self.target_modules, module)
        if module in self.target_modules:
            return True
        return _has_suffix(module, self.target_modules) and self._is_layer(module)

    def is_target_parameter(self, parameter: str) -> bool:
        """Return True if PEFT adapts this parameter. Settings such as `exclude_modules` do not apply to parameters."""
        return parameter in self.target_parameters or _has_suffix(parameter, self.target_parameters)

    def is_feedforward(self, module: str) -> bool | None:
        """Return True if IA3 scales this module's inputs instead of its outputs, or None if PEFT's defaults decide."""
        if isinstance(self.feedforward_modules, str):
            return self._pattern_matcher.fullmatch(self.feedforward_modules, module)
        return None if self.feedforward_modules is None else module.endswith(self.feedforward_modules)

    def identity_settings(self) -> dict[str, Any]:
        """Return the settings that are part of the adapter identity.

        Settings that only affect validation are included. Otherwise the same tensors with an invalid config would have
        the identity of the valid adapter.
        """
        blocks, tokens = self.block_diagonal, self.token_indices
        always_included = ("r", "alpha", "use_rslora", "use_dora", "lora_bias", "ensure_weight_tying")
        optional = {"method": self.method.value, "use_kasa": self.use_kasa, "projection_seed": self.projection_seed}
        module_settings = ("target_modules", "exclude_modules", "layers_to_transform", "feedforward_modules")
        return {name: getattr(self, name) for name in always_included} | {
            **{name: value for name, value in optional.items() if value not in (None, False, Method.LORA.value)},
            **{name: _sort_names(getattr(self, name)) for name in module_settings},
            "layers_pattern": self.layers_pattern,
            "rank_pattern": list(self.rank_pattern.items()),  # the first matching pattern wins, so the order matters
            "alpha_pattern": list(self.alpha_pattern.items()),
            "block_diagonal": None if blocks is None else [blocks.a, blocks.b, blocks.blocks],
            "modules_to_save": sorted(self.modules_to_save),
            **({"invocation_tokens": self.invocation_tokens} if self.invocation_tokens else {}),
            **({"target_parameters": sorted(self.target_parameters)} if self.target_parameters else {}),
            "token_indices": list(tokens.items()) if isinstance(tokens, Mapping) else tokens,
        }

    def _is_excluded(self, module: str) -> bool:
        if any(self._pattern_matcher.match(rf"(^|.*\.){name}($|\..*)", module) for name in self.modules_to_save):
            return True
        if isinstance(self.exclude_modules, str):
            return self._pattern_matcher.fullmatch(self.exclude_modules, module)
        return module in self.exclude_modules or _has_suffix(module, self.exclude_modules)

    def _is_layer(self, module: str) -> bool:
        if self.layers_to_transform is None:
            return True
        patterns = [rf"(?:^|.*?\.){pattern}\.(?P<index>\d+)\." for pattern in self.layers_pattern]
        for pattern in patterns or [r".*?\.[^.]*\.(?P<index>\d+)\."]:
            match = self._pattern_matcher.match(pattern, module)
            if match is not None:
                return match["index"] is not None and int(match["index"]) in self.layers_to_transform
        return False

    def _find_pattern(self, patterns: Mapping[str, Any], module: str) -> str:
        return next((key for key in patterns if self._pattern_matcher.match(rf"(.*\.)?({key})$", module)), module)

    @cached_property
    def _pattern_matcher(self) -> PatternMatcher:
        return PatternMatcher(self.name)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle. It omits compiled patterns, so the other process compiles them with a full time
        budget.
        """
        return {key: value for key, value in vars(self).items() if key != "_pattern_matcher"}


def _sort_names(names: tuple[Any, ...] | str | None) -> list[Any] | str | None:
    return sorted(names) if isinstance(names, tuple) else names


def _has_suffix(module: str, names: tuple[str, ...]) -> bool:
    return any(module.endswith(f".{name}") for name in names)


def parse_config(raw: Mapping[str, Any], name: str) -> AdapterConfig:
    """Build the `AdapterConfig` for adapter `name` from parsed JSON. Raise AdapterError for unsupported settings."""
    reader = ConfigReader(raw, name)
    method = reader.read_method()
    if method is Method.LORA:
        reader.check_init()
    reader.check_fields(method)
    return AdapterConfig(
        name=name,
        method=method,
        modules_to_save=reader.read_names("modules_to_save"),
        target_modules=reader.read_names_or_pattern("target_modules"),
        exclude_modules=reader.read_names_or_pattern("exclude_modules") or (),
        layers_to_transform=reader.read_layers(),
        layers_pattern=reader.read_names("layers_pattern"),
        base_model_name=reader.read("base_model_name_or_path", str, "must be a string"),
        base_model_class=reader.read_base_model_class(),
        task_type=raw.get("task_type"),
        **_read_method_fields(reader, method),
    )


def _read_method_fields(reader: ConfigReader, method: Method) -> dict[str, Any]:
    """Return the values of the config fields that only this PEFT method has."""
    raw, flags = reader.raw, ("use_rslora", "use_dora", "lora_bias", "ensure_weight_tying")
    if method is Method.LORA:
        return {
            "r": reader.read_positive_int("r", raw.get("r")),
            "alpha": reader.read_number("lora_alpha", raw.get("lora_alpha", 8)),
            "rank_pattern": reader.read_patterns("rank_pattern", reader.read_positive_int),
            "alpha_pattern": reader.read_patterns("alpha_pattern", reader.read_number),
            "block_diagonal": reader.read_block_diagonal(),
            "invocation_tokens": reader.read_invocation(),
            "token_indices": reader.read_token_indices(),
            "target_parameters": reader.read_names("target_parameters"),
            "use_kasa": reader.read_kasa(),
            **{flag: reader.read_flag(flag) for flag in flags},
        }
    if method is Method.VERA:
        seed, is_saved = reader.read_seed("projection_prng_key"), reader.read_flag("save_projection", default=True)
        return {"r": reader.read_positive_int("r", raw.get("r")), "projection_seed": None if is_saved else seed}
    if method is Method.IA3:
        return {"feedforward_modules": reader.read_names_or_pattern("feedforward_modules")}
    return {}


def check_base_model(
    config: AdapterConfig, model_type: str, model_class: str, base_type: str | None, task: str = "generate"
) -> None:
    """Raise AdapterError if the adapter was trained for another architecture. Called before its weights are downloaded.

    `base_type` is the `model_type` of the base model that the adapter names. If it is None, incompatible adapters are
    rejected later by tensor shape.
    """
    if base_type is not None and base_type != model_type:
        raise AdapterError(
            f"adapter {config.name!r} was trained on {config.base_model_name!r}, which has model_type {base_type!r}; "
            f"this server's base model has model_type {model_type!r}"
        )
    if task != "generate" and config.invocation_tokens:
        raise AdapterError(f"adapter {config.name!r}: aLoRA is supported only on servers that generate text")
    if task != "generate":  # classes differ in their heads, whose shapes are checked later
        return
    if config.task_type in POOLING_TASKS:
        raise AdapterError(
            f"adapter {config.name!r}: config field task_type = {config.task_type!r} is not supported; this server "
            f"generates text, and only {GENERATIVE_TASK} is"
        )
    if config.base_model_class not in (None, model_class):
        raise AdapterError(
            f"adapter {config.name!r} was trained on a {config.base_model_class}; this server's base model is a "
            f"{model_class}"
        )
