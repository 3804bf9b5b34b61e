"""Sample tokens with any combination of sampling parameters, on any device."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from lorax_server.kernels.reference import argmax_scores, log_softmax
from lorax_server.sampling.batch import MIN_TEMPERATURE, History, SamplerOutput, SequenceSampling, TokenMasks, TopTokens
from lorax_server.sampling.processors import (
    NEG_INF,
    apply_temperature,
    count_tokens,
    draw_tokens,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    keep_typical_p,
    make_sortable,
    penalize_counts,
    penalize_repetition,
)
from lorax_server.sampling.random_uniform import as_signed, draw_uniforms
from lorax_server.sampling.upload import BatchedUpload
from lorax_server.sampling.watermark import boost_green_tokens, hash_tokens
from lorax_server.types import SamplingParams

_MAX_COLUMNS = 24  # maximum number of columns that a sampler uploads
_Entries = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # rows, token IDs and values


class _MaskedRows(NamedTuple):
    """The rows that set a sampling parameter, with the parameter's values."""

    rows: torch.Tensor
    is_all: bool
    values: tuple[Any, ...]

    def apply(self, scores: torch.Tensor, function: Callable[..., torch.Tensor], *more: Any) -> None:
        """Apply `function` to these rows of the scores."""
        if self.is_all:
            function(scores, *more, *self.values)
        else:
            scores[self.rows] = function(scores[self.rows], *more, *self.values)


