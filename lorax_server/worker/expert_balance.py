"""Measures how evenly a model's routers distribute tokens over experts."""

from collections.abc import Sequence

import torch

from lorax_server.layers.moe import ExpertCounter

MIN_TOKENS_PER_EXPERT = 256  # on average; with fewer tokens, random differences would dominate the result


class ExpertBalance:
    """Computes the expert imbalance of a model from the counters of its layers."""

    def __init__(self, counters: Sequence[ExpertCounter]) -> None:
        """`counters` has one counter for each layer with experts, at least one."""
        self._counters = counters
        num_experts = len(counters[0].counts)
        self._window = num_experts * MIN_TOKENS_PER_EXPERT
        self._start_window()

    def measure(self) -> float | None:
        """Return the largest number of tokens of any expert, divided by the mean, averaged over the layers.

        The result covers the tokens since the last result. Return None if there are too few tokens.
        """
        if self._counters[0].num_choices - self._num_choices < self._window:
            return None
        counts = (self._read_counts() - self._counts).double()
        self._start_window()
        return float((counts.amax(1) / counts.mean(1)).mean())

    def _start_window(self) -> None:
        self._counts, self._num_choices = self._read_counts(), self._counters[0].num_choices

    def _read_counts(self) -> torch.Tensor:
        return torch.stack([counter.counts for counter in self._counters]).cpu()
