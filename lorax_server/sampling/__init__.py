"""Sample the next token of each sequence in a batch, with separate parameters per sequence."""

from lorax_server.sampling.sampler import SampledTokens, Sampler

__all__ = ["SampledTokens", "Sampler"]
