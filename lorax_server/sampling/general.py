"""Choose the next token of many sequences by all parameters that there are, on any device."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from lorax_server.kernels.reference import find_likeliest, log_softmax
from lorax_server.sampling.batch import COLDEST, History, Sampled, SequenceSampling, TokenMasks, TopTokens
from lorax_server.sampling.processors import (
    NEVER,
    count_tokens,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    keep_typical,
    order_scores,
    penalize_counts,
    penalize_repetition,
    scale,
)
from lorax_server.sampling.uniform import as_signed, uniforms
from lorax_server.sampling.upload import Upload
from lorax_server.sampling.watermark import favour_green, hash_tokens
from lorax_server.types import SamplingParams

_MOST_COLUMNS = 24  # a sampler has fewer columns of rows and of values
_Entries = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # rows, token ids and values


class _RowGroup(NamedTuple):
    """The rows that set one parameter, and its value in each of them."""

    rows: torch.Tensor
    is_all: bool
    values: tuple[Any, ...]

    def apply(self, scores: torch.Tensor, function: Callable[..., torch.Tensor], *more: Any) -> None:
        """Change these rows of the scores by `function`."""
        if self.is_all:
            function(scores, *more, *self.values)
        else:
            scores[self.rows] = function(scores[self.rows], *more, *self.values)


class GeneralSampler:
    """Made for a batch, used until the batch changes.

    Masks come first. Then the order is LoRAX's: watermark, repetition, frequency and presence, bias, forbidden tokens;
    then, for rows that are sampled, temperature, top-k, top-p, min-p, typical-p.
    """

    def __init__(
        self, sequence_sampling: Sequence[SequenceSampling], vocab_size: int, device: torch.device | str = "cpu"
    ) -> None:
        self._device = torch.device(device)
        self._vocab_size = vocab_size
        params = [sampling.params for sampling in sequence_sampling]
        self._upload = Upload(_count_numbers(sequence_sampling), self._device)
        self._watermark = self._group([p.watermark for p in params])
        if self._watermark is not None:
            self._watermark = self._watermark._replace(values=(hash_tokens(vocab_size, self._device),))
        self._repetition = self._group(
            [p.repetition_penalty != 1 for p in params], [p.repetition_penalty for p in params]
        )
        self._counts = self._group(
            [p.frequency_penalty != 0 or p.presence_penalty != 0 for p in params],
            [p.frequency_penalty for p in params],
            [p.presence_penalty for p in params],
        )
        self._bias = self._list_biases(sequence_sampling)
        self._forbidden = self._list_forbidden(sequence_sampling)
        self._sampled = self._group([not p.is_greedy for p in params])
        sampled = [p for p in params if not p.is_greedy]
        self._seeds = self._tensor([as_signed(p.seed) for p in sampled], torch.int64)
        self._warpers = self._list_warpers(sampled)
        self._raw = self._group([p.raw_logprobs for p in params])
        self._asking = self._group([p.num_alternatives > 0 for p in params])
        self._num_alternatives = {row: p.num_alternatives for row, p in enumerate(params) if p.num_alternatives}
        self._upload.send()

    @property
    def needs_tokens(self) -> bool:
        """True if any parameter depends on the tokens of the sequences."""
        return any(group is not None for group in (self._watermark, self._repetition, self._counts))

    @torch.inference_mode()
    def __call__(self, logits: torch.Tensor, history: History | None, masks: TokenMasks | None = None) -> Sampled:
        """Choose from [rows, vocabulary] logits, which stay as they are. Greedy rows without more need no history."""
        raw = logits.float()
        scores = self._penalized(raw, history, masks)
        token_ids = find_likeliest(scores)
        if self._sampled is not None:
            rows = self._sampled.rows
            warped = scores[rows]
            for function, group in self._warpers:
                group.apply(warped, function)
            assert history is not None, "these rows need to know how long they are"
            generated = (history.lengths - history.prompt_lengths)[rows]
            token_ids[rows] = draw(warped, uniforms(self._seeds, generated))
            scores = warped if self._sampled.is_all else scores.index_copy(0, rows, warped)
        if self._raw is not None and scores is not raw:
            scores = scores.index_copy(0, self._raw.rows, raw[self._raw.rows])
        all_logprobs = log_softmax(scores)
        logprobs = all_logprobs.gather(-1, token_ids[:, None]).squeeze(-1)
        return Sampled(token_ids, logprobs, self._find_alternatives(scores, all_logprobs))

    def _penalized(self, raw: torch.Tensor, history: History | None, masks: TokenMasks | None) -> torch.Tensor:
        """Apply masks and the parameters that count for greedy rows too; return `raw` itself where there are none."""
        if masks is None and not self.needs_tokens and self._bias is None and self._forbidden is None:
            return raw
        scores = raw.clone()
        if masks is not None:
            scores[masks.rows] = scores[masks.rows].masked_fill(~masks.allowed(self._vocab_size), NEVER)
        if self.needs_tokens:
            assert history is not None, "these rows need the tokens so far"
            self._apply_history(scores, history)
        if self._bias is not None:
            rows, ids, biases = self._bias
            scores.index_put_((rows, ids), biases, accumulate=True)
        if self._forbidden is not None:
            assert history is not None, "these rows need to know how long they are"
            rows, ids, until = self._forbidden
            early = (history.lengths - history.prompt_lengths)[rows] < until
            scores[rows, ids] = scores[rows, ids].masked_fill(early, NEVER)
        return scores

    def _apply_history(self, scores: torch.Tensor, history: History) -> None:
        tokens, lengths = history.token_ids, history.lengths
        assert tokens is not None, "these rows need the tokens so far"
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        if self._watermark is not None:
            rows = self._watermark.rows
            previous = tokens[rows].gather(-1, lengths[rows, None] - 1).squeeze(-1)
            self._watermark.apply(scores, favour_green, previous)
        if self._repetition is not None:
            rows = self._repetition.rows
            seen = count_tokens(tokens[rows], positions < lengths[rows, None], self._vocab_size) > 0
            self._repetition.apply(scores, penalize_repetition, seen)
        if self._counts is not None:
            rows = self._counts.rows
            generated = (positions < lengths[rows, None]) & (positions >= history.prompt_lengths[rows, None])
            self._counts.apply(scores, penalize_counts, count_tokens(tokens[rows], generated, self._vocab_size))

    def _find_alternatives(self, scores: torch.Tensor, logprobs: torch.Tensor) -> TopTokens | None:
        if self._asking is None:
            return None
        most = min(max(self._num_alternatives.values()), self._vocab_size)
        best = order_scores(scores[self._asking.rows]).topk(most, dim=-1).indices
        return TopTokens(self._num_alternatives, best, logprobs[self._asking.rows].gather(-1, best))

    # --- The rows that set each parameter -----------------------------------------------------------------------------

    def _tensor(self, values: Sequence[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self._upload.add(values, dtype)

    def _group(
        self, asks: Sequence[bool], *values: Sequence[float], dtype: torch.dtype = torch.float32
    ) -> _RowGroup | None:
        rows = [row for row, is_set in enumerate(asks) if is_set]
        if not rows:
            return None
        columns = tuple(self._tensor([column[row] for row in rows], dtype) for column in values)
        return _RowGroup(self._tensor(rows, torch.int64), len(rows) == len(asks), columns)

    def _list_biases(self, sequence_sampling: Sequence[SequenceSampling]) -> _Entries | None:
        entries = [
            (row, token_id, bias)
            for row, sampling in enumerate(sequence_sampling)
            for token_id, bias in sampling.list_biases(self._vocab_size)
        ]
        return self._entries(entries, torch.float32)

    def _list_forbidden(self, sequence_sampling: Sequence[SequenceSampling]) -> _Entries | None:
        """List the tokens that may not be chosen yet, each with the number of tokens to generate before."""
        entries = [
            (row, token_id, sampling.min_new_tokens)
            for row, sampling in enumerate(sequence_sampling)
            if sampling.min_new_tokens > 0
            for token_id in sorted(sampling.ending_token_ids)
            if token_id < self._vocab_size
        ]
        return self._entries(entries, torch.int64)

    def _entries(self, entries: Sequence[tuple[int, int, float]], dtype: torch.dtype) -> _Entries | None:
        if not entries:
            return None
        rows, token_ids, values = zip(*entries, strict=True)
        return self._tensor(rows, torch.int64), self._tensor(token_ids, torch.int64), self._tensor(values, dtype)

    def _list_warpers(self, sampled: Sequence[SamplingParams]) -> list[tuple[Callable[..., torch.Tensor], _RowGroup]]:
        """List functions in the order in which they are applied. Rows are counted among the sampled ones."""
        temperatures = [max(p.temperature, COLDEST) for p in sampled]
        counts = [min(p.top_k, self._vocab_size) for p in sampled]
        top_k = self._group([count > 0 for count in counts], counts, dtype=torch.int64)
        if top_k is not None:
            top_k = top_k._replace(values=(*top_k.values, max(counts)))
        warpers: list[tuple[Callable[..., torch.Tensor], _RowGroup | None]] = [
            (scale, self._group([t != 1 for t in temperatures], temperatures)),
            (keep_top_k, top_k),
            (keep_top_p, self._group([p.top_p < 1 for p in sampled], [1 - p.top_p for p in sampled])),
            (keep_min_p, self._group([p.min_p > 0 for p in sampled], [p.min_p for p in sampled])),
            (keep_typical, self._group([p.typical_p < 1 for p in sampled], [p.typical_p for p in sampled])),
        ]
        return [(function, group) for function, group in warpers if group is not None]


def _count_numbers(sequence_sampling: Sequence[SequenceSampling]) -> int:
    """Count the numbers that a sampler takes to the device, or some more."""
    entries = sum(len(sampling.params.logit_bias) + len(sampling.ending_token_ids) for sampling in sequence_sampling)
    return _MOST_COLUMNS * len(sequence_sampling) + 3 * (entries + 2)
