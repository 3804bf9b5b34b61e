"""Re-exports of OPT names that the seed contract requires (`docs/seed-contract.md`).

The server uses `flash_opt_modeling`.
"""

from lorax_server.models.contract.opt import OPTAttention as OPTAttention
from lorax_server.models.contract.opt import OPTForCausalLM as OPTForCausalLM
from lorax_server.models.contract.opt import OPTModel as OPTModel
from lorax_server.models.contract.opt import OPTPreTrainedModel as OPTPreTrainedModel
from lorax_server.models.custom_modeling.flash_opt_modeling import OPTDecoder as OPTDecoder
from lorax_server.models.custom_modeling.flash_opt_modeling import OPTDecoderLayer as OPTDecoderLayer
from lorax_server.models.custom_modeling.flash_opt_modeling import (
    OPTLearnedPositionalEmbedding as OPTLearnedPositionalEmbedding,
)
