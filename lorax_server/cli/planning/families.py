"""The sizes of every architecture that is served with adapters, from its config.json, without weights and torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from lorax_server.cli.planning.model_sizes import MatrixSize, ModelSizes
from lorax_server.errors import ConfigError
from lorax_server.files.names import MODEL_CONFIG_FILE
from lorax_server.files.strict_json import parse_json

MAX_CONFIG_BYTES = 2**20
MAX_COUNT = 2**32  # of anything in a config
MANY_POSITIONS = 2**17  # of a model that has no limit, as the server counts them

Config = Mapping[str, Any]


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


def sizes_of(config: Config) -> ModelSizes:
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


def _count(config: Config, name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if value is None:
        raise ConfigError(f"config field {name} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MAX_COUNT:
        raise ConfigError(f"config field {name} = {str(value)[:40]} is not a positive number")
    return value


def _flag(config: Config, name: str, default: bool) -> bool:
    value = config.get(name)
    return default if value is None else bool(value)


def _divide(hidden: int, heads: int) -> int:
    if hidden % heads:
        raise ConfigError(f"config field hidden_size = {hidden} cannot be divided among {heads} heads")
    return hidden // heads


class Dims(NamedTuple):
    """The counts that all decoders have."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    length: int
    vocab: int


class Fields(NamedTuple):
    """The config's fields of the counts; of several the first that is there."""

    hidden: tuple[str, ...] = ("hidden_size",)
    inner: str | None = "intermediate_size"  # None, or not there: four times the hidden size
    layers: tuple[str, ...] = ("num_hidden_layers",)
    heads: tuple[str, ...] = ("num_attention_heads",)
    length: str = "max_position_embeddings"  # empty: no limit
    default_length: int | None = None  # None: the config must say it
    head_dim: str = "head_dim"  # empty: always the hidden size over the heads


class BiasedParts(NamedTuple):
    """The matrices of a layer that have a bias."""

    qkv: bool = False
    output: bool = False
    mlp: bool = False


@dataclass(frozen=True)
class Family:
    """An architecture's matrices by their names, and its other numbers."""

    fields: Fields = Fields()  # noqa: RUF009 - nothing writes to it
    qkv: str | None = None  # one matrix for queries, keys and values
    output: str = "o_proj"
    mlp: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    head_dim: int | None = None  # where the config has none; None: the hidden size over the heads
    kv_heads: Callable[[Config, int], int] = lambda config, _: _count(config, "num_key_value_heads")
    biases: Callable[[Config], BiasedParts] = lambda _: BiasedParts()
    norms: Callable[[Config], int] = lambda _: 2  # of a layer
    norm_vectors: int = 1  # 2: a norm has a bias
    head_norms: Callable[[Config, Dims], int] = lambda _, __: 0  # numbers, of a layer
    is_tied: bool = False  # where the config does not say
    has_head_bias: bool = False
    more: Callable[[Dims], int] = lambda _: 0  # numbers of learned positions and the like

    def count(self, config: Config) -> ModelSizes:
        """Return the sizes that a config of this family describes."""
        dims, biases = self._read_dims(config), self.biases(config)
        qkv, output, mlp = self._list_matrices(dims)
        biased = [*qkv] * biases.qkv + [output] * biases.output + [*mlp] * biases.mlp
        layer = sum(matrix.outputs for matrix in biased)
        layer += self.norms(config) * self.norm_vectors * dims.hidden + self.head_norms(config, dims)
        table = dims.vocab * dims.hidden
        others = 0 if _flag(config, "tie_word_embeddings", self.is_tied) else table
        others += dims.layers * layer + self.norm_vectors * dims.hidden + self.more(dims)
        others += dims.vocab if self.has_head_bias else 0
        counts = dims.layers, dims.heads, dims.kv_heads, dims.head_dim, dims.length
        return ModelSizes(*counts, (*qkv, output, *mlp), table, others)

    def _read_dims(self, config: Config) -> Dims:
        fields = self.fields
        hidden, layers, heads = (_first(config, names) for names in (fields.hidden, fields.layers, fields.heads))
        needs_inner = fields.inner == "intermediate_size"
        inner = _count(config, fields.inner, None if needs_inner else 4 * hidden) if fields.inner else 4 * hidden
        length = _count(config, fields.length, fields.default_length) if fields.length else MANY_POSITIONS
        vocab = _count(config, "vocab_size")
        kv_heads, head_dim = self.kv_heads(config, heads), self._find_head_dim(config, hidden, heads)
        return Dims(hidden, inner, layers, heads, kv_heads, head_dim, length, vocab)

    def _find_head_dim(self, config: Config, hidden: int, heads: int) -> int:
        field = self.fields.head_dim
        if field and (config.get(field) is not None or self.head_dim is not None):
            return _count(config, field, self.head_dim)
        return _divide(hidden, heads)

    def _list_matrices(self, dims: Dims) -> tuple[list[MatrixSize], MatrixSize, list[MatrixSize]]:
        """Return the matrices of a layer: onto queries, keys and values, back from heads, and the feed-forward's."""
        hidden, inner = dims.hidden, dims.inner
        queries, keys = dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
        widths = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        if self.qkv is not None:
            widths = {self.qkv: queries + 2 * keys}
        qkv = [MatrixSize(name, width, hidden) for name, width in widths.items()]
        *up, down = self.mlp
        mlp = [MatrixSize(name, 2 * inner if name == "gate_up_proj" else inner, hidden) for name in up]
        return qkv, MatrixSize(self.output, hidden, queries), [*mlp, MatrixSize(down, hidden, inner)]


