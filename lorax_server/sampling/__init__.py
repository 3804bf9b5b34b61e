"""Choose the next token, of one sequence or of many with different parameters, by the same functions."""

from lorax_server.sampling.next_token_chooser import NextTokenChooser
from lorax_server.sampling.sampler import Sampled, Sampler

__all__ = ["NextTokenChooser", "Sampled", "Sampler"]
