"""Builds an engine with its executor and adapter sources."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from lorax_server.adapters.sources.disk_budget import DiskBudget, compute_in_use_period_s
from lorax_server.adapters.sources.finder import AdapterFinder
from lorax_server.adapters.sources.local import LocalSource
from lorax_server.adapters.sources.source import AdapterSources, Source
from lorax_server.config import EngineConfig, SourceConfig
from lorax_server.engine.adapters.resolver import AdapterResolver
from lorax_server.engine.adapters.table import AdapterTable
from lorax_server.engine.admission import Limits
from lorax_server.engine.block_pool import BlockPool
from lorax_server.engine.engine import Engine, Executor
from lorax_server.engine.scheduler import Scheduler
from lorax_server.engine.speculation.drafter import SpeculativeDrafter
from lorax_server.engine.speculation.step_costs import CPU_PRIOR, GPU_PRIOR, StepCosts
from lorax_server.errors import EngineError, SourceError
from lorax_server.phases import Phases
from lorax_server.plan import Capabilities
from lorax_server.structured_output.manager import StructuredOutput
from lorax_server.structured_output.vocabulary import Vocabulary
from lorax_server.text.tokenizer import load_tokenizer
from lorax_server.types import AdapterRef, Request, SamplingParams, StopParams
from lorax_server.worker.executor import build_executor
from lorax_server.worker.memory import adapter_host_bytes

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 8
# Limits for the measurement of the decode speed at startup.
MAX_MEASURED_STEPS = 16
MAX_MEASURED_S = 0.5


def build_engine(
    config: EngineConfig,
    on_rank_exit: Callable[[EngineError], None] | None = None,
    phases: Phases | None = None,
    make_vocabulary: Callable[[], Vocabulary] | None = None,
) -> Engine:
    """Load the model on all ranks, build the engine, preload adapters, and return the engine.

    `on_rank_exit` is called if a rank exits unexpectedly. `phases` may already contain earlier startup phases.
    `make_vocabulary` replaces `build_vocabulary`.
    """
    phases = phases or Phases()
    engine = assemble_engine(config, build_executor(config, on_rank_exit, phases), make_vocabulary=make_vocabulary)
    engine.start_seconds = phases.seconds
    try:
        with phases.measure("adapters"):
            preload_adapters(engine, config)
    except BaseException:
        engine.close()
        raise
    logger.info("started in %s", phases)
    return engine


def assemble_engine(
    config: EngineConfig,
    executor: Executor,
    sources: Mapping[str, Source] | None = None,
    make_vocabulary: Callable[[], Vocabulary] | None = None,
) -> Engine:
    """Build and return an engine that uses this executor. `sources` replaces the adapter sources in the config."""
    capabilities = executor.capabilities
    pool = BlockPool(capabilities.num_blocks, capabilities.block_size)
    table = AdapterTable(
        capabilities, host_bytes=adapter_host_bytes(config), eviction_delay_s=config.adapter_eviction_delay_s
    )
    limits = Limits(
        **vars(capabilities),
        max_prefill_chunk_tokens=config.max_prefill_chunk_tokens,
        max_waiting=config.max_waiting,
        max_wait_s=config.max_wait_s,
        adapter_timeout_s=config.adapter_timeout_s,
    )
    scheduler = Scheduler(limits, pool, table, config.tenant_weights, drafter=build_drafter(config, capabilities))
    finder = AdapterFinder(
        AdapterSources(
            build_sources(config.sources, config.adapter_timeout_s) if sources is None else sources,
            max_bytes=config.sources.max_bytes,
        ),
        model_type=capabilities.model_type,
        model_class=capabilities.model_class,
        max_inputs=capabilities.max_inputs,
        task=capabilities.task,
    )
    resolver = AdapterResolver(finder, num_threads=config.sources.num_threads)
    make_vocabulary = make_vocabulary or partial(build_vocabulary, config.model.path)
    structured_output = None
    if capabilities.task == "generate":
        structured_output = StructuredOutput.for_device(make_vocabulary, config.model.device)
    return Engine(executor, scheduler, pool, table, resolver, structured_output)


def build_drafter(config: EngineConfig, capabilities: Capabilities) -> SpeculativeDrafter | None:
    """Return the drafter for speculative decoding, or None if speculation is disabled."""
    max_tokens = config.speculative_tokens or capabilities.num_draft_heads
    if not max_tokens:
        return None
    costs = StepCosts(CPU_PRIOR if config.model.device == "cpu" else GPU_PRIOR)
    return SpeculativeDrafter(max_tokens, config.speculation_max_batch_size, costs=costs)


def build_vocabulary(model: Path) -> Vocabulary:
    """Return the base model's vocabulary for structured output."""
    tokenizer = load_tokenizer(model)
    return Vocabulary.from_table(tokenizer.token_table(), partial(tokenizer.encode, add_special_tokens=False))