def _first(config: Config, names: tuple[str, ...]) -> int:
    return _count(config, next((name for name in names if config.get(name) is not None), names[0]))


# --- The families -----------------------------------------------------------------------------------------------------

ALL = BiasedParts(qkv=True, output=True, mlp=True)
GPT = Fields(("n_embd",), "n_inner", ("n_layer",), ("n_head",), "n_positions", head_dim="")
BLOOM = Fields(
    *(("hidden_size", "n_embed"), None, ("n_layer", "num_hidden_layers"), ("n_head", "num_attention_heads"), ""),
    head_dim="",
)
MPT = Fields(("d_model",), None, ("n_layers",), ("n_heads",), "max_seq_len", head_dim="")
FALCON = Fields(inner="ffn_hidden_size", default_length=2048, head_dim="")  # configs of the hub have no length
NEOX = Fields(head_dim="")


def _all_heads(_: Config, heads: int) -> int:
    return heads


def _heads_or_fewer(config: Config, heads: int) -> int:
    """Return the number of key and value heads of a family whose default is the number of heads. Other families have
    a fixed number as default, which is not known here: there the config must say it."""
    return _count(config, "num_key_value_heads", heads)


def _attention_biases(config: Config) -> BiasedParts:
    has_bias = _flag(config, "attention_bias", False)
    return BiasedParts(has_bias, has_bias)


def _llama_biases(config: Config) -> BiasedParts:
    return _attention_biases(config)._replace(mlp=_flag(config, "mlp_bias", False))


def _one_for_all(field: str, default: bool) -> Callable[[Config], BiasedParts]:
    return lambda config: BiasedParts(*[_flag(config, field, default)] * 3)


def _both_head_norms(_: Config, dims: Dims) -> int:
    return 2 * dims.head_dim


def _norms_of_each_head(field: str | None) -> Callable[[Config, Dims], int]:
    """Count norms with a weight for each dimension of each head, if the config's field asks for them."""
    return lambda config, dims: (
        (dims.heads + dims.kv_heads) * dims.head_dim if field is None or _flag(config, field, False) else 0
    )


def _falcon_kv_heads(config: Config, heads: int) -> int:
    if config.get("alibi"):
        raise ConfigError("config field alibi = true is not supported: such models are served without adapters")
    is_new = _flag(config, "new_decoder_architecture", False)
    return 1 if _flag(config, "multi_query", True) and not is_new else _count(config, "num_kv_heads", heads)


def _falcon_norms(config: Config) -> int:
    if _flag(config, "new_decoder_architecture", False):
        return _count(config, "num_ln_in_parallel_attn", 2)
    return 1 if _flag(config, "parallel_attn", True) else 2


def _gpt_neox_biases(config: Config) -> BiasedParts:
    has_bias = _flag(config, "attention_bias", True)
    return BiasedParts(has_bias, has_bias, mlp=True)


def _opt(config: Config) -> ModelSizes:
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
    return ModelSizes(layers, heads, heads, _divide(hidden, heads), length, matrices, table, others)


