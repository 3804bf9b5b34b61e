"""Facts about a model that the engine has to know, and that no setting changes."""

import sys

from lorax_server.adapters.host import UNIT_BYTES
from lorax_server.adapters.target import TargetKind
from lorax_server.layers.rotary import DynamicRotaryEmbedding, LongRotaryEmbedding, RotaryEmbedding
from lorax_server.layers.targets import collect_adapter_targets
from lorax_server.models.custom_modeling.paged import PagedCausalLM
from lorax_server.models.registry import DEFAULT_MAX_POSITIONS
from lorax_server.plan import Capabilities, RopeRule


def describe(model: PagedCausalLM) -> Capabilities:
    """Describe what does not depend on settings; sizes are left open."""
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
    )


def find_max_length(model: PagedCausalLM) -> int:
    """Return the length the model was made for; rotary scaling by length extends it."""
    fields = ("max_position_embeddings", "max_seq_len", "seq_length")
    length = next((limit for field in fields if (limit := getattr(model.config, field, None))), DEFAULT_MAX_POSITIONS)
    stretch = max((m.factor for m in model.modules() if isinstance(m, DynamicRotaryEmbedding)), default=1.0)
    return int(length * stretch)


def fix_rotary(model: PagedCausalLM, max_length: int) -> None:
    """Let the tables of angles keep their places, which graphs know, for sequences of up to so many tokens."""
    for module in model.modules():
        if isinstance(module, RotaryEmbedding):
            module.reserve(max_length)


def find_rotary_room(model: PagedCausalLM) -> int:
    """Return the tokens of the longest sequence that all tables of angles have room for."""
    return min((len(m.cos) for m in model.modules() if isinstance(m, RotaryEmbedding)), default=sys.maxsize)


def _rope_rule(model: PagedCausalLM) -> RopeRule:
    for module in model.modules():
        if isinstance(module, DynamicRotaryEmbedding):
            return RopeRule(module.max_positions, by_length=True)
        if isinstance(module, LongRotaryEmbedding):
            return RopeRule(module.original)
    return RopeRule()
