"""All kernels of a GPU, each against its byte or compute floor, or against a peer in the same run.

Linears with adapters (gpu_linears.py), attention (gpu_attention.py), norms, gates and embeddings (gpu_small.py),
sampling (gpu_sampling.py). Each of those scripts runs alone too, and says what it measures.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_attention import attention_records
from gpu_linears import linear_records
from gpu_sampling import sampling_records
from gpu_small import small_records
from report import Record, report

from lorax_server.kernels import Ops, select_ops

PARTS: dict[str, Callable[[Ops], list[Record]]] = {
    "attention": attention_records,
    "small": small_records,
    "sampling": sampling_records,
    "linears": linear_records,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records to this file")
    parser.add_argument("--only", choices=PARTS, help="one part of it")
    args = parser.parse_args()
    torch.manual_seed(0)
    ops = select_ops(torch.device("cuda", 0))
    report([record for name, part in PARTS.items() if args.only in (None, name) for record in part(ops)], args.json)


if __name__ == "__main__":
    main()
