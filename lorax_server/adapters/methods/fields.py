"""Lists the adapter config fields of each PEFT method, and reads their values.

A field is supported, relevant for training only, unsupported, or unknown. Unsupported and unknown fields are rejected
unless they are disabled (null, false or empty), because a field from a newer PEFT version may change the result.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from lorax_server.errors import AdapterError


class Method(Enum):
    """A PEFT method. The values are the supported values of `peft_type` in the adapter config."""

    LORA = "LORA"
    IA3 = "IA3"
    VERA = "VERA"
    LN_TUNING = "LN_TUNING"


@dataclass(frozen=True)
class MethodFields:
    """A PEFT method's adapter config fields, grouped by how the server handles them."""

    supported: set[str]
    training_only: set[str]  # no effect on inference
    unsupported: Mapping[str, str] = field(default_factory=dict)  # field name -> feature description


# Fields that all methods have.
COMMON_SUPPORTED_FIELDS = {"base_model_name_or_path", "modules_to_save", "target_modules"}
COMMON_TRAINING_FIELDS = {
    *("auto_mapping", "fan_in_fan_out", "inference_mode", "peft_type", "peft_version", "revision", "runtime_config"),
    "task_type",
}
FIELDS_BY_METHOD = {
    Method.LORA: MethodFields(
        COMMON_SUPPORTED_FIELDS
        | {
            *("alora_invocation_tokens", "alpha_pattern", "bias", "ensure_weight_tying", "exclude_modules"),
            *("kasa_config", "layers_pattern"),
            *("layers_to_transform", "lora_alpha", "lora_bias", "r", "rank_pattern", "trainable_token_indices"),
            *("target_parameters", "use_bdlora", "use_dora", "use_rslora"),
        },
        COMMON_TRAINING_FIELDS
        | {
            *("corda_config", "eva_config", "init_lora_weights", "loftq_config", "lora_dropout", "lora_ga_config"),
            *("megatron_core", "merge_weights", "monteclora_config", "qalora_group_size", "velora_config"),
        },
        {
            "arrow_config": "Arrow, which routes every token through several adapters",
            "enable_lora": "fused matrices, from the first PEFT versions",
            "layer_replication": "a base model with repeated layers",
            "megatron_config": "Megatron's parallel layers",
            "use_qalora": "QALoRA, which needs a GPTQ base model",
        },
    ),
    Method.IA3: MethodFields(
        COMMON_SUPPORTED_FIELDS | {"exclude_modules", "feedforward_modules"},
        COMMON_TRAINING_FIELDS | {"init_ia3_weights"},
    ),
    Method.VERA: MethodFields(
        COMMON_SUPPORTED_FIELDS
        | {"bias", "layers_pattern", "layers_to_transform", "projection_prng_key", "r", "save_projection"},
        COMMON_TRAINING_FIELDS | {"d_initial", "init_weights", "vera_dropout"},
    ),
    Method.LN_TUNING: MethodFields(COMMON_SUPPORTED_FIELDS | {"exclude_modules"}, COMMON_TRAINING_FIELDS),
}
BIAS_VALUES_BY_METHOD = {Method.LORA: ("none", "all", "lora_only"), Method.VERA: ("none", "all", "vera_only")}
# Initializations that modify the base model weights.
BASE_CHANGING_INITS = ("pissa", "olora", "loftq", "corda", "lora_ga")
ACCEPTED_INITS = ("true", "false", "gaussian", "orthogonal", "eva", "mica", *BASE_CHANGING_INITS)
# Values of `task_type`.
GENERATIVE_TASK = "CAUSAL_LM"
POOLING_TASKS = ("FEATURE_EXTRACTION", "SEQ_CLS", "TOKEN_CLS")
MAX_RANK = 65536
MAX_ALPHA = 1e30  # the scale must fit into float32
MAX_PATTERNS = 10_000
MAX_SEED = 2**63 - 1
MAX_INVOCATION_TOKENS = 256  # many times more tokens than in published adapters; limits the search in the prompt
MAX_TOKEN_ID = 2**31 - 1
# Features that PEFT cannot combine with aLoRA, or that would also change the tokens before the invocation.
NOT_WITH_INVOCATION = (
    *("ensure_weight_tying", "kasa_config", "modules_to_save", "target_parameters", "trainable_token_indices"),
    *("monteclora_config", "use_bdlora", "use_dora", "velora_config"),
)
_T = TypeVar("_T")


