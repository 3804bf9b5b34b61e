"""Decode steps of a Gemma-2-9B and a Phi-4 on one GPU through `LLM`, against transformers in the same run.

Models and adapters are random, in bfloat16, and real files. Both sides decode 16 sequences with prompts of 128 tokens.
Our steps are timed as in `gpu_decode.py`: scheduler, sampling and text are part of them. A step of transformers is one
forward of its model with its own cache, and the choice of the best tokens; the faster of its ways to attend counts. It
has no adapters in either comparison. Answers are compared with transformers and PEFT in float32, token by token.
"""

import argparse
import gc
import logging
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_decode import DecodeCase, Measured, measure
from gpu_engine import Bench, StepClock, describe_device, make_parser, plain_adapters
from gpu_model import Pool, Stored, write_adapters, write_model
from model_shapes import TINY, list_attentions, make_configs
from report import Record, report

from lorax_server.llm import LLM

ROWS, PROMPT, STEPS, RUNS, WARM_UP = 16, 128, 64, 3, 8
SHORT_STEPS, SHORT_RUNS = 8, 1  # of tiny models
MAX_LENGTH = 512
MEMORY = {"cache_bytes": 8 * 2**30, "adapter_bytes": 4 * 2**30}  # transformers needs room as well
GOAL = 5.0  # times the speed of transformers, without adapters
CASES = (DecodeCase("base", ROWS, ()), DecodeCase("adapters", ROWS, plain_adapters(ROWS)))
CHECKED, CHECKED_TOKENS = (None, "adapter-000", "adapter-001", None), 32

Shapes = dict[str, tuple[int, ...]]


def list_shapes(config: Any) -> Shapes:
    """Return the shapes of a model's parameters by name; a tied head has none of its own."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    return shapes


def make_tensors(config: Any, shapes: Shapes) -> Iterator[tuple[str, Stored]]:
    """Draw matrices about 0, and norms about 1: Gemma stores those less one.

    The last norm of a model with a tied head is about 0: otherwise each token would be followed by itself, whatever an
    adapter changes.
    """
    pool, choice = Pool(max(torch.Size(shape).numel() for shape in shapes.values())), random.Random(0)
    for name, shape in shapes.items():
        if name == "model.norm.weight" and config.tie_word_embeddings:
            drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0)) - 1
            yield name, Stored(shape, memoryview(drawn.bfloat16().view(torch.uint8).numpy()))  # type: ignore[arg-type]
        elif len(shape) > 1 or config.model_type.startswith("gemma"):
            yield name, Stored(shape, pool.take(choice, shape))
        else:
            ones: Any = torch.ones(shape, dtype=torch.bfloat16).view(torch.uint8).numpy()
            yield name, Stored(shape, memoryview(ones))


def make_files(folder: Path, config: Any) -> None:
    shapes = list_shapes(config)
    settings = config.to_dict() | {"dtype": "bfloat16"}
    write_model(folder / "model", make_tensors(config, shapes), settings)
    linears = {name.removesuffix(".weight"): shape for name, shape in shapes.items() if ".layers." in name}
    write_adapters(folder / "adapters", {name: shape for name, shape in linears.items() if len(shape) == 2}, ROWS)


def measure_ours(
    folder: Path, config: Any, steps: int, num_runs: int, **settings: Any
) -> tuple[list[float], list[Any]]:
    """Return the milliseconds of a step in each case, and answers as samples to be checked."""
    from gpu_reference import Sample

    begin = time.monotonic()
    with LLM(folder / "model", folder / "adapters", max_rows=ROWS, max_length=MAX_LENGTH, **settings) as llm:
        print(f"engine started in {time.monotonic() - begin:.1f} s", flush=True)
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
    """Return the milliseconds of a step of transformers, and its fastest way to attend."""
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
        begin = time.perf_counter()
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        ids = logits[:, -1].argmax(dim=-1, keepdim=True)
        ids.cpu()  # waits, as a text that is shown would
        if step > WARM_UP:
            times.append(time.perf_counter() - begin)
    return times


def check(folder: Path, samples: list[Any], model: Any, name: str) -> list[Record]:
    from gpu_reference import compare

    agreement = compare(folder, samples, model)
    tokens, peer = agreement.num_tokens, "transformers and PEFT in float32"
    print(
        f"{name}: {agreement.num_equal} of {tokens} tokens have the best score in float32, {agreement.peer_equal} of "
        f"those that transformers chooses in bfloat16; {agreement.num_near} are near it: the furthest is "
        f"{agreement.largest_gap:.3f} below, {agreement.tolerance:.3f} allowed; had the reference no adapters, "
        f"{agreement.num_near_base} of {agreement.num_adapted} would be near",
        flush=True,
    )
    near = Record(f"{name}, checked tokens within rounding of the best", agreement.num_near / tokens, "share", peer, 1)
    return [near, Record("  that are the best", agreement.num_equal / tokens, "share", peer, None)]


def run(name: str, config: Any, args: argparse.Namespace) -> list[Record]:
    """Measure one model in all ways, and check its answers."""
    from gpu_reference import load_model

    steps, num_runs = (SHORT_STEPS, SHORT_RUNS) if args.tiny else (STEPS, RUNS)
    memory, begin = Path("/dev/shm"), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lorax-bench-", dir=memory if memory.is_dir() else None) as scratch:
        folder = Path(scratch)
        make_files(folder, config)
        print(f"\n{name}: files made in {time.monotonic() - begin:.1f} s", flush=True)
        (base, adapted), samples = measure_ours(folder, config, steps, num_runs, **({} if args.tiny else MEMORY))
        gc.collect()
        torch.cuda.empty_cache()  # for transformers
        model = load_model(folder / "model")
        peer_ms, attention = measure_peer(model, steps)
        peer, goal = f"transformers ({attention}), {peer_ms:.2f} ms", None if args.tiny else GOAL
        records = [
            Record(f"{name}, {CASES[0].name}", peer_ms / base, "x", peer, goal),
            Record(f"  {CASES[1].name}", peer_ms / adapted, "x", f"{peer} without adapters", None),
            Record("  a step of ours", base, "ms", "", None),
            Record("  a step of ours with adapters", adapted, "ms", "", None),
        ]
        model.set_attn_implementation("eager")
        records += check(folder, samples, model, name)
    print(f"{name}: {time.monotonic() - begin:.1f} s in all", flush=True)
    return records


def main() -> None:
    parser = make_parser(__doc__, has_folder=False)
    parser.add_argument("--models", nargs="+", metavar="MODEL", help="of Gemma-2-9B, Phi-4")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    torch.manual_seed(0)
    configs = make_configs(**(TINY if args.tiny else {}))
    unknown = set(args.models or ()) - set(configs)
    if unknown:
        parser.error(f"there is no model {', '.join(sorted(unknown))}")
    print(f"{describe_device()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    records: list[Record] = []
    for name, config in configs.items():
        if args.models is None or name in args.models:
            records += run(name, config, args)
    report(records, args.json)


if __name__ == "__main__":
    main()
