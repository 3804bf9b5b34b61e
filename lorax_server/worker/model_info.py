"""Finds the model properties that the engine needs and that do not depend on the configuration."""

import sys

from lorax_server.adapters.host import UNIT_BYTES
from lorax_server.adapters.target import TargetKind
from lorax_server.layers.rotary import DynamicRotaryEmbedding, LongRotaryEmbedding, RotaryEmbedding
from lorax_server.layers.targets import collect_adapter_targets
from lorax_server.models.custom_modeling.paged import PagedCausalLM
from lorax_server.models.pooled_model import PooledModel
from lorax_server.models.registry import DEFAULT_MAX_POSITIONS
from lorax_server.plan import Capabilities, RopeRule


def describe_model(model: PagedCausalLM) -> Capabilities:
    """Return the model's capabilities. Sizes that depend on the engine configuration are 0."""
    dtype, targets = model.lm_head.linear.weight.dtype, collect_adapter_targets(model).values()
    return Capabilities(
        vocab_size=model.config.vocab_size,
        max_num_seqs=0,
        max_length=0,
        num_blocks=0,
        block_size=0,
        adapter_unit_bytes=UNIT_BYTES,
        itemsize=dtype.itemsize,
        max_inputs=max(target.inputs.full for target in targets if target.kind in (TargetKind.LINEAR, TargetKind.HEAD)),
        model_type=model.config.model_type,
        model_class=(getattr(model.config, "architectures", None) or [""])[0],
        dtype=str(dtype),
        rope=_rope_rule(model),
        num_draft_heads=0 if model.draft_heads is None else len(model.draft_heads),
    )


def find_max_length(model: PagedCausalLM | PooledModel) -> int:
    """Return the model's maximum sequence length, including dynamic RoPE scaling."""
    fields = ("max_position_embeddings", "max_seq_len", "seq_length")
    length = next((limit for field in fields if (limit := getattr(model.config, field, None))), DEFAULT_MAX_POSITIONS)
    rope_factor = max((m.factor for m in model.modules() if isinstance(m, DynamicRotaryEmbedding)), default=1.0)
    return int(length * rope_factor)


def reserve_rotary(model: PagedCausalLM | PooledModel, max_length: int) -> None:
    """Grow all RoPE tables to `max_length` positions, because graphs record the tables' addresses."""
    for module in model.modules():
        if isinstance(module, RotaryEmbedding):
            module.reserve(max_length)


def rotary_capacity(model: PagedCausalLM) -> int:
    """Return the size of the smallest RoPE table, in positions."""
    return min((len(m.cos) for m in model.modules() if isinstance(m, RotaryEmbedding)), default=sys.maxsize)


def _rope_rule(model: PagedCausalLM) -> RopeRule:
    for module in model.modules():
        if isinstance(module, DynamicRotaryEmbedding):
            return RopeRule(module.max_positions, depends_on_length=True)
        if isinstance(module, LongRotaryEmbedding):
            return RopeRule(module.original_length)
    return RopeRule()
