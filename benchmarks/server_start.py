"""Measure the startup of `lorax serve`: the seconds to the first token, and the memory of each process after startup.

The bundled model runs on the CPU. With `--gpu`, the server instead runs a random model with the Llama-3.1-8B shape from
files in memory. The first start has no cached kernels and configs; later starts are reported as a median.
"""

import json
import os
import re
import statistics
import time
import urllib.request
from pathlib import Path

from harness.files import LLAMA_8B, make_model, scratch_folder
from harness.report import Record, make_parser, report
from harness.server import local_flags, serving

GOALS_S = {False: (None, 8.0), True: (60.0, 15.0)}  # first start and other starts, by --gpu
PHASES = re.compile(r"started in .*? s: (.*)")
BODY = {"inputs": "a", "parameters": {"max_new_tokens": 1}}


def measure(log: Path, flags: dict[str, object]) -> tuple[float, dict[str, float]]:
    """Return the seconds from the command to the first token, and the memory of each process in MB."""
    began = time.monotonic()
    with serving(log, flags) as server:
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{server.url}/generate", json.dumps(BODY).encode(), headers)
        with urllib.request.urlopen(request) as response:
            response.read()
        seconds = time.monotonic() - began
        print(f"first token after {seconds:.1f} s; engine: {PHASES.findall(log.read_text())}", flush=True)
        return seconds, {name: usage.rss / 1e6 for name, usage in server.usage().items()}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--gpu", action="store_true", help="serve a Llama-3.1-8B shape on a GPU")
    parser.add_argument("--starts", type=int, default=3, metavar="N", help="starts after the first (%(default)s)")
    args = parser.parse_args()
    with scratch_folder() as folder:
        flags: dict[str, object] = {"device": "cpu"}
        if args.gpu:
            make_model(folder / "model", LLAMA_8B)
            (folder / "adapters").mkdir()
            flags = {**local_flags(folder), "device": "cuda", "max-num-seqs": 256, "max-total-tokens": 1024}
        os.environ["LORAX_CACHE"] = str(folder / "kept")
        found = [measure(folder / "log", flags) for _ in range(1 + args.starts)]
    first_goal, goal = GOALS_S[args.gpu]
    records = [Record("first token, first start", found[0][0], "s", "", first_goal, at_most=True)]
    if args.starts:
        seconds = statistics.median(seconds for seconds, _ in found[1:])
        records.append(Record("first token, later starts", seconds, "s", "", goal, at_most=True))
    records += [Record(f"memory after the start, {name}", rss, "MB") for name, rss in found[-1][1].items()]
    report(records, args.json)


if __name__ == "__main__":
    main()
