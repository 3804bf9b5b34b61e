"""Launch settings for fused linear layers. They are measured for known shapes, and estimated for other shapes."""

import json
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from lorax_server.kernels.hopper.sources import (
    HEIGHTS,
    MAX_SHARED_BYTES,
    STEP_INPUTS,
    TWO_BLOCKS_SHARED_BYTES,
    PackedFormat,
)

SETTINGS_FILE = "linear_settings.json"  # measured on an H200

# Quantized layers
COLUMNS = 128  # per tile
WGMMA_HEIGHT = 32
MIN_STEPS = 4  # of 128 inputs per block
MIN_STAGES, MAX_STAGES = 3, 24
# By height. Other heights use three quarters of the SMs.
LORA_BLOCKS = {8: 132, 16: 96, 32: 132, 64: 96}
LARGE_LORA_BLOCKS = {8: 132, 16: 132, 32: 96, 64: 200}
LATE_HEIGHTS = (8, 32)  # at which small layers with LoRA start late
MAX_SHORT_STEPS = 8  # per SM, of short products


class LinearLaunchSetting(NamedTuple):
    """Launch settings for one linear layer and one maximum number of batch rows (height)."""

    stages: int  # pipeline stages
    cluster: int  # blocks per cluster, which share 128 columns
    lora_blocks: int  # number of blocks that compute LoRA
    early_with_lora: int  # overlap with adjacent kernels (see `LinearArgs.early` in lora.cu)
    early: int


@cache
def _load_measured_settings() -> dict[str, dict[str, list[int]]]:
    """Return the measured settings, keyed by the number of SMs and then by "inputs outputs height"."""
    path = files("lorax_server.kernels.hopper") / SETTINGS_FILE
    settings: dict[str, dict[str, list[int]]] = json.loads(path.read_text())
    return settings


def find_setting(inputs: int, outputs: int, height: int, num_sms: int) -> LinearLaunchSetting:
    """Return the measured settings for a layer, or estimated settings if this shape was not measured."""
    measured = _load_measured_settings().get(f"{num_sms}", {}).get(f"{inputs} {outputs} {height}")
    setting = LinearLaunchSetting(*measured) if measured else estimate_setting(outputs, height, num_sms)
    assert setting.lora_blocks % setting.cluster == 0, "lora_blocks must be a multiple of the cluster size"
    return setting


def estimate_setting(outputs: int, height: int, num_sms: int) -> LinearLaunchSetting:
    """Return settings for a shape that was not measured.

    The product uses up to two thirds of the SMs, and LoRA uses the rest.

    Larger products run two blocks per SM, together with the LoRA blocks.
    """
    tiles = -(-outputs // 128)
    if tiles > num_sms * 2 // 3:
        return LinearLaunchSetting(
            TWO_BLOCK_STAGES[height], 1, num_sms if height >= 32 else num_sms * 3 // 4, 3 if height < 64 else 1, 3
        )
    cluster = 2 if tiles * 2 <= num_sms // 2 else 1
    return LinearLaunchSetting(ONE_BLOCK_STAGES[height], cluster, (num_sms // cluster - tiles) * cluster, 3, 3)


class QuantizedLaunchSetting(NamedTuple):
    """Launch settings for one quantized linear layer and one maximum number of batch rows (height)."""

    uses_wgmma: bool  # instead of mma.sync
    tiles: int  # tiles of 128 columns per block, 1 with WGMMA
    stages: int  # pipeline stages
    cluster: int  # blocks per cluster, which share columns
    lora_blocks: int  # number of blocks that compute LoRA
    early_with_lora: int  # overlap with adjacent kernels (see `LinearArgs.early` in lora.cu)
    early: int


def find_quantized_setting(
    packed: PackedFormat, inputs: int, outputs: int, height: int, num_sms: int
) -> QuantizedLaunchSetting:
    """Return settings for a quantized layer, by rules that were measured on an H200."""
    num_tiles = -(-outputs // COLUMNS)
    uses_wgmma = height >= WGMMA_HEIGHT and packed.can_use_wgmma
    shapes = [(2, 2), (1, 2), (1, 1)]  # tiles and blocks per SM, in the order of preference
    if height > 2 * WGMMA_HEIGHT:
        shapes = shapes[2:]
    elif uses_wgmma or num_tiles % 2:
        shapes = shapes[1:]
    for tiles, blocks_per_sm in shapes:
        stage_bytes = tiles * packed.record_bytes + height * STEP_INPUTS * 2 + 16
        shared_bytes = MAX_SHARED_BYTES if blocks_per_sm == 1 else TWO_BLOCKS_SHARED_BYTES
        stages = min((shared_bytes - packed.table_bytes) // stage_bytes, MAX_STAGES)
        if stages >= MIN_STAGES:
            break
    blocks = num_tiles // tiles
    max_blocks = num_sms * (2 if height == 2 * WGMMA_HEIGHT else 1)
    # The GPU cannot run all blocks at the same time if clusters are larger.
    max_cluster = 2 if height > 2 * WGMMA_HEIGHT else 4 if uses_wgmma else 8
    steps, cluster = -(-inputs // STEP_INPUTS), 1
    while cluster < max_cluster and 2 * cluster * blocks <= max_blocks and 2 * cluster * MIN_STEPS <= steps:
        cluster *= 2
    is_large = blocks > num_sms * 3 // 4  # nearly all SMs compute the product
    lora_blocks = (LARGE_LORA_BLOCKS if is_large else LORA_BLOCKS).get(height, num_sms * 3 // 4)
    lora_blocks = min(lora_blocks, num_sms * blocks_per_sm) // cluster * cluster
    is_short = num_tiles * steps <= MAX_SHORT_STEPS * num_sms
    early = 1 if is_short and height == HEIGHTS[0] else 3
    early_with_lora = 3 if is_large or height not in LATE_HEIGHTS else 1 if is_short else 2
    return QuantizedLaunchSetting(uses_wgmma, tiles, stages, cluster, lora_blocks, early_with_lora, early)


# Pipeline stages that fill an SM's shared memory, by batch height. Two blocks of 128 rows do not fit.
ONE_BLOCK_STAGES = {8: 11, 16: 11, 32: 9, 64: 8, 128: 6}
TWO_BLOCK_STAGES = {8: 6, 16: 6, 32: 5, 64: 4, 128: 6}
