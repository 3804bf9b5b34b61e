"""The OPT names of the seed contract (`docs/seed-contract.md`). Serving uses `flash_opt_modeling`."""

from lorax_server.models.contract.opt import OPTForCausalLM, OPTModel, OPTPreTrainedModel
from lorax_server.models.custom_modeling.flash_opt_modeling import (
    OPTAttention,
    OPTDecoder,
    OPTDecoderLayer,
    OPTLearnedPositionalEmbedding,
)

__all__ = [
    "OPTAttention",
    "OPTDecoder",
    "OPTDecoderLayer",
    "OPTForCausalLM",
    "OPTLearnedPositionalEmbedding",
    "OPTModel",
    "OPTPreTrainedModel",
]
