"""Runs steps of models that have no paged implementation, in padded batches with transformers."""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lorax_server.config import EngineConfig
from lorax_server.errors import ConfigError
from lorax_server.generation.stopping import StoppingCriteria
from lorax_server.model_types import find_similar_types
from lorax_server.models.padded_batch import Chooser, PaddedBatch
from lorax_server.models.padded_lm import PaddedLM, prompt_logprobs
from lorax_server.models.pretrained import max_positions
from lorax_server.plan import Capabilities, NewSequence, StepMasks, StepPlan, StepResult
from lorax_server.sampling.batch import SequenceSampling
from lorax_server.types import Alternatives, StopParams
from lorax_server.worker.inputs import MaskUploader
from lorax_server.worker.memory import find_max_num_seqs

logger = logging.getLogger(__name__)

BLOCK_SIZE = 16


def build_padded_runner(config: EngineConfig) -> tuple[Capabilities, "PaddedRunner"]:
    """Load a model that has no paged implementation. Return its capabilities and runner."""
    if config.tensor_parallel > 1:
        raise ConfigError(f"{config.model.path}: this model type does not support tensor parallelism")
    if config.model.quantize is not None:
        raise ConfigError(f"{config.model.path}: this model type does not support quantize = {config.model.quantize}")
    dtype = None if config.model.dtype is None else getattr(torch, config.model.dtype)
    model = PaddedLM(str(config.model.path), dtype=dtype)
    if model.device.type != torch.device(config.model.device).type:
        raise ConfigError(
            f"{config.model.path}: this model type runs on the GPU if one is available, not on {config.model.device}"
        )
    similar = find_similar_types(str(model.config.model_type))
    logger.warning(
        "model type %s runs in padded batches, without adapters and tensor parallelism%s",
        model.config.model_type,
        f"; similar types with full support: {', '.join(similar)}" if similar else "",
    )
    max_num_seqs = find_max_num_seqs(config, model.device)
    return padded_capabilities(model, max_num_seqs, config.max_length), PaddedRunner(model)