TO_4H = ("dense_h_to_4h", "dense_4h_to_h")
GEMMA = Family(biases=_attention_biases, head_dim=256, is_tied=True)
COHERE = Family(kv_heads=_heads_or_fewer, biases=_attention_biases, norms=lambda _: 1, is_tied=True)
GLM = Family(
    mlp=("gate_up_proj", "down_proj"), head_dim=128,
    biases=lambda config: BiasedParts(qkv=_flag(config, "attention_bias", True)),
)  # fmt: skip
FAMILIES: Mapping[str, Callable[[Config], ModelSizes]] = {
    "arcee": Family(mlp=("up_proj", "down_proj"), kv_heads=_heads_or_fewer, biases=_llama_biases).count,
    "bloom": Family(
        BLOOM, "query_key_value", "dense", TO_4H, None, _all_heads, lambda _: ALL, norm_vectors=2, is_tied=True,
        more=lambda dims: 2 * dims.hidden,
    ).count,
    "cohere": replace(COHERE, head_norms=_norms_of_each_head("use_qk_norm")).count,
    "cohere2": COHERE.count,
    "exaone4": Family(head_norms=_both_head_norms).count,
    "falcon": Family(
        FALCON, "query_key_value", "dense", TO_4H, None, _falcon_kv_heads, _one_for_all("bias", False), _falcon_norms,
        norm_vectors=2, is_tied=True,
    ).count,
    "gemma": GEMMA.count,
    "gemma2": replace(GEMMA, norms=lambda _: 4).count,
    "gemma3_text": replace(GEMMA, norms=lambda _: 4, head_norms=_both_head_norms).count,
    "glm": GLM.count,
    "glm4": replace(GLM, norms=lambda _: 4).count,
    "gpt2": Family(
        GPT, "c_attn", "c_proj", ("c_fc", "c_proj"), None, _all_heads, lambda _: ALL, norm_vectors=2, is_tied=True,
        more=lambda dims: dims.length * dims.hidden,
    ).count,
    "gpt_bigcode": Family(
        GPT, "c_attn", "c_proj", ("c_fc", "c_proj"), None,
        lambda config, heads: 1 if _flag(config, "multi_query", True) else heads,
        lambda _: ALL, norm_vectors=2, is_tied=True, more=lambda dims: dims.length * dims.hidden,
    ).count,
    "gpt_neox": Family(
        NEOX, "query_key_value", "dense", TO_4H, None, _all_heads, _gpt_neox_biases, norm_vectors=2
    ).count,
    "gptj": Family(
        GPT, None, "out_proj", ("fc_in", "fc_out"), None, _all_heads, lambda _: BiasedParts(mlp=True), lambda _: 1,
        norm_vectors=2, has_head_bias=True,
    ).count,
    "granite": Family(kv_heads=_heads_or_fewer, biases=_llama_biases).count,
    "llama": Family(kv_heads=_heads_or_fewer, biases=_llama_biases).count,
    "mistral": Family().count,
    "mpt": Family(MPT, "Wqkv", "out_proj", ("up_proj", "down_proj"), None, _all_heads, is_tied=True).count,
    "nemotron": Family(
        mlp=("up_proj", "down_proj"), kv_heads=_heads_or_fewer, biases=_llama_biases, norm_vectors=2
    ).count,
    "olmo2": Family(
        kv_heads=_heads_or_fewer, biases=_attention_biases, head_norms=_norms_of_each_head(None)
    ).count,
    "opt": _opt,
    "phi": Family(
        output="dense", mlp=("fc1", "fc2"), kv_heads=_heads_or_fewer, biases=lambda _: ALL, norms=lambda _: 1,
        norm_vectors=2, has_head_bias=True,
        head_norms=lambda config, dims: 4 * dims.head_dim if _flag(config, "qk_layernorm", False) else 0,
    ).count,
    "phi3": Family(qkv="qkv_proj", kv_heads=_heads_or_fewer, mlp=("gate_up_proj", "down_proj")).count,
    "qwen2": Family(biases=lambda _: BiasedParts(qkv=True)).count,
    "qwen3": Family(biases=_attention_biases, head_dim=128, head_norms=_both_head_norms).count,
    "smollm3": Family(biases=_llama_biases, is_tied=True).count,
    "stablelm": Family(
        biases=lambda config: BiasedParts(qkv=_flag(config, "use_qkv_bias", False)),
        norms=lambda config: 1 if _flag(config, "use_parallel_residual", False) else 2,
        norm_vectors=2, head_norms=_norms_of_each_head("qk_layernorm"),
    ).count,
    "starcoder2": Family(
        mlp=("c_fc", "c_proj"), biases=_one_for_all("use_bias", True), norm_vectors=2, is_tied=True
    ).count,
}  # fmt: skip
