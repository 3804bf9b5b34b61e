"""The times of steps and prompts that were measured, and what follows from them for other sizes.

All of it is of one H200, a Llama of the 8B shape in bfloat16, and adapters of rank 16 at all seven modules
(docs/kernels.md, "Whole steps" and "Prompts on a GPU"; docs/engine.md, "Measured"; 2026-11-17). A step takes the time
to read its bytes once, and some more: for launches, and for multiplying, which takes longer than reading where a batch
is large. That excess hardly depends on the number of adapters. It is kept in units of the time to read the weights, and
by the share of it that multiplying takes at a GPU's full speed, so that it can be carried to other GPUs and models.
"""

from itertools import pairwise
from typing import NamedTuple

from lorax_server.cli.planning.gpus import GPUS, Gpu

MEASURED_GPU = GPUS["H200"]
READ_SHARE = 4.1 / 4.8  # of a data sheet's bandwidth that kernels reach: 4.1 TB/s of an H200
WEIGHT_BYTES, TOKEN_BYTES, ADAPTER_BYTES = 15_009_316_864, 131_072, 83_886_080  # of a step, of the measured model
CONTEXT = 196  # tokens of a sequence
CACHE_EXCESS = 1.15  # times the time to read keys and values: 1.05 to 1.25, from 512 to 8,192 tokens
FLOAT8_SPEED = 0.8  # times the time of a cache in bfloat16, of half the bytes: 0.72 to 0.80
SERVED_SHARE = 0.9  # of the tokens that steps and prompts allow, over HTTP as requests come and go: 0.90 and 0.91
PROMPT_SHARE, ADAPTED_PROMPT_SHARE = 0.629, 0.591  # of full speed: 43,730 and 41,110 tokens/s of prompts of 1,024
LAYERS = 32  # of the measured model
ENGINE_MS, ENGINE_ROW_MS = 0.2, 0.0042  # of a step without its model, and of each of its rows: 0.47 of 64, 1.26 of 256
API_TOKENS_PER_S = 1 / 36e-6  # 36 us of CPU time of the API process for each token of a stream
COPIED_BYTES_PER_S = 12e9  # from host memory to the device: 12 to 15 GB/s


class MeasuredStep(NamedTuple):
    """The milliseconds of a step with so many rows, each with an adapter of its own or all with none."""

    rows: int
    ms: float


PLAIN_STEPS = (MeasuredStep(1, 4.12), MeasuredStep(64, 5.13), MeasuredStep(256, 9.27))
ADAPTED_STEPS = (MeasuredStep(1, 4.17), MeasuredStep(16, 4.70), MeasuredStep(64, 6.85), MeasuredStep(256, 15.73))


class StepBytes(NamedTuple):
    """The bytes that a step reads."""

    weights: float
    adapters: float
    cache: float  # of keys and values in bfloat16


class StepTime(NamedTuple):
    """The milliseconds of a step, by what they are spent on."""

    weights: float
    adapters: float
    cache: float
    excess: float

    @property
    def total(self) -> float:
        return sum(self)


def find_step_time(gpu: Gpu, rows: float, read: StepBytes, layers: int, is_float8: bool = False) -> StepTime:
    """Return the time of a step that gives a token to each row."""
    weights, adapters = _read_ms(gpu, read.weights), _read_ms(gpu, read.adapters)
    cache = CACHE_EXCESS * _read_ms(gpu, read.cache) * (FLOAT8_SPEED if is_float8 else 1)
    # The rows at which this GPU would multiply for the same share of the time as the measured one.
    alike = rows * _operations_per_byte(MEASURED_GPU) / _operations_per_byte(gpu)
    is_adapted = read.adapters > 0
    single = _interpolate_excess(1, is_adapted)
    # Nobody has measured what of a single row's excess is launches, by layer, and what is slow reading.
    least = max(weights * single, layers / LAYERS * _excess_ms(_steps(is_adapted)[0], is_adapted))
    excess = least + weights * (_interpolate_excess(max(alike, 1), is_adapted) - single)
    engine = ENGINE_MS + ENGINE_ROW_MS * rows  # prepares the next step meanwhile, so the longer one counts
    return StepTime(weights, adapters, cache, max(excess, engine - weights - adapters - cache))


def find_floor_ms(gpu: Gpu, read: StepBytes) -> float:
    """Return the milliseconds that reading every byte once takes."""
    return _read_ms(gpu, sum(read))


def find_prompt_rate(gpu: Gpu, flop: float, is_adapted: bool) -> float:
    """Return the tokens of prompts a second, each of which takes so many operations."""
    return gpu.flop * (ADAPTED_PROMPT_SHARE if is_adapted else PROMPT_SHARE) / flop


def _read_ms(gpu: Gpu, num_bytes: float) -> float:
    return num_bytes / (gpu.bandwidth * READ_SHARE) * 1e3


def _operations_per_byte(gpu: Gpu) -> float:
    return gpu.flop / gpu.bandwidth


def _interpolate_excess(rows: float, is_adapted: bool) -> float:
    """Return the excess in units of the time to read the weights. Beyond the last row it grows on as before it."""
    weights = _read_ms(MEASURED_GPU, WEIGHT_BYTES)
    points = [(step.rows, _excess_ms(step, is_adapted) / weights) for step in _steps(is_adapted)]
    if rows <= points[0][0]:
        return points[0][1]
    below, above = next((pair for pair in pairwise(points) if rows <= pair[1][0]), (points[-2], points[-1]))
    return below[1] + (rows - below[0]) * (above[1] - below[1]) / (above[0] - below[0])


def _steps(is_adapted: bool) -> tuple[MeasuredStep, ...]:
    return ADAPTED_STEPS if is_adapted else PLAIN_STEPS


def _excess_ms(step: MeasuredStep, is_adapted: bool) -> float:
    adapters = _read_ms(MEASURED_GPU, step.rows * ADAPTER_BYTES) if is_adapted else 0
    cache = CACHE_EXCESS * _read_ms(MEASURED_GPU, step.rows * CONTEXT * TOKEN_BYTES)
    return step.ms - _read_ms(MEASURED_GPU, WEIGHT_BYTES) - adapters - cache
