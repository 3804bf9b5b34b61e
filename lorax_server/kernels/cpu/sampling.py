"""Sampling of the native kernels: the likeliest tokens, and log probabilities.

Logits are `[rows, vocabulary]` of any dtype. `choose_greedy` and `find_logprobs` sum in the same order, so a token has
the same log probability by either, bit for bit.
"""

import torch

from lorax_server.kernels.cpu.library import DTYPES, Library


class CpuSampling:
    """The sampling ops."""

    _library: Library

    def choose_greedy(
        self,
        logits: torch.Tensor,
        words: torch.Tensor | None = None,
        numbers: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose as the op table says. A row with a NaN chooses the first NaN, and its log probability is NaN."""
        logits = _lay_out(logits)
        rows, vocabulary = logits.shape
        words, numbers = _lay_out_masks(logits, words, numbers)
        token_ids = torch.empty(rows, dtype=torch.int64)
        logprobs = torch.empty(rows, dtype=torch.float32)
        self._library.choose_greedy(
            *(DTYPES[logits.dtype], logits.data_ptr(), logits.stride(0), rows, vocabulary, *_point_to(words, numbers)),
            *(token_ids.data_ptr(), logprobs.data_ptr()),
        )
        return token_ids, logprobs

    def find_logprobs(
        self,
        logits: torch.Tensor,
        token_ids: torch.Tensor,
        temperatures: torch.Tensor | None = None,
        words: torch.Tensor | None = None,
        numbers: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return [rows, count] float32 the log probabilities of `[rows, count]` tokens, each in its row.

        They are those of the logits divided by `temperatures`, [rows] float32, where there are some. A token beyond the
        vocabulary has NaN. With masks, which are those of `choose_greedy`, the tokens must be among the allowed ones.
        """
        logits, token_ids = _lay_out(logits), token_ids.contiguous()
        rows, count = token_ids.shape
        if token_ids.dtype != torch.int64 or rows != len(logits):
            raise ValueError(f"the tokens of {len(logits)} rows must be int64, not {token_ids.dtype} of {rows} rows")
        if temperatures is not None:
            if temperatures.shape != (rows,) or temperatures.dtype != torch.float32:
                raise ValueError(f"each of {rows} rows needs a temperature, float32")
            temperatures = temperatures.contiguous()
        words, numbers = _lay_out_masks(logits, words, numbers)
        logprobs = torch.empty(rows, count, dtype=torch.float32)
        self._library.find_logprobs(
            *(DTYPES[logits.dtype], logits.data_ptr(), logits.stride(0), *logits.shape),
            *(None if temperatures is None else temperatures.data_ptr(), *_point_to(words, numbers)),
            *(token_ids.data_ptr(), count, logprobs.data_ptr()),
        )
        return logprobs

    def find_best(
        self,
        logits: torch.Tensor,
        count: int,
        words: torch.Tensor | None = None,
        numbers: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [rows, count] the best scores of each row, float32, the best first, and their tokens, as `topk` does.

        Of equals those of lower id are better; a NaN is better than all numbers. With masks, which are those of
        `choose_greedy`, only allowed tokens are found; where they are fewer, token 0 follows, with -infinity.
        """
        logits = _lay_out(logits)
        rows, vocabulary = logits.shape
        words, numbers = _lay_out_masks(logits, words, numbers)
        if not 0 < count <= vocabulary:
            raise ValueError(f"there are no {count} best of {vocabulary} tokens")
        best = torch.empty(rows, count, dtype=torch.float32)
        token_ids = torch.empty(rows, count, dtype=torch.int64)
        self._library.find_best(
            *(DTYPES[logits.dtype], logits.data_ptr(), logits.stride(0), rows, vocabulary, count),
            *(*_point_to(words, numbers), best.data_ptr(), token_ids.data_ptr()),
        )
        return best, token_ids


def _lay_out(logits: torch.Tensor) -> torch.Tensor:
    if logits.shape[-1] == 0:
        raise ValueError("there is no token to choose")
    return logits if logits.stride(-1) == 1 else logits.contiguous()


def _lay_out_masks(
    logits: torch.Tensor, words: torch.Tensor | None, numbers: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return masks as the kernels read them; raise where these would read beyond them."""
    if words is None or numbers is None:
        return None, None
    rows, vocabulary = logits.shape
    if words.dtype != torch.int32 or numbers.dtype != torch.int64 or numbers.shape != (rows,):
        raise ValueError(f"masks of {rows} rows are int32, and their numbers int64")
    if words.shape[1] * 32 < vocabulary or int(numbers.max()) >= len(words):
        raise ValueError(f"{len(words)} masks of {words.shape[1]} words are too few for {vocabulary} tokens")
    return words.contiguous(), numbers.contiguous()


def _point_to(words: torch.Tensor | None, numbers: torch.Tensor | None) -> tuple[int | None, int, int | None]:
    if words is None or numbers is None:
        return None, 0, None
    return words.data_ptr(), words.shape[1], numbers.data_ptr()
