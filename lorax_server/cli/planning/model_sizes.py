"""The sizes of a model, from its config.json, and the bytes that follow from them, without weights and torch."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lorax_server.errors import ConfigError
from lorax_server.files.names import MODEL_CONFIG_FILE
from lorax_server.files.strict_json import parse_json

MAX_CONFIG_BYTES = 2**20
MAX_COUNT = 2**32  # of anything in a config
UNIT_BYTES = 256  # a tensor of an adapter begins at a multiple of this
HALF_BYTES = 2  # of a number in half precision


class MatrixSize(NamedTuple):
    """A linear of a layer, by the name that adapters use."""

    name: str
    outputs: int
    inputs: int


@dataclass(frozen=True)
class ModelSizes:
    """Counts of a model. All numbers are in half precision."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_length: int
    matrices: tuple[MatrixSize, ...]  # of one layer
    head: int  # numbers of the matrix that gives the scores
    others: int  # numbers that a step does not read, or hardly: embeddings, norms, biases

    @property
    def read_bytes(self) -> int:
        """The bytes of weights that every step reads."""
        layer = sum(matrix.outputs * matrix.inputs for matrix in self.matrices)
        return HALF_BYTES * (self.layers * layer + self.head)

    @property
    def weight_bytes(self) -> int:
        return self.read_bytes + HALF_BYTES * self.others

    def token_bytes(self, is_float8: bool = False) -> int:
        """Return the bytes of the keys and values of a token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * (1 if is_float8 else HALF_BYTES)

    def adapter_bytes(self, rank: int, modules: Collection[str], has_magnitudes: bool = False) -> int:
        """Return the bytes of an adapter on the device: at each module A, B, and DoRA's factor."""
        chosen = [matrix for matrix in self.matrices if matrix.name in modules]
        tensors = [rank * size for matrix in chosen for size in (matrix.inputs, matrix.outputs)]
        tensors += [matrix.outputs for matrix in chosen if has_magnitudes]
        return self.layers * sum(-(-HALF_BYTES * numbers // UNIT_BYTES) * UNIT_BYTES for numbers in tensors)

    def prompt_flop(self, length: int) -> float:
        """Return the floating-point operations for a token of a prompt of some length."""
        linear = 2 * self.layers * sum(matrix.outputs * matrix.inputs for matrix in self.matrices)
        return linear + 4 * self.layers * self.heads * self.head_dim * length / 2


def read_sizes(path: Path) -> ModelSizes:
    """Read a model's sizes from its folder or its config.json."""
    file = path / MODEL_CONFIG_FILE if path.is_dir() else path
    try:
        if not file.is_file():
            raise ConfigError(
                f"--model {str(path)!r} is no model's folder and no config.json; `lorax download-weights` fetches a "
                "model of the hub and prints its folder"
            )
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"--model {str(file)!r} has more than {MAX_CONFIG_BYTES} bytes: it is no config.json")
        config = parse_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {str(file)!r} cannot be read: {error}") from error
    try:
        return sizes_of(config)
    except ConfigError as error:
        raise ConfigError(f"--model {str(file)!r}: {error}") from error


def sizes_of(config: Mapping[str, Any]) -> ModelSizes:
    """Return the sizes that a config describes."""
    if config.get("quantization_config"):
        raise ConfigError("config field quantization_config is not supported: the checkpoint must not be quantized")
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(
            f"config field model_type = {str(model_type)[:100]!r} is not supported; known are "
            f"{', '.join(sorted(FAMILIES))}. Give the shape of another model by --layers, --hidden-size and so on"
        )
    return FAMILIES[model_type](config)


def _count(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if value is None:
        raise ConfigError(f"config field {name} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MAX_COUNT:
        raise ConfigError(f"config field {name} = {str(value)[:40]} is not a positive number")
    return value


def _flag(config: Mapping[str, Any], name: str, default: bool) -> bool:
    value = config.get(name)
    return default if value is None else bool(value)


def _head_dim(config: Mapping[str, Any], hidden: int, heads: int, default: int | None = None) -> int:
    if config.get("head_dim") is None and default is None and hidden % heads:
        raise ConfigError(f"config field hidden_size = {hidden} cannot be divided among {heads} heads")
    return _count(config, "head_dim", default or hidden // heads)


# --- Families ---------------------------------------------------------------------------------------------------------


def _llama(config: Mapping[str, Any]) -> ModelSizes:
    model_type = config["model_type"]
    hidden, between, layers, heads = (
        _count(config, name)
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    )
    kv_heads = _count(config, "num_key_value_heads", heads if model_type == "llama" else None)
    head_dim = _head_dim(config, hidden, heads, 128 if model_type == "qwen3" else None)
    queries, keys = heads * head_dim, kv_heads * head_dim
    matrices = (
        MatrixSize("q_proj", queries, hidden),
        MatrixSize("k_proj", keys, hidden),
        MatrixSize("v_proj", keys, hidden),
        MatrixSize("o_proj", hidden, queries),
        MatrixSize("gate_proj", between, hidden),
        MatrixSize("up_proj", between, hidden),
        MatrixSize("down_proj", hidden, between),
    )
    is_biased = model_type in ("llama", "qwen3") and _flag(config, "attention_bias", False)
    biases = queries + 2 * keys + hidden if is_biased else queries + 2 * keys if model_type == "qwen2" else 0
    biases += 2 * between + hidden if model_type == "llama" and _flag(config, "mlp_bias", False) else 0
    norms = 2 * hidden + (2 * head_dim if model_type == "qwen3" else 0)
    table = _count(config, "vocab_size") * hidden
    embedding = 0 if _flag(config, "tie_word_embeddings", False) else table
    length = _count(config, "max_position_embeddings")
    others = embedding + layers * (norms + biases) + hidden
    return ModelSizes(layers, heads, kv_heads, head_dim, length, matrices, table, others)


def _gpt2(config: Mapping[str, Any]) -> ModelSizes:
    hidden, layers, heads, length = (_count(config, name) for name in ("n_embd", "n_layer", "n_head", "n_positions"))
    inner = _count(config, "n_inner", 4 * hidden)
    matrices = (
        MatrixSize("c_attn", 3 * hidden, hidden),
        MatrixSize("c_proj", hidden, hidden),
        MatrixSize("c_fc", inner, hidden),
        MatrixSize("c_proj", hidden, inner),
    )
    table = _count(config, "vocab_size") * hidden
    embedding = 0 if _flag(config, "tie_word_embeddings", True) else table
    biases = sum(matrix.outputs for matrix in matrices)
    others = embedding + length * hidden + layers * (biases + 4 * hidden) + 2 * hidden
    return ModelSizes(layers, heads, heads, _head_dim({}, hidden, heads), length, matrices, table, others)


def _gpt_neox(config: Mapping[str, Any]) -> ModelSizes:
    hidden, between, layers, heads = (
        _count(config, name)
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    )
    matrices = (
        MatrixSize("query_key_value", 3 * hidden, hidden),
        MatrixSize("dense", hidden, hidden),
        MatrixSize("dense_h_to_4h", between, hidden),
        MatrixSize("dense_4h_to_h", hidden, between),
    )
    table = _count(config, "vocab_size") * hidden
    embedding = 0 if _flag(config, "tie_word_embeddings", False) else table
    biases = between + hidden + (4 * hidden if _flag(config, "attention_bias", True) else 0)
    others = embedding + layers * (biases + 4 * hidden) + 2 * hidden
    length = _count(config, "max_position_embeddings")
    return ModelSizes(layers, heads, heads, _head_dim({}, hidden, heads), length, matrices, table, others)


def _opt(config: Mapping[str, Any]) -> ModelSizes:
    hidden, between, layers, heads = (
        _count(config, name) for name in ("hidden_size", "ffn_dim", "num_hidden_layers", "num_attention_heads")
    )
    outer, length = _count(config, "word_embed_proj_dim", hidden), _count(config, "max_position_embeddings")
    names = ("q_proj", "k_proj", "v_proj", "out_proj")
    matrices = (
        *(MatrixSize(name, hidden, hidden) for name in names),
        MatrixSize("fc1", between, hidden),
        MatrixSize("fc2", hidden, between),
    )
    table = _count(config, "vocab_size") * outer
    embedding = 0 if _flag(config, "tie_word_embeddings", True) else table
    biases = sum(matrix.outputs for matrix in matrices) if _flag(config, "enable_bias", True) else 0
    norm = 2 * hidden if _flag(config, "layer_norm_elementwise_affine", True) else 0
    has_last_norm = _flag(config, "do_layer_norm_before", True) and not config.get("_remove_final_layer_norm")
    others = embedding + (length + 2) * hidden + layers * (biases + 2 * norm) + (norm if has_last_norm else 0)
    others += 2 * outer * hidden if outer != hidden else 0
    return ModelSizes(layers, heads, heads, _head_dim({}, hidden, heads), length, matrices, table, others)


FAMILIES: Mapping[str, Callable[[Mapping[str, Any]], ModelSizes]] = {
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "llama": _llama,
    "mistral": _llama,
    "opt": _opt,
    "qwen2": _llama,
    "qwen3": _llama,
}
