"""Models that return a result for each sequence instead of text: an embedding, class logits, token logits or
a score.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from lorax_server.adapters.batch import AdapterArena, AdapterBatchData, AdapterBatchMetadata
from lorax_server.errors import ConfigError, WeightsError
from lorax_server.files.names import MODEL_CONFIG_FILE
from lorax_server.layers.activation import get_activation
from lorax_server.layers.attention import SequenceContext
from lorax_server.layers.classifier import ClassifierLinear
from lorax_server.layers.norm import LayerNorm
from lorax_server.models.custom_modeling.encoder import ClassifierHeads, HeadLayer
from lorax_server.models.custom_modeling.flash_llama_modeling import (
    FlashLlamaForCausalLM,
    FlashLlamaLayer,
    FlashLlamaModel,
)
from lorax_server.models.custom_modeling.paged import load_head
from lorax_server.pooling import CLASSIFY, EMBED, SCORE, TOKEN_CLASSIFY, PoolingConfig
from lorax_server.weights import Weights
from lorax_server.weights.checkpoint import open_tensors

SCORE_TOKENS = ("no", "yes")  # Qwen3-Reranker judges a document with one of these words


class SequenceBatch(NamedTuple):
    """The sequences of a step, in the order of their tokens."""

    token_ids: torch.Tensor
    lengths: Sequence[int]
    adapters: Sequence[int]  # adapter of each sequence
    arena: AdapterArena | None


class PooledModel(nn.Module):
    """An encoder or decoder with a pooling layer or classification head. It has no KV cache."""

    weight_format = ""  # formats of quantized matrices, such as Q4_K

    def __init__(
        self,
        model_class: type[Any],
        config: Any,
        weights: Weights,
        pooling: PoolingConfig,
        score_ids: Sequence[int] = (),
    ) -> None:
        """Load the model. For `score`, `score_ids` are the token IDs of `SCORE_TOKENS`."""
        super().__init__()
        self.config, self.ops, self.device, self.dtype = config, weights.ops, weights.device, weights.dtype
        self.pooling = pooling
        is_decoder = issubclass(model_class, FlashLlamaForCausalLM)
        arch = model_class.describe(config)
        layer_class, body_class = arch.layer_class or FlashLlamaLayer, arch.model_class or FlashLlamaModel
        self.model = body_class(arch.names.model, config, weights, partial(layer_class, arch=arch), arch)
        self.max_tokens: int | None = None if is_decoder else model_class.max_tokens(config)
        heads = _describe_decoder_heads(config) if is_decoder else model_class.describe_heads(config)
        size = config.hidden_size
        self.head: nn.Module
        if pooling.task == EMBED:
            self.head = EmbeddingHead(pooling, size, weights)
            pooler = heads.sequence[0]
            if pooler.name.endswith("pooler.dense") and weights.has(f"{pooler.name}.weight"):
                self.unused = _load_layers([pooler], size, weights)  # PEFT may adapt it
        elif pooling.task == SCORE:
            lm_head = load_head(weights, config, "", self.model.embed_tokens, bias=arch.head_bias)
            lm_head.logit_transform = arch.logit_transform
            self.head = ScoreHead(lm_head, score_ids)
        elif pooling.task == CLASSIFY:
            padding_id = config.pad_token_id if is_decoder else None
            self.head = SequenceHead(heads, size, config, weights, padding_id)
        else:
            assert pooling.task == TOKEN_CLASSIFY
            self.head = TokenHead(_load_layers(heads.token, size, weights, config))

    @torch.inference_mode()
    def forward(
        self, token_ids: torch.Tensor, ctx: SequenceContext, adapters: Sequence[int], arena: AdapterArena | None
    ) -> list[torch.Tensor]:
        """Return a float32 result for each sequence."""
        hidden = self.model.run_layers(self.model.embed(token_ids, ctx), ctx)
        results: list[torch.Tensor] = self.head(hidden, SequenceBatch(token_ids, ctx.lengths, adapters, arena))
        return results


def _describe_decoder_heads(config: Any) -> ClassifierHeads:
    token_bias = bool(getattr(config, "token_classification_bias", True))
    token = HeadLayer("score", is_final=True, bias=token_bias)
    return ClassifierHeads((HeadLayer("score", is_final=True, bias=False),), (token,), "lasttoken")


# --- Heads ------------------------------------------------------------------------------------------------------------


class _Layer(nn.Module):
    def __init__(self, layer: HeadLayer, size: int, weights: Weights, config: Any) -> None:
        super().__init__()
        self.linear = ClassifierLinear(weights, layer.name, size, None if layer.is_final else size, bias=layer.bias)
        name = layer.activation
        self.ops = weights.ops
        self.activation = None if name is None else get_activation(name, "classifier_activation")
        self.norm = None
        if layer.norm is not None:
            eps, bias = config.norm_eps, config.norm_bias
            self.norm = LayerNorm(layer.norm, weights, size, eps, is_adaptable=False, bias=bias)

    def forward(self, x: torch.Tensor, adapter: int, arena: AdapterArena | None) -> torch.Tensor:
        x = self.linear(x, adapter, arena)
        x = x if self.activation is None else self.ops.activate(x, self.activation)
        return x if self.norm is None else self.norm(x)


def _load_layers(layers: Sequence[HeadLayer], size: int, weights: Weights, config: Any = None) -> nn.ModuleList:
    return nn.ModuleList(_Layer(layer, size, weights, config) for layer in layers)


class SequenceHead(nn.Module):
    """A classification head for sequences. Returns logits."""

    def __init__(
        self, heads: ClassifierHeads, size: int, config: Any, weights: Weights, padding_id: int | None
    ) -> None:
        super().__init__()
        self.layers = _load_layers(heads.sequence, size, weights, config)
        self.pooling, self.padding_id = heads.pooling, padding_id

    def forward(self, hidden: torch.Tensor, batch: SequenceBatch) -> list[torch.Tensor]:
        results = []
        if self.pooling == "lasttoken":
            parts = zip(hidden.split(batch.lengths), batch.token_ids.split(batch.lengths), strict=True)
            pooled = [states[self._find_token(ids), None] for states, ids in parts]
        else:
            pooled = list(pool(hidden, batch.lengths, self.pooling).split(1))
        for vector, adapter in zip(pooled, batch.adapters, strict=True):
            x = vector
            for layer in self.layers:
                x = layer(x, adapter, batch.arena)
            results.append(x[0].float())
        return results

    def _find_token(self, ids: torch.Tensor) -> Any:
        """Return the last token that is not a padding token, as transformers does."""
        if self.padding_id is None:
            return -1
        return ((ids != self.padding_id) * torch.arange(len(ids), device=ids.device)).argmax()


class TokenHead(nn.Module):
    """A classification head for tokens. Returns logits `[tokens, labels]`."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, hidden: torch.Tensor, batch: SequenceBatch) -> list[torch.Tensor]:
        results = []
        for states, adapter in zip(hidden.split(batch.lengths), batch.adapters, strict=True):
            x = states
            for layer in self.layers:
                x = layer(x, adapter, batch.arena)
            results.append(x.float())
        return results


