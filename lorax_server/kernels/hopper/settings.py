"""Cuts of linears over the multiprocessors: measured for known shapes, guessed for others."""

import json
from functools import cache
from importlib.resources import files
from typing import NamedTuple

TABLE = "settings.json"  # measured on an H200


class LinearSetting(NamedTuple):
    """The cut of one linear at one height."""

    stages: int  # pieces of weights on their way
    cluster: int  # blocks that share 128 columns
    lora_blocks: int
    early_with_lora: int  # how the launch overlaps with its neighbours (see `Args.early` in lora.cu)
    early: int


@cache
def _table() -> dict[str, dict[str, list[int]]]:
    tables: dict[str, dict[str, list[int]]] = json.loads((files("lorax_server.kernels.hopper") / TABLE).read_text())
    return tables


def find_setting(inputs: int, outputs: int, height: int, num_sms: int) -> LinearSetting:
    known = _table().get(f"{num_sms}", {}).get(f"{inputs} {outputs} {height}")
    setting = LinearSetting(*known) if known else guess_setting(outputs, height, num_sms)
    assert setting.lora_blocks % setting.cluster == 0, "blocks of one cluster do the same work"
    return setting


def guess_setting(outputs: int, height: int, num_sms: int) -> LinearSetting:
    """Guess as the measured ones are: the product on up to two thirds of the multiprocessors, LoRA on the others.

    A product of more blocks runs two of them on each multiprocessor, and LoRA beside them.
    """
    tiles = -(-outputs // 128)
    if tiles > num_sms * 2 // 3:
        return LinearSetting(
            SHORT_STAGES[height], 1, num_sms if height >= 32 else num_sms * 3 // 4, 3 if height < 64 else 1, 3
        )
    cluster = 2 if tiles * 2 <= num_sms // 2 else 1
    return LinearSetting(LONG_STAGES[height], cluster, (num_sms // cluster - tiles) * cluster, 3, 3)


# Stages that fill a multiprocessor's shared memory with one block, and with two. There is no room for two of 128 rows.
LONG_STAGES = {8: 11, 16: 11, 32: 9, 64: 8, 128: 6}
SHORT_STAGES = {8: 6, 16: 6, 32: 5, 64: 4, 128: 6}
