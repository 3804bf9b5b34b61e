"""Measure the tokens per second of the bundled demo model with and without speculative decoding.

Each case uses one adapter and prompts that the adapters were not trained on. Before the measurement, `--history` other
prompts are completed, so that the drafter knows earlier completions. The control samples at a high temperature, so that
drafts are always wrong. Cases with and without speculation take turns, and the ratio is the median over rounds.
"""

import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

from harness.report import Record, make_parser, report

from lorax_server.cli.demo import DEMO_FOLDER
from lorax_server.llm import LLM
from lorax_server.types import SamplingParams, StopParams

sys.path.insert(0, str(Path(__file__).parent.parent))  # for the demo's prompts

from demo.skills import write_items

GOALS = {1: 2.0, 8: 1.5}  # speedup by batch size
CONTROL_GOAL = 0.97
ADAPTERS = ("json", "sql", "redact")
GREEDY = (SamplingParams(), StopParams(max_new_tokens=120))
RANDOM = (SamplingParams(do_sample=True, temperature=3.0, seed=1), StopParams(max_new_tokens=60, ignore_eos=True))


class Round(NamedTuple):
    """One measured round for a case."""

    tokens_per_s: float
    completions: list[list[int]]


def make_prompts(seed: int, count: int) -> list[str]:
    texts = [item.text for item in write_items(seed, count, held_out=True)]
    return [f"<|user|>{text}<|end|><|assistant|>" for text in texts]


def run(llm: LLM, prompts: list[str], adapter: str | None, params: tuple[SamplingParams, StopParams]) -> Round:
    started_s = time.monotonic()
    found = llm.generate(prompts, *params, adapter=adapter, progress=False)
    token_ids = [completion.token_ids for completion in found]
    return Round(sum(map(len, token_ids)) / (time.monotonic() - started_s), token_ids)


def measure(batch_size: int, count: int, history: int, rounds: int, tokens: int) -> list[Record]:
    settings = {"device": "cpu", "max_num_seqs": batch_size, "cache_bytes": 2**27}
    records = []
    with (
        LLM(DEMO_FOLDER / "model", DEMO_FOLDER / "adapters", speculative_tokens=0, **settings) as plain,
        LLM(DEMO_FOLDER / "model", DEMO_FOLDER / "adapters", speculative_tokens=tokens, **settings) as speculative,
    ):
        for adapter in (*ADAPTERS, None):
            params = RANDOM if adapter is None else GREEDY
            for llm in (plain, speculative):
                run(llm, make_prompts(1, history), adapter, params)
            before, ratios, rates = speculative.status, [], []
            for number in range(rounds):
                prompts = make_prompts(2 + number, count)
                one, other = (run(llm, prompts, adapter, params) for llm in (plain, speculative))
                assert one.completions == other.completions, "speculation changed a completion"
                ratios.append(other.tokens_per_s / one.tokens_per_s)
                rates.append(other.tokens_per_s)
            after = speculative.status
            drafted = after.drafted_tokens - before.drafted_tokens
            accepted = after.accepted_tokens - before.accepted_tokens
            name = f"{adapter or 'control (random text)'}, batch {batch_size}"
            goal = CONTROL_GOAL if adapter is None else GOALS.get(batch_size)
            records.append(Record(f"{name}: speedup", statistics.median(ratios), "times", "no speculation", goal))
            records.append(Record(f"{name}: speed", statistics.median(rates), "tokens/s"))
            records.append(Record(f"{name}: accepted drafts", accepted / max(drafted, 1), "of draft tokens"))
    return records


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompts", type=int, default=24, help="prompts per round")
    parser.add_argument("--history", type=int, default=96, help="prompts before the measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=8, help="maximum draft tokens (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one short round")
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.history, args.rounds = 2, 2, 1
    records = []
    for batch_size in args.batch_sizes:
        records += measure(batch_size, args.prompts, args.history, args.rounds, args.tokens)
    report(records, args.json)


if __name__ == "__main__":
    main()
