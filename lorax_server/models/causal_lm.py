"""Re-exports of names that the seed contract requires (`docs/seed-contract.md`). The server uses `padded_lm`."""

from lorax_server.models.contract.causal_lm import CausalLM, CausalLMBatch

__all__ = ["CausalLM", "CausalLMBatch"]
