"""Products by a matrix on a CPU, by the number of rows: our native kernel against torch in three storages.

Torch multiplies by `[out, in]`, by `[in, out]`, or by what oneDNN has packed. We have one copy, in panels of outputs.
A record is our speed relative to the best of the three; the goal is to be within a tenth of it everywhere. "narrow" is
the same product by a matrix whose numbers half precision holds exactly, and which we store so.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from report import Record, report

from lorax_server.kernels.cpu.ops import CpuOps

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


def store(plain: list[torch.Tensor], dtype: torch.dtype) -> dict[str, Callable[[torch.Tensor, int], torch.Tensor]]:
    """Return torch's products by its storages of the same matrices."""
    turned = [matrix.t().contiguous() for matrix in plain]
    products: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
        "[out, in]": lambda x, i: F.linear(x, plain[i]),
        "[in, out]": lambda x, i: x @ turned[i],
    }
    if dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        packed = [torch.ops.mkldnn._reorder_linear_weight(matrix.contiguous(), None) for matrix in plain]
        products["packed"] = lambda x, i: torch.ops.mkldnn._linear_pointwise(x, packed[i], None, "none", [], "")
    return products


def measure(
    ops: CpuOps, in_features: int, out_features: int, dtype: torch.dtype, all_rows: Sequence[int]
) -> list[Record]:
    copies = max(1, int(CACHE_BYTES / (dtype.itemsize * in_features * out_features)))
    plain = [torch.randn(out_features, in_features).to(dtype) for _ in range(copies)]
    panels = [ops.make_linear(matrix, None) for matrix in plain]
    narrow = [ops.make_linear(matrix.bfloat16().float(), None) for matrix in plain] if dtype == torch.float32 else []
    products, records = store(plain, dtype), []
    for rows in all_rows:
        x = torch.randn(rows, in_features).to(dtype)
        times = {name: seconds(partial(product, x), copies) for name, product in products.items()}
        fastest = min(times.values())
        times["ours"] = seconds(lambda i: ops.linear(x, panels[i], None, ()), copies)  # noqa: B023 - called right here
        if narrow:
            times["narrow"] = seconds(lambda i: ops.linear(x, narrow[i], None, ()), copies)  # noqa: B023
        operations, size = 2e-9 * rows * in_features * out_features, 1e-9 * in_features * out_features * dtype.itemsize
        name = f"{in_features} -> {out_features}, {rows} rows"
        figures = ", ".join(f"{storage} {operations / time:.1f}" for storage, time in times.items())
        print(f"{name}: {figures} GFLOP/s; ours reads {size / times['ours']:.1f} GB/s", flush=True)
        records.append(Record(name, fastest / times["ours"], "x", "torch, the best of its storages", 0.9))
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records to this file")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="(%(default)s)")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, metavar="N", help="numbers of rows")
    args = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.get_num_threads()} threads, {args.dtype}, torch {torch.__version__}")
    ops, dtype = CpuOps(), getattr(torch, args.dtype)
    print("matrices of bfloat16 are multiplied " + ("by tiles (AMX)" if ops.has_fast_bfloat16 else "as float32"))
    with torch.no_grad():
        report([record for shape in SHAPES for record in measure(ops, *shape, dtype, args.rows)], args.json)


if __name__ == "__main__":
    main()