class GeneralSampler:
    """A sampler for one batch composition. It supports all sampling parameters.

    After token masks, the order is the same as in LoRAX: watermark, repetition penalty, frequency and presence
    penalty, logit bias, forbidden tokens, and for sampled rows temperature, top-k, top-p, min-p, typical-p.
    """

    def __init__(
        self, sequence_sampling: Sequence[SequenceSampling], vocab_size: int, device: torch.device | str = "cpu"
    ) -> None:
        self._device = torch.device(device)
        self._vocab_size = vocab_size
        params = [sampling.params for sampling in sequence_sampling]
        self._upload = BatchedUpload(_max_upload_elements(sequence_sampling), self._device)
        self._watermark = self._make_row_group([p.watermark for p in params])
        if self._watermark is not None:
            self._watermark = self._watermark._replace(values=(hash_tokens(vocab_size, self._device),))
        self._repetition = self._make_row_group(
            [p.repetition_penalty != 1 for p in params], [p.repetition_penalty for p in params]
        )
        self._counts = self._make_row_group(
            [p.frequency_penalty != 0 or p.presence_penalty != 0 for p in params],
            [p.frequency_penalty for p in params],
            [p.presence_penalty for p in params],
        )
        self._bias_entries = self._list_biases(sequence_sampling)
        self._forbidden_entries = self._list_forbidden_tokens(sequence_sampling)
        self._sampled = self._make_row_group([not p.is_greedy for p in params])
        sampled = [p for p in params if not p.is_greedy]
        self._seeds = self._to_tensor([as_signed(p.seed) for p in sampled], torch.int64)
        self._warpers = self._list_warpers(sampled)
        self._raw = self._make_row_group([p.raw_logprobs for p in params])
        self._with_alternatives = self._make_row_group([p.num_alternatives > 0 for p in params])
        self._num_alternatives = {row: p.num_alternatives for row, p in enumerate(params) if p.num_alternatives}
        self._upload.send()

    @property
    def needs_tokens(self) -> bool:
        """Return True if any sampling parameter depends on previous tokens."""
        return any(group is not None for group in (self._watermark, self._repetition, self._counts))

    @torch.inference_mode()
    def __call__(self, logits: torch.Tensor, history: History | None, masks: TokenMasks | None = None) -> SamplerOutput:
        """Sample a token for each row of `logits`, `[rows, vocabulary]`, without modifying `logits`.

        `history` may be None if all rows are greedy and use no penalties, watermark or `min_new_tokens`.
        """
        raw = logits.float()
        scores = self._apply_penalties(raw, history, masks)
        token_ids = argmax_scores(scores)
        if self._sampled is not None:
            rows = self._sampled.rows
            warped = scores[rows]
            for function, group in self._warpers:
                group.apply(warped, function)
            assert history is not None, "`history` is required for these sampling parameters"
            generated = (history.lengths - history.prompt_lengths)[rows]
            token_ids[rows] = draw_tokens(warped, draw_uniforms(self._seeds, generated))
            scores = warped if self._sampled.is_all else scores.index_copy(0, rows, warped)
        if self._raw is not None and scores is not raw:
            scores = scores.index_copy(0, self._raw.rows, raw[self._raw.rows])
        all_logprobs = log_softmax(scores)
        logprobs = all_logprobs.gather(-1, token_ids[:, None]).squeeze(-1)
        return SamplerOutput(token_ids, logprobs, self._find_alternatives(scores, all_logprobs))

    def _apply_penalties(self, raw: torch.Tensor, history: History | None, masks: TokenMasks | None) -> torch.Tensor:
        """Return the scores with masks, penalties and biases applied. Return `raw` itself if no row uses them."""
        if masks is None and not self.needs_tokens and self._bias_entries is None and self._forbidden_entries is None:
            return raw
        scores = raw.clone()
        if masks is not None:
            scores[masks.rows] = scores[masks.rows].masked_fill(~masks.allowed(self._vocab_size), NEG_INF)
        if self.needs_tokens:
            assert history is not None, "`history.token_ids` is required for these sampling parameters"
            self._apply_history(scores, history)
        if self._bias_entries is not None:
            rows, ids, biases = self._bias_entries
            scores.index_put_((rows, ids), biases, accumulate=True)
        if self._forbidden_entries is not None:
            assert history is not None, "`history` is required for these sampling parameters"
            rows, ids, until = self._forbidden_entries
            early = (history.lengths - history.prompt_lengths)[rows] < until
            scores[rows, ids] = scores[rows, ids].masked_fill(early, NEG_INF)
        return scores

    def _apply_history(self, scores: torch.Tensor, history: History) -> None:
        tokens, lengths = history.token_ids, history.lengths
        assert tokens is not None, "`history.token_ids` is required for these sampling parameters"
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        if self._watermark is not None:
            rows = self._watermark.rows
            previous = tokens[rows].gather(-1, lengths[rows, None] - 1).squeeze(-1)
            self._watermark.apply(scores, boost_green_tokens, previous)
        if self._repetition is not None:
            rows = self._repetition.rows
            seen = count_tokens(tokens[rows], positions < lengths[rows, None], self._vocab_size) > 0
            self._repetition.apply(scores, penalize_repetition, seen)
        if self._counts is not None:
            rows = self._counts.rows
            generated = (positions < lengths[rows, None]) & (positions >= history.prompt_lengths[rows, None])
            self._counts.apply(scores, penalize_counts, count_tokens(tokens[rows], generated, self._vocab_size))

    def _find_alternatives(self, scores: torch.Tensor, logprobs: torch.Tensor) -> TopTokens | None:
        if self._with_alternatives is None:
            return None
        max_alternatives = min(max(self._num_alternatives.values()), self._vocab_size)
        best = make_sortable(scores[self._with_alternatives.rows]).topk(max_alternatives, dim=-1).indices
        return TopTokens(self._num_alternatives, best, logprobs[self._with_alternatives.rows].gather(-1, best))

    # --- Parameter groups ---------------------------------------------------------------------------------------------

    def _to_tensor(self, values: Sequence[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self._upload.add(values, dtype)

    def _make_row_group(
        self, flags: Sequence[bool], *values: Sequence[float], dtype: torch.dtype = torch.float32
    ) -> _MaskedRows | None:
        rows = [row for row, is_set in enumerate(flags) if is_set]
        if not rows:
            return None
        columns = tuple(self._to_tensor([column[row] for row in rows], dtype) for column in values)
        return _MaskedRows(self._to_tensor(rows, torch.int64), len(rows) == len(flags), columns)

    def _list_biases(self, sequence_sampling: Sequence[SequenceSampling]) -> _Entries | None:
        entries = [
            (row, token_id, bias)
            for row, sampling in enumerate(sequence_sampling)
            for token_id, bias in sampling.list_biases(self._vocab_size)
        ]
        return self._make_entries(entries, torch.float32)

    def _list_forbidden_tokens(self, sequence_sampling: Sequence[SequenceSampling]) -> _Entries | None:
        """Return the stop tokens, each with the number of tokens that must be generated before it is allowed."""
        entries = [
            (row, token_id, sampling.min_new_tokens)
            for row, sampling in enumerate(sequence_sampling)
            if sampling.min_new_tokens > 0
            for token_id in sorted(sampling.all_stop_token_ids)
            if token_id < self._vocab_size
        ]
        return self._make_entries(entries, torch.int64)

    def _make_entries(self, entries: Sequence[tuple[int, int, float]], dtype: torch.dtype) -> _Entries | None:
        if not entries:
            return None
        rows, token_ids, values = zip(*entries, strict=True)
        return (
            self._to_tensor(rows, torch.int64),
            self._to_tensor(token_ids, torch.int64),
            self._to_tensor(values, dtype),
        )

    def _list_warpers(self, sampled: Sequence[SamplingParams]) -> list[tuple[Callable[..., torch.Tensor], _MaskedRows]]:
        """Return the logits warpers in application order. Row indices count only sampled rows, not greedy rows."""
        temperatures = [max(p.temperature, MIN_TEMPERATURE) for p in sampled]
        counts = [min(p.top_k, self._vocab_size) for p in sampled]
        top_k = self._make_row_group([count > 0 for count in counts], counts, dtype=torch.int64)
        if top_k is not None:
            top_k = top_k._replace(values=(*top_k.values, max(counts)))
        warpers: list[tuple[Callable[..., torch.Tensor], _MaskedRows | None]] = [
            (apply_temperature, self._make_row_group([t != 1 for t in temperatures], temperatures)),
            (keep_top_k, top_k),
            (keep_top_p, self._make_row_group([p.top_p < 1 for p in sampled], [1 - p.top_p for p in sampled])),
            (keep_min_p, self._make_row_group([p.min_p > 0 for p in sampled], [p.min_p for p in sampled])),
            (keep_typical_p, self._make_row_group([p.typical_p < 1 for p in sampled], [p.typical_p for p in sampled])),
        ]
        return [(function, group) for function, group in warpers if group is not None]


def _max_upload_elements(sequence_sampling: Sequence[SequenceSampling]) -> int:
    """Return an upper bound for the number of elements that a sampler uploads."""
    entries = sum(len(sampling.params.logit_bias) + len(sampling.all_stop_token_ids) for sampling in sequence_sampling)
    return _MAX_COLUMNS * len(sequence_sampling) + 3 * (entries + 2)
