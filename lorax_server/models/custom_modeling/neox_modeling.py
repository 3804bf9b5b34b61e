"""Re-exports of GPT-NeoX names that the seed contract requires (`docs/seed-contract.md`).

The server uses `flash_neox_modeling`.
"""

from lorax_server.layers.rotary import RotaryEmbedding as RotaryEmbedding
from lorax_server.models.contract.neox import GPTNeoXAttention as GPTNeoXAttention
from lorax_server.models.contract.neox import GPTNeoxForCausalLM as GPTNeoxForCausalLM
from lorax_server.models.contract.neox import GPTNeoXLayer as GPTNeoXLayer
from lorax_server.models.contract.neox import GPTNeoXMLP as GPTNeoXMLP
from lorax_server.models.contract.neox import GPTNeoXModel as GPTNeoXModel
from lorax_server.models.contract.neox import GPTNeoXPreTrainedModel as GPTNeoXPreTrainedModel