def preload_adapters(engine: Engine, config: EngineConfig) -> None:
    """Load the configured adapters, and wait until they are loaded. Raise if an adapter cannot be loaded.

    An unavailable source only logs a warning, so that the engine can restart without it.
    """
    resolving = [engine.resolve([AdapterRef(source, name)]) for source, name in config.preload]
    _wait_for(engine, resolving)
    identities = []
    for future in resolving:
        try:
            identities.append(future.result().identity)
        except SourceError as error:
            logger.warning("adapter not preloaded: %s", error)
    loads = [engine.load(identity, config.pin_preloaded) for identity in identities]
    _wait_for(engine, loads)
    for load in loads:
        load.result()


def warm_up(engine: Engine) -> float:
    """Run short requests, and return the single-sequence decode speed in tokens per second.

    The first of these requests performs one-time initialization, which would otherwise delay the first client request.
    Return 0 if the model does not generate text.
    """
    if engine.capabilities.task != "generate":
        _time_decode_step(engine, 1)
        return 0.0
    step_s = _time_decode_step(engine, 2)
    count = min(MAX_MEASURED_STEPS, int(MAX_MEASURED_S / max(step_s, 1e-6)))
    return 1 / max(_time_decode_step(engine, count + 1) if count else step_s, 1e-6)


def _time_decode_step(engine: Engine, count: int) -> float:
    """Generate `count` tokens, and return the mean time of the decode steps, in seconds."""
    max_length = engine.capabilities.max_length
    prompt_ids = [0] * min(WARM_UP_TOKENS, max(1, max_length - 2))
    stop = StopParams(max_new_tokens=min(count, max_length - len(prompt_ids)), ignore_eos=True)
    engine.add(Request(0, prompt_ids, SamplingParams(), stop, speculation=False))
    times = []
    while engine.has_work:
        for output in engine.step():
            if output.failure is not None:
                raise output.failure.to_error()
            times.append(time.monotonic())
    return (times[-1] - times[0]) / max(1, len(times) - 1)


def _wait_for(engine: Engine, futures: Sequence["Future[Any]"]) -> None:
    while not all(future.done() for future in futures):
        engine.wait()
        engine.step()


def build_sources(config: SourceConfig, adapter_timeout_s: float = 0.0) -> dict[str, Source]:
    """Return the enabled adapter sources, keyed by name. Client libraries are imported only for enabled sources.

    Used files stay on disk for at least `adapter_timeout_s`, because a request may wait that long for its adapter.
    """
    sources: dict[str, Source] = {}
    if roots := (*config.roots, *filter(None, (config.uploads,))):
        sources["local"] = LocalSource(roots)
    if config.cache is None:
        return sources
    cache = config.cache
    budget = DiskBudget(cache, config.disk_bytes, in_use_s=compute_in_use_period_s(adapter_timeout_s))
    if config.hub:
        from lorax_server.adapters.sources.hub import HubSource  # noqa: PLC0415

        sources["hub"] = HubSource(
            cache / "hub", config.hub_endpoint, config.hub_token, config.hub_offline, budget=budget
        )
    if config.s3_bucket:
        from lorax_server.adapters.sources.s3 import S3Source  # noqa: PLC0415

        endpoint, prefix = config.s3_endpoint, config.s3_prefix
        sources["s3"] = S3Source(config.s3_bucket, cache / "s3", prefix=prefix, endpoint_url=endpoint, budget=budget)
    budget.remove_interrupted_downloads()
    return sources