class ScoreHead(nn.Module):
    """Compares the logits of two words at the last token. Returns the logit of the second word minus the first."""

    def __init__(self, lm_head: nn.Module, score_ids: Sequence[int]) -> None:
        super().__init__()
        self.lm_head, self.score_ids = lm_head, list(score_ids)

    def forward(self, hidden: torch.Tensor, batch: SequenceBatch) -> list[torch.Tensor]:
        last = torch.stack([states[-1] for states in hidden.split(batch.lengths)])
        data = None
        if batch.arena is not None and any(batch.adapters):
            indices = torch.tensor(batch.adapters, device=hidden.device)
            data = AdapterBatchData(AdapterBatchMetadata.from_indices(indices), batch.arena)
        negative, positive = self.lm_head(last, data)[0][:, self.score_ids].float().unbind(1)
        return list((positive - negative)[:, None])


class EmbeddingHead(nn.Module):
    """Pooling, linear layers and normalization, like the modules in sentence-transformers."""

    def __init__(self, pooling: PoolingConfig, size: int, weights: Weights) -> None:
        super().__init__()
        self.pooling = pooling
        self.dense = [_load_dense(folder, weights) for folder in pooling.dense]
        self.size = self.dense[-1].weight.shape[0] if self.dense else size * len(pooling.modes)

    def forward(self, hidden: torch.Tensor, batch: SequenceBatch) -> list[torch.Tensor]:
        results = torch.cat([pool(hidden, batch.lengths, mode) for mode in self.pooling.modes], dim=1).float()
        for layer in self.dense:  # one row at a time, so that results do not depend on the batch
            results = torch.cat([layer(row) for row in results.split(1)])
        return list(F.normalize(results, dim=-1) if self.pooling.normalizes else results)


