"""Sample the next token of each sequence in a batch, with separate parameters per sequence."""

from lorax_server.sampling.sampler import Sampler, SamplerOutput

__all__ = ["Sampler", "SamplerOutput"]
