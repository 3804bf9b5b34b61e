"""Runs the steps of any HuggingFace model, in a padded batch that sequences join and leave."""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lorax_server.config import EngineConfig
from lorax_server.errors import ConfigError
from lorax_server.generation.stopping import StoppingCriteria
from lorax_server.models.padded_batch import Chooser, PaddedBatch
from lorax_server.models.padded_lm import PaddedLM, prompt_logprobs
from lorax_server.models.pretrained import max_positions
from lorax_server.models.registry import find_similar_types
from lorax_server.plan import Capabilities, NewSequence, StepMasks, StepPlan, StepResult
from lorax_server.sampling.batch import SequenceSampling
from lorax_server.types import Alternatives, StopParams
from lorax_server.worker.inputs import MaskLane
from lorax_server.worker.memory import find_max_num_seqs

logger = logging.getLogger(__name__)

BLOCK_SIZE = 16


def build_padded(config: EngineConfig) -> tuple[Capabilities, "PaddedRunner"]:
    """Load a model that we have no class for."""
    if config.tensor_parallel > 1:
        raise ConfigError(f"{config.model.path}: models of this type run on one device, without tensor parallelism")
    if config.model.quantize is not None:
        raise ConfigError(f"{config.model.path}: models of this type do not support quantize = {config.model.quantize}")
    dtype = None if config.model.dtype is None else getattr(torch, config.model.dtype)
    model = PaddedLM(str(config.model.path), dtype=dtype)
    if model.device.type != torch.device(config.model.device).type:
        raise ConfigError(
            f"{config.model.path}: models of this type run on a GPU where there is one, not on {config.model.device}"
        )
    relatives = find_similar_types(str(model.config.model_type))
    logger.warning(
        "model type %s is served in padded batches, without adapters and tensor parallelism%s",
        model.config.model_type,
        f"; close relatives that are served with both: {', '.join(relatives)}" if relatives else "",
    )
    max_num_seqs = find_max_num_seqs(config, model.device)
    return padded_capabilities(model, max_num_seqs, config.max_length), PaddedRunner(model)


