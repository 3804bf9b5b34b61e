"""Measure prefill and decode of float32 models on a CPU, and compare with transformers in the same process.

All models are random. Two are small: GPT-2 small and a Llama with 160M parameters. Two have the widths of Gemma-2-9B
and Phi-4, but two layers and a vocabulary of 32,000. Decoding one sequence with these is memory-bound, so it is
measured again with weights that bfloat16 represents exactly, as in published checkpoints: both systems compute in
float32, but this server stores such matrices in half the memory. Each value is the best of several alternating runs.
"""

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import torch
from harness.models import LLAMA_160M, VOCAB, Paged, best_of, build_ours, fill, list_attentions, make_configs
from harness.report import Record, make_parser, report
from transformers import AutoModelForCausalLM, DynamicCache, GPT2Config

CONFIGS = {
    "gpt2": GPT2Config(n_positions=2304),
    "llama-160m": LLAMA_160M,
}
SCALED = {"num_hidden_layers": 2, "vocab_size": VOCAB, "layer_types": None}
Case = tuple[int, int, int, float]  # batch, context, runs, goal
DECODE: list[Case] = [(1, 256, 30, 1.3), (8, 256, 12, 1.0), (32, 256, 6, 1.0), (8, 2048, 8, 1.3)]
PREFILL: Case = (8, 256, 4, 1.0)
SCALED_DECODE: list[Case] = [(1, 256, 8, 1.2), (8, 256, 4, 1.2)]
SCALED_PREFILL: Case = (1, 128, 2, 1.2)
PUBLISHED = "bfloat16 values"


def measure(name: str, config: Any, prefill: Case, decode: Sequence[Case], is_published: bool) -> list[Record]:
    theirs = AutoModelForCausalLM.from_config(config).eval()
    ours = build_ours(config, theirs.state_dict())
    records = [measure_prefill(name, ours, theirs, *prefill)]
    records += [measure_decode(name, ours, theirs, *case) for case in decode]
    if is_published:
        del ours
        for parameter in theirs.parameters():
            parameter.copy_(parameter.bfloat16())
        records.append(
            measure_decode(f"{name}, {PUBLISHED},", build_ours(config, theirs.state_dict()), theirs, *decode[0])
        )
    return records


def measure_prefill(name: str, ours: Any, theirs: Any, batch: int, length: int, runs: int, goal: float) -> Record:
    ids = torch.randint(0, VOCAB, (batch, length))
    paged = Paged(ours, batch, length)

    def mine() -> torch.Tensor:
        return paged.forward(ids, 0)

    def other() -> torch.Tensor:
        return theirs(ids, use_cache=True, logits_to_keep=1).logits[:, 0]  # type: ignore[no-any-return]

    times = {}
    for attention in list_attentions(theirs.config):
        theirs.set_attn_implementation(attention)
        difference = mine() - other()
        times[attention] = best_of(runs, mine, other)
    return compare(f"{name} prefill {batch}x{length}", times, goal, difference)


def measure_decode(name: str, ours: Any, theirs: Any, batch: int, context: int, runs: int, goal: float) -> Record:
    """Measure decode steps with the same random values in both KV caches."""
    ids = torch.randint(0, VOCAB, (batch, 1))
    times = {}
    for attention in list_attentions(theirs.config):
        theirs.set_attn_implementation(attention)
        paged, cache = Paged(ours, batch, context + runs + 1), DynamicCache(config=theirs.config)
        fill(paged, cache, context)
        position = count(context)

        def mine(paged: Paged = paged, position: Iterator[int] = position) -> torch.Tensor:
            return paged.forward(ids, next(position))

        def other(cache: DynamicCache = cache) -> torch.Tensor:
            return theirs(ids, past_key_values=cache, use_cache=True).logits[:, 0]  # type: ignore[no-any-return]

        difference = mine() - other()
        times[attention] = best_of(runs, mine, other)
    return compare(f"{name} decode {batch}@{context}", times, goal, difference)


def compare(name: str, times: dict[str, list[float]], goal: float, difference: torch.Tensor) -> Record:
    """Compare our best time with transformers' faster attention implementation."""
    mine = min(ours for ours, _ in times.values())
    fastest = min(times, key=lambda attention: times[attention][1])
    other, peer = times[fastest][1], f"transformers ({fastest})"
    print(
        f"{name}: {mine * 1e3:.1f} ms, {peer} {other * 1e3:.1f} ms, {other / mine:.2f}x, "
        f"largest difference of logits {float(difference.abs().max()):.1e}",
        flush=True,
    )
    return Record(name, other / mine, "x", peer, goal)


def main() -> None:
    cases = {name: (config, PREFILL, DECODE, False) for name, config in CONFIGS.items()}
    cases |= {name: (config, SCALED_PREFILL, SCALED_DECODE, True) for name, config in make_configs(**SCALED).items()}
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=cases, default=cases, metavar="MODEL", help="%(choices)s")
    args = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.get_num_threads()} threads, float32, torch {torch.__version__}")
    with torch.inference_mode():
        records = [record for name in args.models for record in measure(name, *cases[name])]
    report(records, args.json)


if __name__ == "__main__":
    main()