def padded_capabilities(model: PaddedLM, max_num_seqs: int, max_length: int | None) -> Capabilities:
    """Return the capabilities of a `PaddedRunner`. It has no KV cache blocks, so `num_blocks` is never a limit."""
    longest = max_positions(model.config)
    max_length = longest if max_length is None else min(max_length, longest)
    return Capabilities(
        vocab_size=model.vocab_size,
        max_num_seqs=max_num_seqs,
        max_length=max_length,
        max_step_tokens=max_length + max_num_seqs,  # one full prompt and all running sequences
        num_blocks=max_num_seqs * -(-max_length // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        max_steps_in_flight=1,
        can_chunk=False,
        can_reuse=False,
        num_adapter_units=0,
        model_type=model.config.model_type,
        model_class=type(model.model).__name__,
        dtype=str(model.dtype),
    )


class _Request(NamedTuple):
    """A sequence in the batch, identified by its slot."""

    id: int
    prefill_logprobs: bool


class _SequenceResult(NamedTuple):
    """A step's result for one sequence."""

    token_id: int
    logprob: float
    alternatives: Alternatives | None
    prompt_logprobs: list[float] | None = None
    prompt_alternatives: list[Alternatives] | None = None


class MaskedPlan(NamedTuple):
    """A step that waits for token masks."""

    plan: StepPlan


class PaddedRunner:
    """Runs all sequences in one padded batch.

    Every step adds a column to the whole batch, so every plan must contain all running sequences. A sequence that is
    missing from a plan is removed, and its slot becomes free. The scheduler includes all running sequences if
    `max_step_tokens` is at least the number of slots and enough blocks are free, because it schedules running
    sequences before new sequences.
    """

    def __init__(self, model: PaddedLM) -> None:
        self._model = model
        self._batch: PaddedBatch | None = None
        self._mask_uploader = MaskUploader(model.device)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> StepResult | MaskedPlan:
        """Run a step synchronously and return its result. A masked step runs later, in `mask`."""
        _check_plan(plan)
        return MaskedPlan(plan) if plan.is_masked else self._run(plan, {})

    @torch.inference_mode()
    def mask(self, ticket: MaskedPlan, masks: StepMasks) -> StepResult:
        slots = ticket.plan.slots[masks.rows].tolist()
        return self._run(ticket.plan, dict(zip(slots, masks.masks, strict=True)))

    def _run(self, plan: StepPlan, masks: Mapping[int, npt.NDArray[np.int32]]) -> StepResult:
        batches = [batch for batch in (self._continue(plan), self._start(plan)) if batch is not None]
        results: dict[int, _SequenceResult] = {}
        for batch in batches:
            results.update(self._step(batch, masks))
        self._batch = PaddedBatch.concatenate(batches) if len(batches) > 1 else next(iter(batches), None)
        return _make_result(plan, results)

    def collect(self, ticket: StepResult | MaskedPlan) -> StepResult:
        assert isinstance(ticket, StepResult), "call `mask` before `collect`"
        return ticket

    def _continue(self, plan: StepPlan) -> PaddedBatch | None:
        """Return the batch without finished sequences. The order stays the same, because reordering would copy the
        cache.
        """
        new_sequences = {new.slot for new in plan.new_sequences}
        starts = zip(plan.slots.tolist(), plan.starts.tolist(), strict=True)
        running = {slot: start for slot, start in starts if slot not in new_sequences}
        batch = self._batch
        ids = [request.id for request in batch.requests] if batch is not None else []
        held = dict(zip(ids, batch.input_lengths, strict=True)) if batch is not None else {}
        for slot, start in running.items():
            assert held.get(slot) == start + 1, (
                f"slot {slot} was missing from a step: {start} tokens computed, {held.get(slot)} in the batch"
            )
        return None if batch is None else batch.filter([slot for slot in held if slot in running])

    def _start(self, plan: StepPlan) -> PaddedBatch | None:
        if not plan.new_sequences:
            return None
        with_logprobs = set(plan.slots[plan.scores_prompt].tolist())
        requests: list[Any] = [_Request(new.slot, new.slot in with_logprobs) for new in plan.new_sequences]
        return PaddedBatch.from_prompts(
            requests,
            [new.token_ids for new in plan.new_sequences],
            [
                Chooser(SequenceSampling.from_params(new.sampling, new.stop), new.prompt_length)
                for new in plan.new_sequences
            ],
            [_make_stopping_criteria(new) for new in plan.new_sequences],
            self._model.pad_token_id,
            self._model.device,
        )

    def _step(self, batch: PaddedBatch, masks: Mapping[int, npt.NDArray[np.int32]]) -> dict[int, _SequenceResult]:
        """Sample a token for each sequence, and prepare the batch for the next step. Return results keyed by slot."""
        is_first = batch.past_key_values is None
        masked = [row for row, request in enumerate(batch.requests) if request.id in masks]
        token_masks = None
        if masked:
            row_masks = [masks[batch.requests[row].id] for row in masked]
            token_masks = self._mask_uploader.upload(StepMasks(np.array(masked), row_masks), self._model.vocab_size)
        sampled, logits, caches = self._model.compute(batch, token_masks)
        alternatives = sampled.alternatives.by_row() if sampled.alternatives else {}
        results = {}
        rows = zip(batch.requests, sampled.token_ids.tolist(), sampled.logprobs.tolist(), strict=True)
        for row, (request, token_id, logprob) in enumerate(rows):
            has_prompt = is_first and request.prefill_logprobs
            prompt_scores = _score_prompt(batch, row, logits) if has_prompt else (None, None)
            results[request.id] = _SequenceResult(token_id, logprob, alternatives.get(row), *prompt_scores)
        batch.append([result.token_id for result in results.values()])
        for stop in batch.stopping_criterias:
            stop.current_tokens += 1
        self._model.advance(batch, sampled.token_ids, caches)
        return results


def _check_plan(plan: StepPlan) -> None:
    assert not plan.adapter_ops, "padded batches do not support adapters"
    assert not plan.adapter_indices.any(), "padded batches do not support adapters"
    assert plan.samples.all(), "padded batches do not support chunked prefill"
    whole = {new.slot: len(new.token_ids) for new in plan.new_sequences}
    for slot, start, count in zip(plan.slots.tolist(), plan.starts.tolist(), plan.counts.tolist(), strict=True):
        expected = (0, whole.pop(slot)) if slot in whole else (start, 1)
        assert (start, count) == expected, f"slot {slot}: expected (start, count) {expected}, got {(start, count)}"
    assert not whole, f"new slots {sorted(whole)} are missing from the step"


def _make_stopping_criteria(new: NewSequence) -> StoppingCriteria:
    """Return stopping criteria that contain only the number of remaining tokens, which determines the memory of the
    batch.

    The engine checks all other stop conditions.
    """
    num_generated = len(new.token_ids) - new.prompt_length
    return StoppingCriteria(StopParams(max_new_tokens=new.stop.max_new_tokens - num_generated))


def _score_prompt(batch: PaddedBatch, row: int, logits: torch.Tensor) -> tuple[list[float], list[Alternatives] | None]:
    """Return log probabilities and alternatives for the prompt tokens. For a resumed sequence, previously generated
    tokens are excluded.
    """
    chooser = batch.next_token_choosers[row]
    prompt_length, count = chooser.prompt_length, chooser.sequence_sampling.params.num_alternatives
    num_generated = batch.input_lengths[row] - prompt_length
    columns = logits[row, : logits.shape[1] - num_generated]
    logprobs = prompt_logprobs(columns, batch.all_input_ids[row][:prompt_length, 0])
    if not count:
        return logprobs, None
    best, ids = columns[-prompt_length:-1].float().log_softmax(-1).topk(min(count, columns.shape[-1]), dim=-1)
    return logprobs, list(map(Alternatives, ids.tolist(), best.tolist()))


def _make_result(plan: StepPlan, results: dict[int, _SequenceResult]) -> StepResult:
    ordered = [results[slot] for slot in plan.slots.tolist()]
    with_prompt = [results[slot] for slot in plan.slots[plan.scores_prompt].tolist()]
    return StepResult(
        plan.step,
        [result.token_id for result in ordered],
        [result.logprob for result in ordered],
        {i: result.alternatives for i, result in enumerate(ordered) if result.alternatives is not None},
        [result.prompt_logprobs or [] for result in with_prompt],
        {i: r.prompt_alternatives for i, r in enumerate(with_prompt) if r.prompt_alternatives is not None},
    )
