"""Measure decode steps with the Gemma-2-9B and Phi-4 shapes on one GPU through `LLM`, and compare with transformers.

Models and adapters are random bfloat16 files. Both systems run in the same process and decode 16 sequences after
prompts of 128 tokens. Our steps are timed as in `gpu_decode.py`, with scheduler, sampling and text. A step in
transformers is a forward pass with its KV cache and an argmax, with the faster of its attention implementations.
transformers runs without adapters in both comparisons. Tokens are compared with transformers and PEFT in float32.
"""

import argparse
import gc
import logging
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_decode import DecodeCase, Measured, measure
from harness.engine import Bench, StepClock, describe_device, make_parser, plain_adapters
from harness.files import Pool, Stored, scratch_folder, write_adapters, write_model
from harness.models import list_attentions, make_configs
from harness.report import Record, report

from lorax_server.llm import LLM

ROWS, PROMPT, STEPS, RUNS, WARM_UP = 16, 128, 64, 3, 8
SHORT_STEPS, SHORT_RUNS = 8, 1  # with tiny models
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MAX_LENGTH = 512
MEMORY = {"cache_bytes": 8 * 2**30, "adapter_bytes": 4 * 2**30}  # leaves memory for transformers
GOAL = 5.0  # speed relative to transformers, without adapters
CASES = (DecodeCase("base", ROWS, ()), DecodeCase("adapters", ROWS, plain_adapters(ROWS)))
CHECKED, CHECKED_TOKENS = (None, "adapter-000", "adapter-001", None), 32

Shapes = dict[str, tuple[int, ...]]


def list_shapes(config: Any) -> Shapes:
    """Return a map from parameter name to shape. It does not contain a tied LM head."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    return shapes


def make_tensors(config: Any, shapes: Shapes) -> Iterator[tuple[str, Stored]]:
    """Draw matrices around 0 and norm weights around 1 (Gemma stores norm weights minus 1).

    The last norm of a model with a tied head is around 0. Otherwise, the model would repeat each token, regardless of
    the adapter.
    """
    pool, choice = Pool(max(torch.Size(shape).numel() for shape in shapes.values())), random.Random(0)
    for name, shape in shapes.items():
        if name == "model.norm.weight" and config.tie_word_embeddings:
            yield name, Stored.from_tensor(torch.randn(shape, generator=torch.Generator().manual_seed(0)) - 1)
        elif len(shape) > 1 or config.model_type.startswith("gemma"):
            yield name, pool.take(choice, shape)
        else:
            yield name, Stored.from_tensor(torch.ones(shape))


def make_files(folder: Path, config: Any) -> None:
    shapes = list_shapes(config)
    settings = config.to_dict() | {"dtype": "bfloat16"}
    write_model(folder / "model", make_tensors(config, shapes), settings)
    linears = {name.removesuffix(".weight"): shape for name, shape in shapes.items() if ".layers." in name}
    write_adapters(folder / "adapters", {name: shape for name, shape in linears.items() if len(shape) == 2}, ROWS)


def measure_ours(
    folder: Path, config: Any, steps: int, num_runs: int, **settings: Any
) -> tuple[list[float], list[Any]]:
    """Return the step time of each case, and completions to check."""
    from harness.reference import Sample

    start_time = time.monotonic()
    with LLM(folder / "model", folder / "adapters", max_num_seqs=ROWS, max_length=MAX_LENGTH, **settings) as llm:
        print(f"engine started in {time.monotonic() - start_time:.1f} s", flush=True)
        bench, found = Bench(llm, StepClock(llm), config, folder), []
        for case in CASES:
            bench.load(case.adapters)
            runs: list[Measured] = [measure(bench, case, steps) for _ in range(num_runs)]
            found.append(statistics.median(run.ms for run in runs))
            print(f"{case.name}: {' '.join(f'{run.ms:.2f}' for run in runs)} ms", flush=True)
        prompts = bench.draw_prompts(len(CHECKED), PROMPT, seed=1)
        answers = bench.generate(prompts, CHECKED_TOKENS, CHECKED)
    return found, [Sample(*one) for one in zip(CHECKED, prompts, answers, strict=True)]


@torch.inference_mode()
def measure_peer(model: Any, steps: int) -> tuple[float, str]:
    """Return transformers' step time, and the name of its fastest attention implementation."""
    found = {}
    for attention in list_attentions(model.config):
        model.set_attn_implementation(attention)
        times = time_steps(model, steps)
        found[attention] = statistics.median(times) * 1e3
        print(f"transformers, {attention}: {found[attention]:.2f} ms", flush=True)
    fastest = min(found, key=lambda attention: found[attention])
    return found[fastest], fastest


def time_steps(model: Any, steps: int) -> list[float]:
    from transformers import DynamicCache

    ids = torch.randint(256, model.config.vocab_size, (ROWS, PROMPT), device=model.device)
    cache, times = DynamicCache(config=model.config), []
    for step in range(1 + WARM_UP + steps):  # the first reads the prompts
        start_time = time.perf_counter()
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        ids = logits[:, -1].argmax(dim=-1, keepdim=True)
        ids.cpu()  # wait for the step
        if step > WARM_UP:
            times.append(time.perf_counter() - start_time)
    return times


def run(name: str, config: Any, args: argparse.Namespace) -> list[Record]:
    """Measure one model and check its completions."""
    from harness.reference import compare, load_model

    steps, num_runs = (SHORT_STEPS, SHORT_RUNS) if args.tiny else (STEPS, RUNS)
    with scratch_folder() as folder:
        make_files(folder, config)
        print(f"\n{name}", flush=True)
        (base, adapted), samples = measure_ours(folder, config, steps, num_runs, **({} if args.tiny else MEMORY))
        gc.collect()
        torch.cuda.empty_cache()  # for transformers
        model = load_model(folder / "model")
        peer_ms, attention = measure_peer(model, steps)
        peer, goal = f"transformers ({attention}), {peer_ms:.2f} ms", None if args.tiny else GOAL
        records = [
            Record(f"{name}, {CASES[0].name}", peer_ms / base, "x", peer, goal),
            Record(f"  {CASES[1].name}", peer_ms / adapted, "x", f"{peer} without adapters"),
            Record("  a step of ours", base, "ms"),
            Record("  a step of ours with adapters", adapted, "ms"),
        ]
        model.set_attn_implementation("eager")
        records += compare(folder, samples, model).make_records(name)
    return records


def main() -> None:
    parser = make_parser(__doc__, has_folder=False)
    parser.add_argument("--models", nargs="+", choices=list(make_configs()), metavar="MODEL", help="%(choices)s")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    torch.manual_seed(0)
    configs = make_configs(**(TINY if args.tiny else {}))
    print(f"{describe_device()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    records: list[Record] = []
    for name, config in configs.items():
        if args.models is None or name in args.models:
            records += run(name, config, args)
    report(records, args.json)


if __name__ == "__main__":
    main()
