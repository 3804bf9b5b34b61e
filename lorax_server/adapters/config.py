"""`adapter_config.json`: what PEFT wrote there, and which of it we can honour.

There are four kinds of fields: those that say how to compute (`AdapterConfig` has them), those that only mattered for
training, those that ask for something we do not serve, and unknown ones. The third kind is refused by name. The last is
refused too, unless its value means "off": a field of a new version of PEFT may change the result.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from lorax_server.adapters.patterns import Patterns
from lorax_server.errors import AdapterError

# Without effect once training is over.
TRAINING_FIELDS = {
    *("auto_mapping", "corda_config", "eva_config", "fan_in_fan_out", "inference_mode", "init_lora_weights"),
    *("loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "merge_weights", "monteclora_config"),
    *("peft_type", "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type", "velora_config"),
}
SERVED_FIELDS = {
    *("alpha_pattern", "base_model_name_or_path", "bias", "ensure_weight_tying", "exclude_modules", "layers_pattern"),
    *("layers_to_transform", "lora_alpha", "lora_bias", "modules_to_save", "r", "rank_pattern", "target_modules"),
    *("trainable_token_indices", "use_bdlora", "use_dora", "use_rslora"),
}
REFUSED_FIELDS = {
    "alora_invocation_tokens": "activated LoRA (aLoRA), which takes effect in the middle of a prompt",
    "arrow_config": "Arrow, which routes every token through several adapters",
    "enable_lora": "the fused matrices of the first PEFT versions",
    "kasa_config": "KaSA, which takes singular values out of the base model's matrices",
    "layer_replication": "a base model with repeated layers",
    "megatron_config": "Megatron's parallel layers",
    "target_parameters": "LoRA on bare parameters, such as fused experts",
    "use_qalora": "QALoRA, which needs a GPTQ base model",
}
# These change the base model's matrices when training begins.
BASE_CHANGING_INITS = ("pissa", "olora", "loftq", "corda", "lora_ga")
KNOWN_INITS = ("true", "false", "gaussian", "orthogonal", "eva", "mica", *BASE_CHANGING_INITS)
MAX_RANK = 65536
MAX_ALPHA = 1e30  # so that a scale fits into float32
MAX_PATTERNS = 10_000
_T = TypeVar("_T")


@dataclass(frozen=True)
class BlockDiagonal:
    """BD-LoRA: modules whose name contains one of these have a factor that is zero but for blocks on its diagonal."""

    a: tuple[str, ...]
    b: tuple[str, ...]
    blocks: int


@dataclass(frozen=True)
class AdapterConfig:
    """The settings by which an adapter is computed. Methods take the name of a module in transformers."""

    name: str
    r: int
    alpha: float
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    use_dora: bool = False
    lora_bias: bool = False
    block_diagonal: BlockDiagonal | None = None
    modules_to_save: tuple[str, ...] = ()
    token_indices: tuple[int, ...] | Mapping[str, tuple[int, ...]] = ()
    ensure_weight_tying: bool = False
    target_modules: tuple[str, ...] | str | None = None
    exclude_modules: tuple[str, ...] | str = ()
    layers_to_transform: tuple[int, ...] | None = None
    layers_pattern: tuple[str, ...] = ()
    base_model_name: str | None = None
    base_model_class: str | None = None

    def rank(self, module: str) -> int:
        return self.rank_pattern.get(self._find_pattern(self.rank_pattern, module), self.r)

    def scale(self, module: str) -> float:
        alpha = self.alpha_pattern.get(self._find_pattern(self.alpha_pattern, module), self.alpha)
        rank = self.rank(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def is_target(self, module: str) -> bool | None:
        """Tell whether PEFT adapts this module; None where PEFT's defaults for the model type decide."""
        if self._is_excluded(module):
            return False
        if self.target_modules is None or self.target_modules == "all-linear":
            return None
        if isinstance(self.target_modules, str):
            return self._patterns.fullmatch(self.target_modules, module)
        if module in self.target_modules:
            return True
        return _ends_with(module, self.target_modules) and self._is_layer(module)

    def identity_settings(self) -> dict[str, Any]:
        """Return the settings that, with the tensors, determine the result."""
        blocks, tokens = self.block_diagonal, self.token_indices
        names = ("r", "alpha", "use_rslora", "use_dora", "lora_bias", "ensure_weight_tying")
        return {name: getattr(self, name) for name in names} | {
            "rank_pattern": list(self.rank_pattern.items()),  # the first that fits counts, so their order matters
            "alpha_pattern": list(self.alpha_pattern.items()),
            "block_diagonal": None if blocks is None else [blocks.a, blocks.b, blocks.blocks],
            "modules_to_save": sorted(self.modules_to_save),
            "token_indices": list(tokens.items()) if isinstance(tokens, Mapping) else tokens,
        }

    def _is_excluded(self, module: str) -> bool:
        if any(self._patterns.match(rf"(^|.*\.){name}($|\..*)", module) for name in self.modules_to_save):
            return True
        if isinstance(self.exclude_modules, str):
            return self._patterns.fullmatch(self.exclude_modules, module)
        return module in self.exclude_modules or _ends_with(module, self.exclude_modules)

    def _is_layer(self, module: str) -> bool:
        if self.layers_to_transform is None:
            return True
        patterns = [rf"(?:^|.*?\.){pattern}\.(?P<index>\d+)\." for pattern in self.layers_pattern]
        for pattern in patterns or [r".*?\.[^.]*\.(?P<index>\d+)\."]:
            match = self._patterns.match(pattern, module)
            if match is not None:
                return match["index"] is not None and int(match["index"]) in self.layers_to_transform
        return False

    def _find_pattern(self, patterns: Mapping[str, Any], module: str) -> str:
        return next((key for key in patterns if self._patterns.match(rf"(.*\.)?({key})$", module)), module)

    @cached_property
    def _patterns(self) -> Patterns:
        return Patterns(self.name)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the compiled patterns: the process that gets the config has a time budget of its own."""
        return {key: value for key, value in vars(self).items() if key != "_patterns"}


def _ends_with(module: str, names: tuple[str, ...]) -> bool:
    return any(module.endswith(f".{name}") for name in names)


def parse_config(raw: Mapping[str, Any], name: str) -> AdapterConfig:
    """Read the config of adapter `name` from the parsed JSON. Refuse what we cannot honour."""
    reader = _ConfigReader(raw, name)
    reader.check_kind()
    reader.check_init()
    reader.check_fields()
    return AdapterConfig(
        name=name,
        r=reader.read_whole("r", raw.get("r")),
        alpha=reader.read_number("lora_alpha", raw.get("lora_alpha", 8)),
        rank_pattern=reader.read_patterns("rank_pattern", reader.read_whole),
        alpha_pattern=reader.read_patterns("alpha_pattern", reader.read_number),
        block_diagonal=reader.read_block_diagonal(),
        modules_to_save=reader.read_names("modules_to_save"),
        token_indices=reader.read_token_indices(),
        target_modules=reader.read_names_or_pattern("target_modules"),
        exclude_modules=reader.read_names_or_pattern("exclude_modules") or (),
        layers_to_transform=reader.read_layers(),
        layers_pattern=reader.read_names("layers_pattern"),
        base_model_name=reader.read("base_model_name_or_path", str, "is not a string"),
        base_model_class=reader.read_base_model_class(),
        **{flag: reader.read_flag(flag) for flag in ("use_rslora", "use_dora", "lora_bias", "ensure_weight_tying")},
    )


class _ConfigReader:
    """Reads fields of the JSON and checks their types. An error names the adapter and the field."""

    def __init__(self, raw: Mapping[str, Any], name: str) -> None:
        self.raw = raw
        self.name = name

    def refuse(self, key: str, reason: str) -> AdapterError:
        return AdapterError(f"adapter {self.name!r}: config field {key} = {_shown(self.raw.get(key))} {reason}")

    def check_kind(self) -> None:
        if self.raw.get("peft_type") != "LORA":
            raise self.refuse("peft_type", "is not supported; only LORA is")
        if self.raw.get("task_type") not in (None, "CAUSAL_LM"):
            raise self.refuse("task_type", "is not supported; only CAUSAL_LM is")

    def check_init(self) -> None:
        init = str(self.raw.get("init_lora_weights", True)).lower()
        if init.startswith(BASE_CHANGING_INITS):
            raise self.refuse(
                "init_lora_weights",
                "means that the adapter fits a changed base model, not the one it names; convert it: save it once "
                "more with PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...)",
            )
        if init not in KNOWN_INITS:
            raise self.refuse("init_lora_weights", "is not known, so it cannot be ruled out that it changes the base")

    def check_fields(self) -> None:
        for key, value in self.raw.items():
            if _is_off(value) or key in SERVED_FIELDS | TRAINING_FIELDS:
                continue
            if key in REFUSED_FIELDS:
                raise self.refuse(key, f"is not supported: {REFUSED_FIELDS[key]}")
            raise self.refuse(key, "is not a field we know, so it may change the result; set it to null if it does not")
        if self.raw.get("bias", "none") not in ("none", "all", "lora_only"):
            raise self.refuse("bias", "is not one of none, all and lora_only")

    def read(self, key: str, kind: type[_T], reason: str) -> _T | None:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, kind):
            raise self.refuse(key, reason)
        return value

    def read_flag(self, key: str) -> bool:
        return bool(self.read(key, bool, "is not true or false"))

    def read_number(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_ALPHA:
            raise self.refuse(key, "is not a number of reasonable size")
        return float(value)

    def read_whole(self, key: str, value: Any) -> int:
        if type(value) is not int or not 1 <= value <= MAX_RANK:
            raise self.refuse(key, f"is not a whole number from 1 to {MAX_RANK}")
        return value

    def read_names(self, key: str) -> tuple[str, ...]:
        value = self.raw.get(key) or []
        value = [value] if isinstance(value, str) else value
        if not _is_list_of(value, str):
            raise self.refuse(key, "is not a list of names")
        return tuple(value)

    def read_names_or_pattern(self, key: str) -> tuple[str, ...] | str | None:
        value = self.raw.get(key)
        if isinstance(value, str):
            return "all-linear" if value.lower() == "all-linear" else value
        return None if value is None else self.read_names(key)

    def read_patterns(self, key: str, read: Callable[[str, Any], _T]) -> dict[str, _T]:
        value = self.raw.get(key) or {}
        if not isinstance(value, dict) or len(value) > MAX_PATTERNS:
            raise self.refuse(key, "is not an object of patterns and numbers")
        return {pattern: read(key, number) for pattern, number in value.items()}

    def read_layers(self) -> tuple[int, ...] | None:
        value = self.raw.get("layers_to_transform")
        value = [value] if type(value) is int else value
        if value is None or value == []:
            return None
        if not _is_list_of(value, int):
            raise self.refuse("layers_to_transform", "is not a list of layers")
        return tuple(value)

    def read_token_indices(self) -> tuple[int, ...] | dict[str, tuple[int, ...]]:
        value = self.raw.get("trainable_token_indices") or []
        if isinstance(value, dict):
            return {module: self._read_tokens(tokens) for module, tokens in value.items()}
        return self._read_tokens(value)

    def _read_tokens(self, value: Any) -> tuple[int, ...]:
        if not _is_list_of(value, int) or len(set(value)) != len(value) or min(value, default=0) < 0:
            raise self.refuse("trainable_token_indices", "is not a list of different token ids")
        return tuple(value)

    def read_block_diagonal(self) -> BlockDiagonal | None:
        value = self.raw.get("use_bdlora")
        if not value:
            return None
        fields = {"match_strict", "nblocks", "target_modules_bd_a", "target_modules_bd_b"}
        if not isinstance(value, dict) or not set(value) <= fields:
            raise self.refuse("use_bdlora", f"is not an object of {', '.join(sorted(fields))}")
        inner = _ConfigReader(value, self.name)
        a, b = inner.read_names("target_modules_bd_a"), inner.read_names("target_modules_bd_b")
        return BlockDiagonal(a, b, inner.read_whole("nblocks", value.get("nblocks")))

    def read_base_model_class(self) -> str | None:
        mapping = self.raw.get("auto_mapping")
        name = mapping.get("base_model_class") if isinstance(mapping, dict) else None
        return name if isinstance(name, str) else None


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def _is_off(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_base_model(config: AdapterConfig, model_type: str, model_class: str, base_type: str | None) -> None:
    """Refuse an adapter of another architecture before its weights are fetched.

    `base_type` is the `model_type` of the base model that the adapter names. Where it is None, the shapes of the
    tensors decide later.
    """
    if base_type is not None and base_type != model_type:
        raise AdapterError(
            f"adapter {config.name!r} was trained on {config.base_model_name!r}, which is of type {base_type!r}; "
            f"this server's base model is of type {model_type!r}"
        )
    if config.base_model_class not in (None, model_class):
        raise AdapterError(
            f"adapter {config.name!r} was trained on a {config.base_model_class}; this server's base model is a "
            f"{model_class}"
        )
