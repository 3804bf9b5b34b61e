"""Finds a model's task and reads its pooling settings from its folder. This needs neither torch nor the model's
weights.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lorax_server.config import ModelConfig
from lorax_server.errors import ConfigError
from lorax_server.files.names import MODEL_CONFIG_FILE, TOKENIZER_CONFIG_FILE
from lorax_server.model_types import ENCODER_CLASSES, is_paged

GENERATE, EMBED, CLASSIFY, TOKEN_CLASSIFY, SCORE = "generate", "embed", "classify", "token-classify", "score"
MODULES_FILE = "modules.json"  # lists the modules of a sentence-transformers model
PROMPTS_FILE = "config_sentence_transformers.json"  # also contains a cross-encoder's activation
TRANSFORMER_FILE = "sentence_bert_config.json"
MAX_LENGTH_LIMIT = 10**9  # transformers writes a larger `model_max_length` if a tokenizer has no limit
DEFAULT_LABELS: tuple[str, ...] = ("LABEL_0", "LABEL_1")  # transformers' default for configs without labels
# Names of `pooling_mode` in sentence-transformers, and the flags of older versions.
POOLING_MODES = ("cls", "mean", "max", "lasttoken", "mean_sqrt_len_tokens", "weightedmean")
POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True)
class PoolingConfig:
    """Settings that turn hidden states into results, for a model that does not generate text."""

    task: str
    modes: tuple[str, ...] = ()  # pooling modes for embeddings, whose results are concatenated
    dense: tuple[Path, ...] = ()  # folders with linear layers that follow the pooling
    normalizes: bool = False  # embeddings have length 1
    dimensions: int | None = None  # embeddings are truncated to this size
    prompts: Mapping[str, str] = field(default_factory=dict)  # text before each input, by prompt name
    default_prompt: str | None = None
    lower_case: bool = False
    max_tokens: int | None = None  # maximum tokens per input, if lower than the model's limit
    labels: tuple[str, ...] = ()  # of the base model's classification head
    activation: str = ""  # softmax, sigmoid or none; empty: depends on the number of labels
    score_activation: str = "sigmoid"  # sigmoid or none, for cross-encoders
    has_token_types: bool = False  # the tokens of the second text in a pair have type 1

    @property
    def can_score(self) -> bool:
        """Return True if the model scores pairs of texts."""
        return self.task in (CLASSIFY, SCORE)


def find_task(folder: Path, config: Mapping[str, Any], requested: str = "auto") -> str:
    """Return the task of a model: the requested task, or the task that its files describe."""
    model_type, classes = config.get("model_type"), config.get("architectures") or []
    if not isinstance(model_type, str):  # loading the model reports the error
        return GENERATE
    is_encoder = model_type in ENCODER_CLASSES and not config.get("is_decoder")
    if requested == GENERATE and is_encoder:
        raise ConfigError(f"task = {GENERATE} is not supported: the model is an encoder ({model_type})")
    if requested not in {"auto", GENERATE} and not (is_encoder or is_paged(config)):
        raise ConfigError(f"task = {requested} is not supported for the model type {model_type!r}")
    if requested != "auto":
        # A cross-encoder scores with its classification head.
        return CLASSIFY if requested == SCORE and (is_encoder or _has_class(classes, "Classification")) else requested
    if not is_encoder and not is_paged(config):
        return GENERATE
    if _has_class(classes, "ForTokenClassification"):
        return TOKEN_CLASSIFY
    if _has_class(classes, "ForSequenceClassification"):
        return CLASSIFY
    return EMBED if is_encoder or (folder / MODULES_FILE).is_file() else GENERATE


def read_pooling(settings: ModelConfig) -> PoolingConfig | None:
    """Return the pooling settings of a model, or None if the model generates text."""
    try:
        config = _read_object(settings.path / MODEL_CONFIG_FILE)
    except ConfigError:  # loading the model reports the error
        return None
    task = find_task(settings.path, config, settings.task)
    if task == GENERATE:
        for name in ("pooling", "embedding_dim"):
            if getattr(settings, name) is not None:
                raise ConfigError(
                    f"{name} = {getattr(settings, name)} is only for embedding models; set --task embed to use this "
                    "model's hidden states as embeddings"
                )
        return None
    if settings.quantize == "fp8-kv":
        raise ConfigError("quantize = fp8-kv is only for text generation: other tasks have no KV cache")
    if task == EMBED:
        return _read_embedding(settings, config)
    labels = config.get("id2label")
    names = DEFAULT_LABELS
    if isinstance(labels, dict) and set(labels) == {str(index) for index in range(len(labels))}:
        names = tuple(str(labels[str(index)]) for index in range(len(labels)))
    function = {"regression": "none", "multi_label_classification": "sigmoid", "single_label_classification": ""}
    return PoolingConfig(
        task,
        labels=() if task == SCORE else names,
        activation=function.get(str(config.get("problem_type")), ""),
        score_activation=_find_score_activation(settings.path, config),
        has_token_types=_has_token_types(settings.path, config),
        max_tokens=_find_max_tokens(settings.path),
    )


def _read_embedding(settings: ModelConfig, config: Mapping[str, Any]) -> PoolingConfig:
    folder, is_encoder = settings.path, config.get("model_type") in ENCODER_CLASSES
    modes: tuple[str, ...] = ("mean",) if is_encoder else ("lasttoken",)
    dense, normalizes, dimensions = list[Path](), False, settings.embedding_dim
    transformer = folder
    for module in _read_modules(folder):
        kind, path = str(module.get("type", "")).rpartition(".")[2], folder / str(module.get("path", ""))
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(
                f"{folder / MODULES_FILE}: the path {str(module.get('path'))[:100]!r} is outside the model"
            )
        if kind == "Transformer":
            transformer = path
        elif kind == "Pooling":
            modes = _read_modes(path)
        elif kind == "Dense" and not normalizes:
            dense.append(path)
        elif kind == "Normalize":
            normalizes = True
        else:
            raise ConfigError(f"{folder / MODULES_FILE}: the module type {kind[:100]!r} is not supported here")
    if dimensions is not None and (chosen := folder / f"2_Dense_{dimensions}").is_dir():  # as in LoRAX
        dense, dimensions = [chosen], None
    if transformer.resolve() != folder.resolve():
        raise ConfigError(f"{folder / MODULES_FILE}: the Transformer module must be in the model folder itself")
    texts = _read_optional(folder / PROMPTS_FILE)
    prompts = texts.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(value, str) for value in prompts.values()):
        raise ConfigError(f"{folder / PROMPTS_FILE}: prompts must be an object with texts")
    return PoolingConfig(
        EMBED,
        modes=modes if settings.pooling is None else (settings.pooling,),
        dense=tuple(dense),
        normalizes=normalizes,
        dimensions=dimensions,
        prompts=prompts,
        default_prompt=texts.get("default_prompt_name"),
        lower_case=bool(_read_optional(folder / TRANSFORMER_FILE).get("do_lower_case")),
        max_tokens=_find_max_tokens(folder),
    )


def _read_modes(folder: Path) -> tuple[str, ...]:
    path = folder / MODEL_CONFIG_FILE
    config = _read_object(path)
    if config.get("include_prompt") is False:
        raise ConfigError(f"{path}: include_prompt = false is not supported")
    stored = config.get("pooling_mode")
    modes = [stored] if isinstance(stored, str) else stored
    if modes is None:
        modes = [mode for flag, mode in POOLING_FLAGS.items() if config.get(flag)]
    if not modes or not set(modes) <= set(POOLING_MODES):
        raise ConfigError(f"{path}: pooling mode {modes} is not supported; use {', '.join(POOLING_MODES)}")
    return tuple(modes)


def _read_modules(folder: Path) -> list[dict[str, Any]]:
    path = folder / MODULES_FILE
    if not path.is_file():
        return []
    modules = _read_json(path)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ConfigError(f"{path}: must be a list of modules")
    return modules


def _find_max_tokens(folder: Path) -> int | None:
    """Return the maximum number of tokens per input, like sentence-transformers: the setting in its config, or else the
    tokenizer's limit.
    """
    stored = _read_optional(folder / TRANSFORMER_FILE).get("max_seq_length")
    if stored is None:
        stored = _read_optional(folder / TOKENIZER_CONFIG_FILE).get("model_max_length")
    is_limit = isinstance(stored, int | float) and 0 < stored < MAX_LENGTH_LIMIT
    return int(stored) if is_limit and stored is not None else None


def _find_score_activation(folder: Path, config: Mapping[str, Any]) -> str:
    """Return a cross-encoder's activation. Before version 6, sentence-transformers stored it in the model config."""
    newest, nested = _read_optional(folder / PROMPTS_FILE), config.get("sentence_transformers")
    if newest.get("default_prompt_name") is not None:
        raise ConfigError(f"{folder / PROMPTS_FILE}: default_prompt_name is not supported for classification models")
    stored = newest.get("activation_fn") or (nested.get("activation_fn") if isinstance(nested, dict) else None)
    name = str(stored or config.get("sbert_ce_default_activation_function") or "Sigmoid").rpartition(".")[2]
    if name not in ("Sigmoid", "Identity"):
        raise ConfigError(f"config field activation_fn = {name[:100]!r} is not supported; use Sigmoid or Identity")
    return "sigmoid" if name == "Sigmoid" else "none"


def _has_token_types(folder: Path, config: Mapping[str, Any]) -> bool:
    """Return True if transformers' tokenizer for this model returns `token_type_ids`."""
    tokenizer = _read_optional(folder / TOKENIZER_CONFIG_FILE)
    names, kind = tokenizer.get("model_input_names"), str(tokenizer.get("tokenizer_class") or "")
    is_bert = kind.startswith("BertTokenizer") if kind else config.get("model_type") in ("bert", "nomic_bert")
    is_listed = "token_type_ids" in names if isinstance(names, list) else is_bert
    return is_listed and config.get("type_vocab_size", 2) > 1


def _has_class(classes: object, suffix: str) -> bool:
    return isinstance(classes, list) and any(isinstance(name, str) and name.endswith(suffix) for name in classes)


def _read_optional(path: Path) -> dict[str, Any]:
    return _read_object(path) if path.is_file() else {}


def _read_object(path: Path) -> dict[str, Any]:
    value = _read_json(path)
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must be an object")
    return value


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
