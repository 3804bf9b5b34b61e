"""Counts of what happened so far, under the names that `EngineStatus` gives them."""

from dataclasses import dataclass


@dataclass
class SchedulerCounters:
    steps: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    prefix_tokens: int = 0  # found in the cache instead of computed
    chunks: int = 0  # parts of prompts, or of recomputed sequences, that did not fit into one step
    preemptions: int = 0  # for lack of blocks
    rows_taken_back: int = 0  # for tenants or calls with less than their share
    refused: int = 0  # requests, because of overload


@dataclass
class AdapterCounters:
    adapters_prepared: int = 0
    adapters_loaded: int = 0
    adapters_failed: int = 0
    adapters_evicted_from_host: int = 0
    adapters_evicted_from_device: int = 0
    adapter_moves: int = 0
