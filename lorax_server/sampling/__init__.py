"""Choose the next token, of one sequence or of many with different parameters, by the same functions."""

from lorax_server.sampling.sampler import Sampled, Sampler

__all__ = ["Sampled", "Sampler"]
