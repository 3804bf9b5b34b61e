"""Products by a matrix on a CPU, by the number of rows: our native kernel against torch in three storages.

Torch multiplies by `[out, in]`, by `[in, out]`, or by what oneDNN has packed. We have one copy, in panels of outputs.
A record is our speed relative to the best of the three; the goal is to be within a tenth of it everywhere. "narrow" is
the same product by a matrix whose numbers half precision holds exactly, and which we store so.
"""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from report import Record, parse_args, report

from lorax_server.kernels.cpu.ops import CpuOps
from lorax_server.kernels.packed import pack, packed_linear

SHAPES = [(768, 2304), (768, 768), (768, 6144), (3072, 768), (768, 32000), (2048, 2048)]
ROWS = (1, 2, 4, 8, 32, 256, 2048)
CACHE_BYTES = 100e6  # several copies of a matrix, so that none is found in the cache


def seconds(run: Callable[[int], object], copies: int) -> float:
    """Return the best time of several short stretches, going through the copies in turn."""
    best = float("inf")
    for _ in range(5):
        start, done = time.perf_counter(), 0
        while time.perf_counter() - start < 0.03:
            run(done % copies)
            done += 1
        best = min(best, (time.perf_counter() - start) / done)
    return best


def measure(ops: CpuOps, in_features: int, out_features: int) -> list[Record]:
    copies = max(1, int(CACHE_BYTES / (4 * in_features * out_features)))
    plain = [torch.randn(out_features, in_features) for _ in range(copies)]
    turned = [matrix.t().contiguous() for matrix in plain]
    packed = [pack(matrix) for matrix in plain]
    panels = [ops.make_linear(matrix, None) for matrix in plain]
    narrow = [ops.make_linear(matrix.bfloat16().float(), None) for matrix in plain]
    records = []
    for rows in ROWS:
        x = torch.randn(rows, in_features)
        times = {
            "[out, in]": seconds(lambda i: F.linear(x, plain[i]), copies),  # noqa: B023 - called right here
            "[in, out]": seconds(lambda i: x @ turned[i], copies),  # noqa: B023
            "packed": seconds(lambda i: packed_linear(x, packed[i], None), copies),  # noqa: B023
        }
        ours = seconds(lambda i: ops.linear(x, panels[i], None, ()), copies)  # noqa: B023
        halved = seconds(lambda i: ops.linear(x, narrow[i], None, ()), copies)  # noqa: B023
        operations = 2e-9 * rows * in_features * out_features
        name = f"{in_features} -> {out_features}, {rows} rows"
        figures = ", ".join(f"{storage} {operations / time:.1f}" for storage, time in times.items())
        print(f"{name}: ours {operations / ours:.1f}, narrow {operations / halved:.1f}, {figures} GFLOP/s", flush=True)
        records.append(Record(name, min(times.values()) / ours, "x", "torch, the best of three storages", 0.9))
    return records


def main() -> None:
    args = parse_args(__doc__)
    torch.manual_seed(0)
    print(f"{torch.get_num_threads()} threads, float32, torch {torch.__version__}")
    with torch.no_grad():
        report([record for shape in SHAPES for record in measure(CpuOps(), *shape)], args.json)


if __name__ == "__main__":
    main()
