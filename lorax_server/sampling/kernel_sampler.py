"""Sample tokens on GPUs with one kernel that handles all sampling parameters."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lorax_server.kernels.ops import SampleTokens
from lorax_server.kernels.sampling import (
    MAX_ALTERNATIVES,
    MAX_VOCAB,
    RAW,
    ROW_PARAMS_DTYPE,
    SAMPLED,
    WATERMARK,
    SamplingBatch,
    SamplingInputs,
)
from lorax_server.sampling.batch import MIN_TEMPERATURE, History, SamplerOutput, SequenceSampling, TokenMasks, TopTokens
from lorax_server.sampling.upload import BatchedUpload

_UNSET, _MAX_INT32 = -1.0, 2**31 - 1


class _PackedParams(NamedTuple):
    """A sequence's sampling parameters in the kernel's format. Fields that depend on the batch are not set."""

    packed_record: bytes  # one `ROW_PARAMS_DTYPE` element
    depends_on_batch: bool  # True if some fields depend on the batch
    needs_tokens: bool


def _pack_params(sampling: SequenceSampling) -> _PackedParams:
    params, row = sampling.params, np.zeros((), ROW_PARAMS_DTYPE)
    row["temperature"], row["rest"], row["typical_p"] = 1, _UNSET, _UNSET
    row["changed"] = row["listed"] = -1
    row["flags"] = RAW * params.raw_logprobs + WATERMARK * params.watermark
    if not params.is_greedy:
        row["flags"] += SAMPLED
        row["seed"] = params.seed
        row["temperature"] = max(params.temperature, MIN_TEMPERATURE)
        row["rest"] = 1 - params.top_p if params.top_p < 1 else _UNSET
        row["typical_p"] = params.typical_p if params.typical_p < 1 else _UNSET
        row["top_k"], row["min_p"] = min(params.top_k, _MAX_INT32), params.min_p
    row["num_alternatives"], row["min_new"] = (
        min(params.num_alternatives, _MAX_INT32),
        min(sampling.min_new_tokens, _MAX_INT32),
    )
    row["repetition"] = params.repetition_penalty
    row["frequency"], row["presence"] = params.frequency_penalty, params.presence_penalty
    depends_on_batch = sampling.modifies_logits or params.num_alternatives > 0
    return _PackedParams(row.tobytes(), depends_on_batch, params.watermark or sampling.has_penalties)


def can_sample(sequence_sampling: Sequence[SequenceSampling], vocab_size: int) -> bool:
    """Return True if the vocabulary size and the number of alternatives are within the kernel's limits."""
    max_alternatives = max((sampling.params.num_alternatives for sampling in sequence_sampling), default=0)
    return vocab_size <= MAX_VOCAB and min(max_alternatives, vocab_size) <= MAX_ALTERNATIVES


class KernelSampler:
    """Samples one batch composition with a GPU kernel. `GeneralSampler` is the reference implementation."""

    def __init__(
        self,
        sequence_sampling: Sequence[SequenceSampling],
        vocab_size: int,
        device: torch.device | str,
        sample_tokens: SampleTokens,
    ) -> None:
        self._sample_tokens = sample_tokens
        packed = [sampling.cached("packed", _pack_params, sampling) for sampling in sequence_sampling]
        table = np.frombuffer(bytearray().join([each.packed_record for each in packed]), ROW_PARAMS_DTYPE)
        np.minimum(table["top_k"], vocab_size, out=table["top_k"])
        np.minimum(table["num_alternatives"], vocab_size, out=table["num_alternatives"])
        self._num_alternatives: dict[int, int] = {}
        self._entries: list[tuple[int, float]] = []  # (token ID, value) of biases and forbidden tokens
        num_changed = 0
        for number in (number for number, each in enumerate(packed) if each.depends_on_batch):
            sampling, row = sequence_sampling[number], table[number]
            self._add_row_entries(row, sampling, vocab_size)
            if sampling.modifies_logits:
                row["changed"], num_changed = num_changed, num_changed + 1
            if row["num_alternatives"]:
                row["listed"] = len(self._num_alternatives)
            if sampling.params.num_alternatives:
                self._num_alternatives[number] = sampling.params.num_alternatives
        max_alternatives = min(max(self._num_alternatives.values(), default=0), vocab_size)
        self._batch = self._upload_batch(table, len(self._num_alternatives), max_alternatives, torch.device(device))
        self.needs_tokens = any(each.needs_tokens for each in packed)

    def __call__(self, logits: torch.Tensor, history: History | None, masks: TokenMasks | None = None) -> SamplerOutput:
        """Sample a token for each row of `logits`, `[rows, vocabulary]`, without modifying `logits`.

        `history` may be None if all rows are greedy and use no penalties, watermark or `min_new_tokens`.
        """
        inputs = SamplingInputs(logits)
        if history is not None:
            lengths, prompt_lengths = history.lengths.long(), history.prompt_lengths.long()
            tokens = history.token_ids.long() if self.needs_tokens and history.token_ids is not None else None
            inputs = inputs._replace(lengths=lengths, prompt_lengths=prompt_lengths, tokens=tokens)
        if masks is not None:
            inputs = inputs._replace(mask_rows=masks.rows, token_masks=masks.masks)
        chosen = self._sample_tokens(self._batch, inputs)
        if not self._num_alternatives:
            return SamplerOutput(chosen.token_ids, chosen.logprobs, None)
        alternatives = TopTokens(self._num_alternatives, chosen.listed_ids, chosen.listed_logprobs)
        return SamplerOutput(chosen.token_ids, chosen.logprobs, alternatives)

    def _add_row_entries(self, row: Any, sampling: SequenceSampling, vocab_size: int) -> None:
        """Add the biases and forbidden tokens of a row to the entry list."""
        row["biases"], row["biases_end"] = self._add_entries(sampling.list_biases(vocab_size))
        forbidden = [(token, 0.0) for token in sampling.all_stop_token_ids if token < vocab_size]
        row["forbidden"], row["forbidden_end"] = self._add_entries(forbidden if sampling.min_new_tokens > 0 else [])

    def _add_entries(self, entries: Sequence[tuple[int, float]]) -> tuple[int, int]:
        start = len(self._entries)
        self._entries += entries
        return start, len(self._entries)

    def _upload_batch(
        self, table: npt.NDArray[Any], num_listed_rows: int, max_alternatives: int, device: torch.device
    ) -> SamplingBatch:
        upload = BatchedUpload(table.nbytes // 8 + len(table) + 2 * len(self._entries) + 4, device)
        batch = SamplingBatch(
            upload.add(table.view(np.int64), torch.int64),
            upload.add(np.flatnonzero(table["changed"] >= 0), torch.int32),
            upload.add([token for token, _ in self._entries], torch.int32),
            upload.add([value for _, value in self._entries], torch.float32),
            num_listed_rows,
            max_alternatives,
        )
        upload.send()
        return batch
