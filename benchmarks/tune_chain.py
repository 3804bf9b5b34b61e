"""Cut the linears of the 8B shape over Hopper's processors as the whole chain likes it best, and change the table.

`tune_linears.py` measures each linear alone. In a chain, launches overlap, and the best cuts are others. One setting is
changed at a time, and stays changed if all cases of its height together take less. The peer is the table as it was.
"""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from gpu_linears import ADAPTER_ELEMENTS, HIDDEN, INNER, LAYERS, LINEARS, Chain, time_chain
from report import Record, report

import lorax_server.kernels.hopper as package
from lorax_server.kernels import LoraBatch, select_ops
from lorax_server.kernels.hopper import settings
from lorax_server.kernels.hopper.settings import LONG_STAGES, SHORT_STAGES, TABLE, LinearSetting

BLOCKS = (24, 36, 48, 60, 68, 84, 96, 112, 132, 164)
GAIN = 0.999  # of the time: less is noise
CASES = {  # by height: rows, and the ranks of their adapters
    64: ((64, [16]), (64, [16] * 64), (64, [16] * 63 + [512])),
    16: ((16, [16] * 16), (16, [16])),
    8: ((1, [16]),),
}


class Case(NamedTuple):
    x: torch.Tensor
    lora: LoraBatch


def make_case(chain: Chain, rows: int, ranks: list[int]) -> Case:
    lora = chain.batch(ranks, rows)
    chain.ops.plan_lora(lora, lora)
    return Case(torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16), lora)


def vary(now: LinearSetting, height: int, tiles: int, num_sms: int) -> Iterator[LinearSetting]:
    """Yield settings that differ from one in one respect."""
    for early in (1, 2, 3):
        yield now._replace(early_with_lora=early)
    for blocks in BLOCKS:
        yield now._replace(lora_blocks=blocks // now.cluster * now.cluster)
    for stages in {LONG_STAGES[height], SHORT_STAGES[height]}:
        for cluster in (1, 2) if tiles <= num_sms else (1,):
            yield now._replace(stages=stages, cluster=cluster, lora_blocks=now.lora_blocks // cluster * cluster)


def tune(chain: Chain, height: int, table: dict[str, list[int]], num_sms: int) -> tuple[float, float]:
    """Change the table, and return the milliseconds of all cases before and after."""
    cases = [make_case(chain, *each) for each in CASES[height]]

    def take() -> float:
        return sum(time_chain(chain, *case) for case in cases)

    before = best = take()
    for inputs, widths in LINEARS.values():
        key, tiles = f"{inputs} {sum(widths)} {height}", -(-sum(widths) // 128)
        now = LinearSetting(*table[key])
        for setting in vary(now, height, tiles, num_sms):
            table[key] = list(setting)
            if setting != now and take() < GAIN * best and (again := take()) < GAIN * best:
                print(f"{key}: {tuple(now)} -> {tuple(setting)}, {best:.3f} -> {again:.3f} ms", flush=True)
                best, now = again, setting
            table[key] = list(now)
    return before, best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records to this file")
    parser.add_argument("--heights", type=int, nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--table", type=Path, default=Path(package.__path__[0]) / TABLE, help="the table to change")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda", 0)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    buffer = torch.empty(96 * ADAPTER_ELEMENTS + 16 * INNER, dtype=torch.bfloat16, device=device)
    for piece in buffer.split(1 << 30):
        piece.normal_(0, 0.02)
    chain = Chain(select_ops(device), LAYERS, buffer)
    table = settings._table()[str(num_sms)]  # which the kernels read
    records, text = [], args.table.read_text()
    for height in args.heights:
        before, after = tune(chain, height, table, num_sms)
        records.append(
            Record(f"chains of height {height}", after / before, "x", "the table as it was", 1.0, at_most=True)
        )
        for key in [key for key in table if key.endswith(f" {height}")]:
            text = re.sub(rf'"{key}": \[[^\]]*\]', f'"{key}": {json.dumps(table[key])}', text)
        args.table.write_text(text)
    report(records, args.json)


if __name__ == "__main__":
    main()
