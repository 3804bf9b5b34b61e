"""`lorax bench`: measures the latency and throughput of a running server."""

import itertools
import math
import random
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from tqdm import tqdm

from lorax_server.cli.flags import Parser, write_json
from lorax_server.cli.http import ApiClient, find_details
from lorax_server.errors import ConfigError, LoraxError

WORDS = ("the", "of", "and", "to", "in", "is", "it", "was", "for", "on", "are", "as", "with", "at", "be", "from", "by")
QUANTILES = (0.5, 0.95, 0.99)
COUNT_FLAGS = {
    "requests": (50, "total number of requests"),
    "concurrency": (8, "concurrent requests"),
    "prompt_tokens": (64, "words per prompt, each about one token"),
    "max_new_tokens": (64, "tokens per completion"),
}


@dataclass
class RequestTiming:
    """Client-side times of one request, in seconds."""

    first_token_s: float | None = None
    total_s: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    error: str = ""

    @property
    def seconds_per_token(self) -> float | None:
        """The mean time between two tokens, or None if fewer than two tokens arrived."""
        if self.first_token_s is None or self.tokens < 2:
            return None
        return (self.total_s - self.first_token_s) / (self.tokens - 1)


def add_bench_flags(parser: Parser) -> None:
    parser.description = "Send concurrent requests to a server and report latency and throughput."
    parser.epilog = (
        "example:\n  lorax bench --requests 200 --concurrency 16 --adapter poet --adapter lawyer --json out.json"
    )
    for name, (default, text) in COUNT_FLAGS.items():
        help_text = f"{text} (default: {default})"
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, metavar="N", help=help_text)
    parser.add_argument(
        "--adapter", action="append", metavar="NAME", help="adapter; repeat to alternate (default: base model)"
    )
    parser.add_argument("--adapter-source", metavar="SOURCE", help="hub, local or s3 (default: the server's)")
    parser.add_json_flag()


def bench(api: ApiClient, args: Namespace) -> int:
    for name in COUNT_FLAGS:
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    api.check()
    started = time.perf_counter()
    with (
        tqdm(total=args.requests, unit="request", disable=not sys.stderr.isatty(), dynamic_ncols=True) as bar,
        ThreadPoolExecutor(min(args.concurrency, args.requests)) as threads,
    ):
        samples = []
        for sample in threads.map(partial(_measure, api), make_bodies(args)):
            samples.append(sample)
            bar.update()
    figures = summarize(samples, time.perf_counter() - started)
    if figures["errors"] == len(samples):
        raise LoraxError(f"all {len(samples)} requests failed: {next(iter(figures['reasons']))}")
    if args.json != "-":
        print(format_figures(figures))
    if args.json:
        write_json(figures, args.json)
    return 1 if figures["errors"] else 0


def make_bodies(args: Namespace) -> Iterator[dict[str, Any]]:
    """Yield request bodies. Each prompt starts with a different number, to avoid prefix cache hits."""
    generator = random.Random(0)  # the same prompts in every run
    adapter_ids = itertools.cycle(args.adapter or [None])
    for number, adapter_id in zip(range(args.requests), adapter_ids, strict=False):
        words = [f"{number}", *generator.choices(WORDS, k=args.prompt_tokens - 1)]
        parameters = {"max_new_tokens": args.max_new_tokens, "ignore_eos_token": True, "details": True}
        adapter = {"adapter_id": adapter_id, "adapter_source": args.adapter_source}
        parameters |= {name: value for name, value in adapter.items() if value is not None}
        yield {"inputs": " ".join(words), "parameters": parameters}


def _measure(api: ApiClient, body: Mapping[str, Any]) -> RequestTiming:
    """Send a streaming request and return its timing."""
    sample, last = RequestTiming(), None
    started = time.perf_counter()
    try:
        for last in api.stream("/generate_stream", body):  # noqa: B007 - used after the loop
            sample.tokens += 1
            if sample.first_token_s is None:
                sample.first_token_s = time.perf_counter() - started
        sample.prompt_tokens = find_details(last).get("prompt_tokens", 0)
    except LoraxError as error:
        sample.error = str(error)
    sample.total_s = time.perf_counter() - started
    return sample


def summarize(samples: Sequence[RequestTiming], wall_s: float) -> dict[str, Any]:
    """Return the number of failed requests for each reason, and the throughput and latency of successful requests."""
    done = [sample for sample in samples if not sample.error]
    tokens = sum(sample.tokens for sample in done)
    return {
        "requests": len(samples),
        "errors": len(samples) - len(done),
        "reasons": dict(Counter(sample.error for sample in samples if sample.error).most_common(5)),
        "wall_s": wall_s,
        "requests_per_s": len(done) / wall_s,
        "tokens_per_s": tokens / wall_s,
        "generated_tokens": tokens,
        "prompt_tokens": sum(sample.prompt_tokens for sample in done),
        "first_token_s": quantiles([sample.first_token_s for sample in done]),
        "per_token_s": quantiles([sample.seconds_per_token for sample in done]),
        "total_s": quantiles([sample.total_s for sample in done]),
    }


def quantiles(values: Sequence[float | None]) -> dict[str, float | None]:
    times = sorted(value for value in values if value is not None)
    return {
        f"p{fraction:.0%}"[:-1]: times[math.ceil(fraction * len(times)) - 1] if times else None
        for fraction in QUANTILES
    }


def format_figures(figures: Mapping[str, Any]) -> str:
    lines = [
        f"{figures['requests']} requests, {figures['errors']} failed, {figures['wall_s']:.2f} s",
        f"{figures['requests_per_s']:.2f} requests/s, {figures['tokens_per_s']:.1f} tokens/s "
        f"({figures['generated_tokens']} generated, {figures['prompt_tokens']} of prompts)",
    ]
    for key, name in (("first_token_s", "first token"), ("per_token_s", "each further token"), ("total_s", "in all")):
        quantile_texts = [
            f"{at} {'-' if value is None else f'{value * 1e3:.1f} ms'}" for at, value in figures[key].items()
        ]
        lines.append(f"{name:20}{'   '.join(quantile_texts)}")
    lines += [f"failed {count} times: {reason}" for reason, count in figures["reasons"].items()]
    return "\n".join(lines)
