"""The operations of sampling that look at whole vocabularies, which a CPU or a GPU may have kernels for.

The functions here are the specification of a CPU's. They take [rows, vocabulary] logits of any dtype.
"""

from typing import NamedTuple, Protocol, runtime_checkable

import torch

from lorax_server.kernels import Ops
from lorax_server.kernels.cpu.ops import CpuOps
from lorax_server.kernels.hopper.sampling import ChosenRows, RowBatch, RowInputs
from lorax_server.sampling.batch import TokenMasks
from lorax_server.sampling.processors import find_likeliest, log_softmax


class ChooseGreedy(Protocol):
    """Returns [rows] the likeliest token, the first of equals, and [rows] float32 its log probability.

    Of [masks, words] int32 a row has that of its number, [rows] int64, and chooses as if all tokens whose bits are not
    set had -infinity; a negative number is of none. The others have the same masks.
    """

    def __call__(
        self, logits: torch.Tensor, words: torch.Tensor | None = None, numbers: torch.Tensor | None = None, /
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class FindLogprobs(Protocol):
    """Returns [rows, count] float32 the log probabilities of [rows, count] tokens that masks allow, by scores that are
    divided by [rows] temperatures, if there are any."""

    def __call__(
        self,
        logits: torch.Tensor,
        token_ids: torch.Tensor,
        temperatures: torch.Tensor | None = None,
        words: torch.Tensor | None = None,
        numbers: torch.Tensor | None = None,
        /,
    ) -> torch.Tensor: ...


class FindBest(Protocol):
    """Returns [rows, count] float32 the best scores, the best first and a NaN above all, and their tokens: any tokens
    with -infinity where a mask allows fewer."""

    def __call__(
        self,
        logits: torch.Tensor,
        count: int,
        words: torch.Tensor | None = None,
        numbers: torch.Tensor | None = None,
        /,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class ChooseRows(Protocol):
    """Chooses all rows of a batch on a GPU, by all parameters."""

    def __call__(self, batch: RowBatch, inputs: RowInputs, /) -> ChosenRows: ...


@runtime_checkable
class RowOps(Protocol):
    """The ops of a GPU that has such a kernel."""

    choose_rows: ChooseRows


class ScoreOps(NamedTuple):
    """One set of these operations."""

    choose_greedy: ChooseGreedy
    find_logprobs: FindLogprobs
    find_best: FindBest
    choose_rows: ChooseRows | None = None  # where a GPU has it, it takes the place of all others


def _mask(logits: torch.Tensor, words: torch.Tensor | None, numbers: torch.Tensor | None) -> torch.Tensor:
    scores = logits.detach().float()
    if words is None or numbers is None:
        return scores
    rows = torch.nonzero(numbers >= 0).flatten()
    return TokenMasks(rows, words[numbers[rows]]).apply(scores)


def choose_greedy(
    logits: torch.Tensor, words: torch.Tensor | None = None, numbers: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _mask(logits, words, numbers)
    token_ids = find_likeliest(scores)
    return token_ids, log_softmax(scores).gather(-1, token_ids[:, None]).squeeze(-1)


def find_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    temperatures: torch.Tensor | None = None,
    words: torch.Tensor | None = None,
    numbers: torch.Tensor | None = None,
) -> torch.Tensor:
    scores = _mask(logits, words, numbers)
    if temperatures is not None:
        scores = scores / temperatures[:, None]
    return log_softmax(scores).gather(-1, token_ids)


def find_best(
    logits: torch.Tensor, count: int, words: torch.Tensor | None = None, numbers: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    best, token_ids = _mask(logits, words, numbers).topk(count, dim=-1)
    return best, token_ids


REFERENCE = ScoreOps(choose_greedy, find_logprobs, find_best)


def select_score_ops(ops: Ops) -> ScoreOps:
    """Return the fastest set that goes with the ops of a model."""
    if isinstance(ops, CpuOps):
        return ScoreOps(ops.choose_greedy, ops.find_logprobs, ops.find_best)
    if isinstance(ops, RowOps):
        return REFERENCE._replace(choose_rows=ops.choose_rows)
    return REFERENCE