@dataclass(frozen=True)
class BlockDiagonal:
    """The settings for BD-LoRA.

    LoRA A is block-diagonal in modules whose name contains an entry of `a`. The same applies to LoRA B and `b`.
    """

    a: tuple[str, ...]
    b: tuple[str, ...]
    blocks: int


class ConfigReader:
    """Reads typed fields from a parsed adapter config. Errors name the adapter and the field."""

    def __init__(self, raw: Mapping[str, Any], name: str) -> None:
        self.raw = raw
        self.name = name

    def error(self, key: str, reason: str) -> AdapterError:
        return AdapterError(f"adapter {self.name!r}: config field {key} = {_truncate(self.raw.get(key))} {reason}")

    def read_method(self) -> Method:
        kind, methods = self.raw.get("peft_type"), {method.value: method for method in Method}
        if not isinstance(kind, str) or kind not in methods:
            raise self.error("peft_type", f"is not supported; only {', '.join(methods)} are")
        if self.raw.get("task_type") not in (None, GENERATIVE_TASK, *POOLING_TASKS):
            raise self.error("task_type", f"is not supported; only {', '.join((GENERATIVE_TASK, *POOLING_TASKS))} are")
        return methods[kind]

    def check_init(self) -> None:
        init = str(self.raw.get("init_lora_weights", True)).lower()
        if init.startswith(BASE_CHANGING_INITS):
            raise self.error(
                "init_lora_weights",
                "modified the base model weights before training; convert the adapter with PEFT's "
                "save_pretrained(..., path_initial_model_for_weight_conversion=...)",
            )
        if init not in ACCEPTED_INITS:
            raise self.error("init_lora_weights", "is unknown and may have modified the base model weights")

    def check_fields(self, method: Method) -> None:
        fields = FIELDS_BY_METHOD[method]
        for key, value in self.raw.items():
            if is_disabled(value) or key in fields.supported | fields.training_only:
                continue
            if key in fields.unsupported:
                raise self.error(key, f"is not supported: {fields.unsupported[key]}")
            raise self.error(key, "is unknown and may change the result; set it to null if it does not")
        biases = BIAS_VALUES_BY_METHOD.get(method, ())
        if biases and self.raw.get("bias", "none") not in biases:
            raise self.error("bias", f"must be one of {biases[0]}, {biases[1]} and {biases[2]}")

    def read_kasa(self) -> bool:
        """Return True if the config enables KaSA. Raise AdapterError if it also enables DoRA or BD-LoRA, as
        PEFT does.
        """
        value = self.raw.get("kasa_config")
        if value is None:  # an empty object enables KaSA with PEFT's defaults
            return False
        if not isinstance(value, dict) or not set(value) <= {"beta", "gamma"}:  # both affect training only
            raise self.error("kasa_config", "must be an object with beta and gamma")
        for other in ("use_dora", "use_bdlora"):
            if not is_disabled(self.raw.get(other)):
                raise self.error("kasa_config", f"cannot be combined with {other}")
        return True

    def read(self, key: str, kind: type[_T], reason: str) -> _T | None:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, kind):
            raise self.error(key, reason)
        return value

    def read_flag(self, key: str, default: bool = False) -> bool:
        flag = self.read(key, bool, "must be true or false")
        return default if flag is None else flag

    def read_seed(self, key: str) -> int:
        value = self.raw.get(key, 0)
        if type(value) is not int or not -MAX_SEED <= value <= MAX_SEED:
            raise self.error(key, "must be a 64-bit integer")
        return value

    def read_number(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_ALPHA:
            raise self.error(key, f"must be a number of magnitude at most {MAX_ALPHA:g}")
        return float(value)

    def read_positive_int(self, key: str, value: Any) -> int:
        if type(value) is not int or not 1 <= value <= MAX_RANK:
            raise self.error(key, f"must be an integer from 1 to {MAX_RANK}")
        return value

    def read_names(self, key: str) -> tuple[str, ...]:
        value = self.raw.get(key) or []
        value = [value] if isinstance(value, str) else value
        if not _is_list_of(value, str):
            raise self.error(key, "must be a list of names")
        return tuple(value)

    def read_names_or_pattern(self, key: str) -> tuple[str, ...] | str | None:
        value = self.raw.get(key)
        if isinstance(value, str):
            return "all-linear" if value.lower() == "all-linear" else value
        return None if value is None else self.read_names(key)

    def read_patterns(self, key: str, read: Callable[[str, Any], _T]) -> dict[str, _T]:
        value = self.raw.get(key) or {}
        if not isinstance(value, dict) or len(value) > MAX_PATTERNS:
            raise self.error(key, f"must be an object with at most {MAX_PATTERNS} patterns and numbers")
        return {pattern: read(key, number) for pattern, number in value.items()}

    def read_layers(self) -> tuple[int, ...] | None:
        value = self.raw.get("layers_to_transform")
        value = [value] if type(value) is int else value
        if value is None or value == []:
            return None
        if not _is_list_of(value, int):
            raise self.error("layers_to_transform", "must be a list of layer indices")
        return tuple(value)

    def read_token_indices(self) -> tuple[int, ...] | dict[str, tuple[int, ...]]:
        value = self.raw.get("trainable_token_indices") or []
        if isinstance(value, dict):
            return {module: self._read_tokens(tokens) for module, tokens in value.items()}
        return self._read_tokens(value)

    def _read_tokens(self, value: Any) -> tuple[int, ...]:
        if not _is_list_of(value, int) or len(set(value)) != len(value) or min(value, default=0) < 0:
            raise self.error("trainable_token_indices", "must be a list of unique token IDs")
        return tuple(value)

    def read_invocation(self) -> tuple[int, ...]:
        """Return aLoRA's invocation tokens, or an empty tuple if the adapter is not an aLoRA adapter."""
        key = "alora_invocation_tokens"
        value: Any = self.raw.get(key)
        if is_disabled(value):  # PEFT treats an empty list like null
            return ()
        if not _is_list_of(value, int) or len(value) > MAX_INVOCATION_TOKENS:
            raise self.error(key, f"must be a list of 1 to {MAX_INVOCATION_TOKENS} token IDs")
        if min(value) < 0 or max(value) > MAX_TOKEN_ID:
            raise self.error(key, "must contain valid token IDs")
        for other in NOT_WITH_INVOCATION:
            if not is_disabled(self.raw.get(other)):
                raise self.error(key, f"(aLoRA) cannot be combined with {other}")
        if self.raw.get("bias", "none") != "none":
            raise self.error(key, "(aLoRA) requires bias = 'none'")
        if self.raw.get("task_type") in POOLING_TASKS:
            raise self.error(key, f"(aLoRA) requires task_type = {GENERATIVE_TASK}")
        return tuple(value)

    def read_block_diagonal(self) -> BlockDiagonal | None:
        value = self.raw.get("use_bdlora")
        if not value:
            return None
        fields = {"match_strict", "nblocks", "target_modules_bd_a", "target_modules_bd_b"}
        if not isinstance(value, dict) or not set(value) <= fields:
            raise self.error("use_bdlora", f"must be an object with {', '.join(sorted(fields))}")
        inner = ConfigReader(value, self.name)
        a, b = inner.read_names("target_modules_bd_a"), inner.read_names("target_modules_bd_b")
        return BlockDiagonal(a, b, inner.read_positive_int("nblocks", value.get("nblocks")))

    def read_base_model_class(self) -> str | None:
        mapping = self.raw.get("auto_mapping")
        name = mapping.get("base_model_class") if isinstance(mapping, dict) else None
        return name if isinstance(name, str) else None


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def is_disabled(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})


def _truncate(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
