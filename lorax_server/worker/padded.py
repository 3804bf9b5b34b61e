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
from lorax_server.models.registry import find_relatives
from lorax_server.plan import Capabilities, NewRow, StepMasks, StepPlan, StepResult
from lorax_server.sampling.batch import RowSampling
from lorax_server.types import Alternatives, StopParams
from lorax_server.worker.inputs import MaskLane
from lorax_server.worker.memory import find_max_rows

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
    relatives = find_relatives(str(model.config.model_type))
    logger.warning(
        "model type %s is served in padded batches, without adapters and tensor parallelism%s",
        model.config.model_type,
        f"; close relatives that are served with both: {', '.join(relatives)}" if relatives else "",
    )
    max_rows = find_max_rows(config, model.device)
    return padded_capabilities(model, max_rows, config.max_length), PaddedRunner(model)


def padded_capabilities(model: PaddedLM, max_rows: int, max_length: int | None) -> Capabilities:
    """Describe a `PaddedRunner` of this model. It has no blocks; the engine is told of enough for everything."""
    longest = max_positions(model.config)
    max_length = longest if max_length is None else min(max_length, longest)
    return Capabilities(
        vocab_size=model.vocab_size,
        max_rows=max_rows,
        max_length=max_length,
        max_step_tokens=max_length + max_rows,  # any prompt, whole, beside all that run
        num_blocks=max_rows * -(-max_length // BLOCK_SIZE),
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
    """A sequence of a batch, identified by its row in the plan."""

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
    that is not in a plan has ended, and its row is free. The scheduler serves running sequences before it admits new
    ones. So it keeps to this if a step may have as many tokens as there are rows, and blocks do not run out.
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
        rows = ticket.plan.rows[masks.rows].tolist()
        return self._run(ticket.plan, dict(zip(rows, masks.words, strict=True)))

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
        new_rows = {new.row for new in plan.new_rows}
        starts = zip(plan.rows.tolist(), plan.starts.tolist(), strict=True)
        running = {row: start for row, start in starts if row not in new_rows}
        batch = self._batch
        ids = [request.id for request in batch.requests] if batch is not None else []
        held = dict(zip(ids, batch.input_lengths, strict=True)) if batch is not None else {}
        for row, start in running.items():
            assert held.get(row) == start + 1, (
                f"row {row} was not in every step: {start} computed, {held.get(row)} held"
            )
        return None if batch is None else batch.filter([row for row in held if row in running])

    def _start(self, plan: StepPlan) -> PaddedBatch | None:
        if not plan.new_rows:
            return None
        asking = set(plan.rows[plan.asks].tolist())
        requests: list[Any] = [_Request(new.row, new.row in asking) for new in plan.new_rows]
        return PaddedBatch.from_prompts(
            requests,
            [new.token_ids for new in plan.new_rows],
            [Chooser(RowSampling.of(new.sampling, new.stop), new.prompt_length) for new in plan.new_rows],
            [_room_for(new) for new in plan.new_rows],
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
    whole = {new.row: len(new.token_ids) for new in plan.new_rows}
    for row, start, count in zip(plan.rows.tolist(), plan.starts.tolist(), plan.counts.tolist(), strict=True):
        expected = (0, whole.pop(row)) if row in whole else (start, 1)
        assert (start, count) == expected, f"row {row}: {count} tokens from {start} on are not all of its new ones"
    assert not whole, f"rows {sorted(whole)} are new and have no part in the step"


def _room_for(new: NewRow) -> StoppingCriteria:
    """Count the tokens that are yet to come, for the batch to be wide enough. The engine decides when a row ends."""
    num_generated = len(new.token_ids) - new.prompt_length
    return StoppingCriteria(StopParams(max_new_tokens=new.stop.max_new_tokens - num_generated))


def _score_prompt(batch: PaddedBatch, row: int, logits: torch.Tensor) -> tuple[list[float], list[Alternatives] | None]:
    """Score the prompt alone, also where tokens that were generated before are computed again after it."""
    chooser = batch.next_token_choosers[row]
    prompt_length, count = chooser.prompt_length, chooser.row_sampling.params.num_alternatives
    num_generated = batch.input_lengths[row] - prompt_length
    columns = logits[row, : logits.shape[1] - num_generated]
    logprobs = prompt_logprobs(columns, batch.all_input_ids[row][:prompt_length, 0])
    if not count:
        return logprobs, None
    best, ids = columns[-prompt_length:-1].float().log_softmax(-1).topk(min(count, columns.shape[-1]), dim=-1)
    return logprobs, list(map(Alternatives, ids.tolist(), best.tolist()))


def _make_result(plan: StepPlan, outcomes: dict[int, _Outcome]) -> StepResult:
    ordered = [outcomes[row] for row in plan.rows.tolist()]
    asking = [outcomes[row] for row in plan.rows[plan.asks].tolist()]
    return StepResult(
        plan.step,
        [outcome.token_id for outcome in ordered],
        [outcome.logprob for outcome in ordered],
        {i: outcome.alternatives for i, outcome in enumerate(ordered) if outcome.alternatives is not None},
        [outcome.prompt_logprobs or [] for outcome in asking],
        {i: outcome.prompt_alternatives for i, outcome in enumerate(asking) if outcome.prompt_alternatives is not None},
    )
