"""What happened so far, as the engine's status tells it."""

from dataclasses import dataclass


@dataclass
class SchedulerCounters:
    """What the scheduler has done."""

    preemptions: int = 0  # because there was no block left
    rows_taken_back: int = 0  # for those that had less than their share
    chunks: int = 0  # prompts, or what is recomputed, that did not fit into one step
    prefix_tokens: int = 0  # that were found instead of computed
    computed_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    refused: int = 0  # requests, because of overload


@dataclass
class AdapterCounters:
    """What has become of adapters."""

    prepared: int = 0
    failed: int = 0
    loaded: int = 0
    evicted_from_device: int = 0
    evicted_from_host: int = 0
    moves: int = 0