def pool(hidden: torch.Tensor, lengths: Sequence[int], mode: str) -> torch.Tensor:
    """Reduce the hidden states of sequences, `[tokens, size]`, to one vector per sequence. Sums are computed in
    float32.
    """
    counts = torch.tensor(lengths).to(hidden.device)
    ends = counts.cumsum(0)
    if mode == "cls":
        return hidden[ends - counts]
    if mode == "lasttoken":
        return hidden[ends - 1]
    states = hidden.float()
    if mode in ("max", "mean"):
        pooled = _reduce_segments(states, counts, mode)
    elif mode == "mean_sqrt_len_tokens":
        pooled = _reduce_segments(states, counts, "sum") / counts.sqrt()[:, None]
    elif mode == "weightedmean":
        places = torch.arange(1, len(hidden) + 1, device=hidden.device)
        factors = (places - (ends - counts).repeat_interleave(counts, output_size=len(hidden))).float()
        pooled = _reduce_segments(factors[:, None] * states, counts, "sum")
        pooled /= (counts * (counts + 1) / 2)[:, None]
    else:
        raise ConfigError(f"pooling mode {mode!r} is not supported")
    return pooled.to(hidden.dtype)


def _reduce_segments(states: torch.Tensor, counts: torch.Tensor, reduction: str) -> torch.Tensor:
    return torch.segment_reduce(states, reduction, lengths=counts, axis=0, unsafe=True)  # the lengths are valid


class _Dense(NamedTuple):
    weight: torch.Tensor
    bias: torch.Tensor | None
    activation: Callable[[torch.Tensor], torch.Tensor] | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = F.linear(x, self.weight, self.bias)
        return x if self.activation is None else self.activation(x)


DENSE_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor] | None] = {
    "Identity": None,
    "Tanh": torch.tanh,
    "ReLU": F.relu,
    "GELU": F.gelu,
    "SiLU": F.silu,
    "Sigmoid": torch.sigmoid,
}


def _load_dense(folder: Path, weights: Weights) -> _Dense:
    """Load a sentence-transformers Dense module, in float32."""
    path = folder / "model.safetensors"
    if not path.is_file():
        raise WeightsError(f"{path}: the file is missing; save the model in safetensors format")
    config = json.loads((folder / MODEL_CONFIG_FILE).read_text()) if (folder / MODEL_CONFIG_FILE).is_file() else {}
    name = str(config.get("activation_function") or "torch.nn.modules.activation.Tanh").rpartition(".")[2]
    if name not in DENSE_ACTIVATIONS or config.get("use_residual"):
        raise ConfigError(
            f"{folder / MODEL_CONFIG_FILE}: activation_function {name[:100]!r} or use_residual is not supported"
        )
    tensors = open_tensors(dict.fromkeys(("linear.weight", *(("linear.bias",) * bool(config.get("bias", True)))), path))
    loaded = {key: stored[()].to(weights.device, torch.float32, copy=True) for key, stored in tensors.items()}
    return _Dense(loaded["linear.weight"], loaded.get("linear.bias"), DENSE_ACTIVATIONS[name])


def load_pooled_model(
    model_class: type[Any],
    config: Any,
    weights: Weights,
    pooling: PoolingConfig,
    find_token: Callable[[str], int | None],
) -> PooledModel:
    """Load a model for pooling. `find_token` returns the ID of a token, which `score` needs."""
    ids = [find_token(word) for word in SCORE_TOKENS] if pooling.task == SCORE else []
    if None in ids:
        raise ConfigError(f"task = {SCORE} needs a tokenizer with the tokens {' and '.join(SCORE_TOKENS)}")
    with torch.no_grad():
        model = PooledModel(model_class, config, weights, pooling, [each for each in ids if each is not None])
    return model.eval()
