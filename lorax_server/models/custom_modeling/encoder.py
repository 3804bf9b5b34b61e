"""Building blocks of encoders: bidirectional attention, layers with norms after the residual sums, and embeddings."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from lorax_server.errors import ConfigError
from lorax_server.kernels import CosSin
from lorax_server.layers.attention import PagedContext, SequenceContext
from lorax_server.layers.norm import LayerNorm
from lorax_server.models.custom_modeling.architecture import Architecture, ModuleNames
from lorax_server.models.custom_modeling.flash_llama_modeling import (
    FlashLlamaAttention,
    FlashLlamaLayer,
    FlashLlamaModel,
)
from lorax_server.weights import Weights


class HeadLayer(NamedTuple):
    """A linear layer in a classification head."""

    name: str
    activation: str | None = None
    norm: str | None = None  # layer norm after the activation
    is_final: bool = False  # has one output per label
    bias: bool = True


class ClassifierHeads(NamedTuple):
    """The layers of the heads for sequence and token classification, and the function that reduces a sequence to one
    vector.
    """

    sequence: tuple[HeadLayer, ...]
    token: tuple[HeadLayer, ...]
    pooling: str = "cls"


CLASSIFIER = HeadLayer("classifier", is_final=True)


class EncoderAttention(FlashLlamaAttention):
    """Attention in which each token attends to all tokens of its sequence."""

    def __init__(self, prefix: str, config: Any, weights: Weights, layer_id: int, arch: Architecture) -> None:
        super().__init__(prefix, config, weights, layer_id, arch)
        self.spec = replace(self.spec, is_causal=False)


class EncoderLayer(FlashLlamaLayer):
    """A layer that applies norms after the residual additions of attention and MLP."""

    def load_norms(self, names: ModuleNames, load: Callable[[str], nn.Module]) -> None:
        assert names.added_norms is not None
        self.attention_norm, self.mlp_norm = map(load, names.added_norms)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rope: CosSin | None, ctx: PagedContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = self.attention_norm(self.self_attn(x, rope, ctx), x, ctx.adapter_data)[0]
        return self.mlp_norm(self.mlp(x, ctx), x, ctx.adapter_data)[0], residual


class EncoderModel(FlashLlamaModel):
    """An encoder whose embeddings are sums of token, token type and position embeddings, with a norm."""

    has_token_types = True
    has_positions = True

    def __init__(self, prefix: str, config: Any, weights: Weights, *args: Any) -> None:
        super().__init__(prefix, config, weights, *args)
        if getattr(config, "position_embedding_type", None) not in (None, "absolute"):
            raise ConfigError(
                f"config field position_embedding_type = {config.position_embedding_type!r} is not supported"
            )
        size, name = config.hidden_size, f"{prefix}.embeddings"
        self.token_types = self.positions = None
        if self.has_token_types:
            shape = (config.type_vocab_size, size)
            self.token_types = weights.get_tensor(f"{name}.token_type_embeddings.weight", shape)
        if self.has_positions:
            shape = (config.max_position_embeddings, size)
            self.positions = weights.get_tensor(f"{name}.position_embeddings.weight", shape)
        eps = getattr(config, "layer_norm_eps", 1e-12)
        self.embedding_norm = LayerNorm(f"{name}.LayerNorm", weights, size, eps)

    def embed(self, input_ids: torch.Tensor, ctx: PagedContext) -> torch.Tensor:
        assert isinstance(ctx, SequenceContext)
        x = self.embed_tokens(input_ids, ctx.adapter_data)
        if self.token_types is not None:
            x = x + self.token_types[ctx.token_types]
        if self.positions is not None:
            x = x + self.positions[self.find_positions(input_ids, ctx)]
        normed: torch.Tensor = self.embedding_norm(x, ctx.adapter_data)
        return normed

    def find_positions(self, input_ids: torch.Tensor, ctx: SequenceContext) -> torch.Tensor:  # noqa: ARG002
        """Return each token's row index in the position embedding table."""
        return ctx.position_ids


class PaddingAwareModel(EncoderModel):
    """An encoder whose positions start at `padding_id + 1` and skip padding tokens in the text."""

    def __init__(self, prefix: str, config: Any, weights: Weights, *args: Any) -> None:
        super().__init__(prefix, config, weights, *args)
        self.padding_id = self.find_padding_id(config)

    @staticmethod
    def find_padding_id(config: Any) -> int:
        return int(config.pad_token_id)

    def find_positions(self, input_ids: torch.Tensor, ctx: SequenceContext) -> torch.Tensor:
        is_text = (input_ids != self.padding_id).int()
        total = is_text.cumsum(0)
        before = (total - is_text)[ctx.first_tokens].repeat_interleave(
            ctx.input_lengths, output_size=len(input_ids)
        )  # padding tokens do not count
        return (total - before) * is_text + self.padding_id