def padded_capabilities(model: PaddedLM, max_num_seqs: int, max_length: int | None) -> Capabilities:
    """Describe a `PaddedRunner` of this model. It has no blocks; the engine is told of enough for everything."""
    longest = max_positions(model.config)
    max_length = longest if max_length is None else min(max_length, longest)
    return Capabilities(
        vocab_size=model.vocab_size,
        max_num_seqs=max_num_seqs,
        max_length=max_length,
        max_step_tokens=max_length + max_num_seqs,  # any prompt, whole, beside all that run
        num_blocks=max_num_seqs * -(-max_length // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        depth=1,
        can_chunk=False,
        can_reuse=False,
        num_adapter_units=0,
        model_type=model.config.model_type,
        model_class=type(model.model).__name__,
        dtype=str(model.dtype),
    )


class _Request(NamedTuple):
    """A sequence of a batch, identified by its slot."""

    id: int
    prefill_logprobs: bool


class _Outcome(NamedTuple):
    """The results of a step for one sequence."""

    token_id: int
    logprob: float
    alternatives: Alternatives | None
    prompt_logprobs: list[float] | None = None
    prompt_alternatives: list[Alternatives] | None = None


class MaskedPlan(NamedTuple):
    """A step that waits for masks."""

    plan: StepPlan


class PaddedRunner:
    """A model and its running batch.

    Every running sequence must have its token in every plan: a step adds a column to the whole batch, so a sequence
    that is not in a plan has ended, and its slot is free. The scheduler serves running sequences before it admits new
    ones. So it keeps to this if a step may have as many tokens as there are slots, and blocks do not run out.
    """

    def __init__(self, model: PaddedLM) -> None:
        self._model = model
        self._batch: PaddedBatch | None = None
        self._mask_lane = MaskLane(model.device)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> StepResult | MaskedPlan:
        """Compute a step. Nothing is under way afterwards: the ticket for `collect` is the result itself. A masked step
        is computed when its masks are here."""
        _check(plan)
        return MaskedPlan(plan) if plan.is_masked else self._run(plan, {})

    @torch.inference_mode()
    def mask(self, ticket: MaskedPlan, masks: StepMasks) -> StepResult:
        slots = ticket.plan.slots[masks.rows].tolist()
        return self._run(ticket.plan, dict(zip(slots, masks.words, strict=True)))

    def _run(self, plan: StepPlan, masks: Mapping[int, npt.NDArray[np.int32]]) -> StepResult:
        batches = [batch for batch in (self._continue(plan), self._start(plan)) if batch is not None]
        outcomes: dict[int, _Outcome] = {}
        for batch in batches:
            outcomes.update(self._step(batch, masks))
        self._batch = PaddedBatch.concatenate(batches) if len(batches) > 1 else next(iter(batches), None)
        return _make_result(plan, outcomes)

    def collect(self, ticket: StepResult | MaskedPlan) -> StepResult:
        assert isinstance(ticket, StepResult), "its masks have not come"
        return ticket

    def _continue(self, plan: StepPlan) -> PaddedBatch | None:
        """Return the batch without ended sequences, in its own order: to follow the plan's would cost copies."""
        new_sequences = {new.slot for new in plan.new_sequences}
        starts = zip(plan.slots.tolist(), plan.starts.tolist(), strict=True)
        running = {slot: start for slot, start in starts if slot not in new_sequences}
        batch = self._batch
        ids = [request.id for request in batch.requests] if batch is not None else []
        held = dict(zip(ids, batch.input_lengths, strict=True)) if batch is not None else {}
        for slot, start in running.items():
            assert held.get(slot) == start + 1, (
                f"slot {slot} was not in every step: {start} computed, {held.get(slot)} held"
            )
        return None if batch is None else batch.filter([slot for slot in held if slot in running])

    def _start(self, plan: StepPlan) -> PaddedBatch | None:
        if not plan.new_sequences:
            return None
        asking = set(plan.slots[plan.scores_prompt].tolist())
        requests: list[Any] = [_Request(new.slot, new.slot in asking) for new in plan.new_sequences]
        return PaddedBatch.from_prompts(
            requests,
            [new.token_ids for new in plan.new_sequences],
            [Chooser(SequenceSampling.of(new.sampling, new.stop), new.prompt_length) for new in plan.new_sequences],
            [_room_for(new) for new in plan.new_sequences],
            self._model.pad_token_id,
            self._model.device,
        )

    def _step(self, batch: PaddedBatch, masks: Mapping[int, npt.NDArray[np.int32]]) -> dict[int, _Outcome]:
        """Choose a token for each row of the batch, and make it ready for the next step."""
        is_first = batch.past_key_values is None
        masked = [row for row, request in enumerate(batch.requests) if request.id in masks]
        token_masks = None
        if masked:
            words = [masks[batch.requests[row].id] for row in masked]
            token_masks = self._mask_lane.send(StepMasks(np.array(masked), words), self._model.vocab_size)
        sampled, logits, caches = self._model.compute(batch, token_masks)
        alternatives = sampled.alternatives.by_row() if sampled.alternatives else {}
        outcomes = {}
        rows = zip(batch.requests, sampled.token_ids.tolist(), sampled.logprobs.tolist(), strict=True)
        for row, (request, token_id, logprob) in enumerate(rows):
            asks = is_first and request.prefill_logprobs
            prompt_scores = _score_prompt(batch, row, logits) if asks else (None, None)
            outcomes[request.id] = _Outcome(token_id, logprob, alternatives.get(row), *prompt_scores)
        batch.append([outcome.token_id for outcome in outcomes.values()])
        for stop in batch.stopping_criterias:
            stop.current_tokens += 1
        self._model.advance(batch, sampled.token_ids, caches)
        return outcomes


def _check(plan: StepPlan) -> None:
    assert not plan.adapter_ops, "there are no adapters here"
    assert not plan.adapter_indices.any(), "there are no adapters here"
    assert plan.samples.all(), "prompts are not computed in parts"
    whole = {new.slot: len(new.token_ids) for new in plan.new_sequences}
    for slot, start, count in zip(plan.slots.tolist(), plan.starts.tolist(), plan.counts.tolist(), strict=True):
        expected = (0, whole.pop(slot)) if slot in whole else (start, 1)
        assert (start, count) == expected, f"slot {slot}: {count} tokens from {start} on are not all of its new ones"
    assert not whole, f"slots {sorted(whole)} are new and have no part in the step"


def _room_for(new: NewSequence) -> StoppingCriteria:
    """Return a stop criterion with the remaining tokens, which sizes the batch. The engine finishes sequences."""
    num_generated = len(new.token_ids) - new.prompt_length
    return StoppingCriteria(StopParams(max_new_tokens=new.stop.max_new_tokens - num_generated))


def _score_prompt(batch: PaddedBatch, row: int, logits: torch.Tensor) -> tuple[list[float], list[Alternatives] | None]:
    """Score the prompt alone, also where tokens that were generated before are computed again after it."""
    chooser = batch.next_token_choosers[row]
    prompt_length, count = chooser.prompt_length, chooser.sequence_sampling.params.num_alternatives
    num_generated = batch.input_lengths[row] - prompt_length
    columns = logits[row, : logits.shape[1] - num_generated]
    logprobs = prompt_logprobs(columns, batch.all_input_ids[row][:prompt_length, 0])
    if not count:
        return logprobs, None
    best, ids = columns[-prompt_length:-1].float().log_softmax(-1).topk(min(count, columns.shape[-1]), dim=-1)
    return logprobs, list(map(Alternatives, ids.tolist(), best.tolist()))


def _make_result(plan: StepPlan, outcomes: dict[int, _Outcome]) -> StepResult:
    ordered = [outcomes[slot] for slot in plan.slots.tolist()]
    asking = [outcomes[slot] for slot in plan.slots[plan.scores_prompt].tolist()]
    return StepResult(
        plan.step,
        [outcome.token_id for outcome in ordered],
        [outcome.logprob for outcome in ordered],
        {i: outcome.alternatives for i, outcome in enumerate(ordered) if outcome.alternatives is not None},
        [outcome.prompt_logprobs or [] for outcome in asking],
        {i: outcome.prompt_alternatives for i, outcome in enumerate(asking) if outcome.prompt_alternatives is not None},
    )
