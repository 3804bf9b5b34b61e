"""Measure the time until several adapters have generated their first token for one document, relative to one adapter.

The model is a random Llama. The prompt is a random document, followed by the invocation tokens of the activated LoRA
(aLoRA) adapters. These adapters share the KV blocks of the document. Ordinary adapters with the same weights compute
the document once per adapter. All adapters are loaded before the measurement, and every run uses a new document.
"""

import json
import random
import statistics
import time
from pathlib import Path

import torch
from harness.files import LLAMA_8B, TINY, ModelShape, make_adapters, make_model, scratch_folder
from harness.report import Record, make_parser, report

from lorax_server.llm import LLM
from lorax_server.types import StopParams

LLAMA_25M = ModelShape(4096, 512, 1536, 8, 8, 4, 64, 8192)
INVOCATION = [1001, 1002, 1003, 1004]
GOAL = 1.3


def write_models(folder: Path, shape: ModelShape, count: int) -> tuple[list[str], list[str]]:
    """Write a model and its adapters. Return the names of the aLoRA adapters and of the ordinary adapters."""
    make_model(folder / "model", shape)
    names = make_adapters(folder / "adapters", shape, 2 * count)
    activated, ordinary = names[:count], names[count:]
    for name in activated:
        path = folder / "adapters" / name / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"alora_invocation_tokens": INVOCATION}))
    return activated, ordinary


def time_first_tokens(llm: LLM, seed: int, num_tokens: int, adapters: list[str]) -> float:
    """Return the seconds until every adapter has generated its first token for a new document."""
    choice = random.Random(seed)
    prompt = [choice.randrange(1000) for _ in range(num_tokens - len(INVOCATION))] + INVOCATION
    started_s = time.perf_counter()
    llm.generate([prompt], stop=StopParams(max_new_tokens=1), adapter=adapters, progress=False)
    return time.perf_counter() - started_s


def measure(llm: LLM, kind: str, adapters: list[str], num_tokens: int, rounds: int, goal: float | None) -> list[Record]:
    llm.generate([[5]] * len(adapters), stop=StopParams(max_new_tokens=1), adapter=adapters, progress=False)  # load
    time_first_tokens(llm, 2 * rounds, num_tokens, adapters)  # warm up
    one, together, num_computed = [], [], 0
    for number in range(rounds):  # alternating, because the speed of the machine varies
        one.append(time_first_tokens(llm, 2 * number, num_tokens, adapters[:1]))
        before = llm.status.computed_tokens
        together.append(time_first_tokens(llm, 2 * number + 1, num_tokens, adapters))
        num_computed += llm.status.computed_tokens - before
    ratio = statistics.median(each / single for each, single in zip(together, one, strict=True))
    case = f"{len(adapters)} {kind} adapters, {num_tokens} tokens"
    return [
        Record(f"{case}: time to all first tokens", ratio, "times", "one adapter", goal, at_most=True),
        Record(f"{case}: computed tokens", num_computed / rounds / num_tokens, "times", "one adapter"),
        Record(f"{case}: one adapter", statistics.median(one), "s"),
        Record(f"{case}: all adapters", statistics.median(together), "s"),
    ]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4000, help="prompt tokens (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--size", choices=["tiny", "25m", "8b"], default="25m", help="model size (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="one round with 600 tokens")
    args = parser.parse_args()
    if args.quick:
        args.tokens, args.rounds = 600, 1
    sizes = {"tiny": TINY._replace(max_position_embeddings=8192), "25m": LLAMA_25M, "8b": LLAMA_8B}
    shape, is_gpu = sizes[args.size], torch.cuda.is_available()
    settings = {} if is_gpu else {"device": "cpu", "cache_bytes": 2**30}
    with scratch_folder() as folder:
        activated, ordinary = write_models(folder, shape, args.adapters)
        with LLM(folder / "model", folder / "adapters", max_length=args.tokens + 64, **settings) as llm:
            records = measure(llm, "aLoRA", activated, args.tokens, args.rounds, GOAL)
            records += measure(llm, "ordinary", ordinary, args.tokens, max(1, args.rounds // 2), None)
    report(records, args.json)


if __name__ == "__main__":
    main()
