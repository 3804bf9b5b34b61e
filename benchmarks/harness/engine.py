"""An `LLM` with random model files whose engine steps are timed."""

import argparse
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from harness import report
from harness.files import (
    ALL_MODULES,
    LLAMA_8B,
    TINY,
    ModelShape,
    make_adapter,
    make_adapters,
    make_model,
    scratch_folder,
)
from lorax_server.llm import LLM
from lorax_server.types import Output, Request, SamplingParams, StopParams

COUNTING_MODEL = "counting-model"  # see `make_model`
FIRST_WORD = 256  # the first token id that is not a byte
MAX_NUM_SEQS = 256
ADAPTER_BYTES = 24 * 2**30  # device memory for 256 adapters of rank 16
ADAPTER_HOST_BYTES = 34 * 2**30
# Bytes per weight of linear layers on a GPU for values of `--quantize`, including float32 scales.
QUANTIZE_BYTES = {"int8": 1.125, "int4": 0.625, "fp8": 1.0625, "fp8-dynamic": 1.03, "bitsandbytes-nf4": 0.5625}


class Adapter(NamedTuple):
    """Describes a random adapter."""

    name: str
    rank: int = 16
    modules: tuple[str, ...] = ALL_MODULES
    use_dora: bool = False

    @property
    def is_plain(self) -> bool:
        return self.name.startswith("adapter-")

    def count_bytes(self, shape: ModelShape) -> int:
        """Count the bytes that a step reads."""
        widths = sum(sum(shape.linears[module]) for module in self.modules)
        factors = sum(shape.linears[module][0] for module in self.modules) if self.use_dora else 0
        return 2 * shape.num_hidden_layers * (self.rank * widths + factors)


def plain_adapters(count: int) -> tuple[Adapter, ...]:
    return tuple(Adapter(f"adapter-{i:03}") for i in range(count))


class Mark(NamedTuple):
    """A step's end time, and the number of sequences that received a token."""

    at: float
    num_tokens: int


class StepClock:
    """Records the end of every engine step. The time that `LLM` spends between two steps counts toward the
    second step.
    """

    def __init__(self, llm: LLM) -> None:
        self.marks: list[Mark] = []
        self.observe: Callable[[Mark, list[Output]], None] | None = None  # called after every step
        self._step = llm._engine.step
        llm._engine.step = self._timed_step  # type: ignore[method-assign]

    def _timed_step(self) -> list[Output]:
        outputs = self._step()
        mark = Mark(time.perf_counter(), len(outputs))
        self.marks.append(mark)
        if self.observe is not None:
            self.observe(mark, outputs)
        return outputs

    @contextmanager
    def observed(self, observe: Callable[[Mark, list[Output]], None]) -> Iterator[None]:
        self.observe = observe
        try:
            yield
        finally:
            self.observe = None


class Bench(NamedTuple):
    """A running engine with random model files."""

    llm: LLM
    clock: StepClock
    shape: Any  # a `ModelShape`, or a config of transformers
    folder: Path
    quantize: str | None = None

    def generate(
        self, prompts: Sequence[list[int]], max_new_tokens: int, adapters: Sequence[str | None], **sampling: Any
    ) -> list[list[int]]:
        """Generate exactly `max_new_tokens` tokens for each prompt."""
        stop = StopParams(max_new_tokens=max_new_tokens, ignore_eos=True)
        completions = self.llm.generate(prompts, SamplingParams(**sampling), stop, adapter=adapters, progress=False)
        return [completion.token_ids for completion in completions]

    def load(self, adapters: Iterable[Adapter]) -> float:
        """Load adapters to the device by sending requests that use them. Return the time in seconds."""
        names = [adapter.name for adapter in adapters]
        start_time = time.monotonic()
        self.generate([[FIRST_WORD]] * len(names), 1, names)
        return time.monotonic() - start_time

    def draw_prompts(self, count: int, length: int, seed: int) -> list[list[int]]:
        choice = random.Random(seed)
        last_word = self.shape.vocab_size - 257 if self.shape is LLAMA_8B else self.shape.vocab_size * 7 // 8
        return [[choice.randint(FIRST_WORD, last_word) for _ in range(length)] for _ in range(count)]

    def add_to_engine(self, first_id: int, prompts: Sequence[list[int]], max_new_tokens: int) -> None:
        """Add requests directly to the engine, bypassing `LLM`."""
        stop = StopParams(max_new_tokens=max_new_tokens, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            self.llm._engine.add(Request(first_id + number, prompt, SamplingParams(), stop))


def make_parser(description: str | None, has_folder: bool = True) -> argparse.ArgumentParser:
    parser = report.make_parser(description)
    if has_folder:
        parser.add_argument(
            "--folder", type=Path, help="model and adapter files, created if missing (default: temporary)"
        )
    parser.add_argument("--tiny", action="store_true", help="tiny model, for a machine without a GPU")
    return parser


def add_quantize_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quantize", choices=QUANTIZE_BYTES, help="quantize the weights while loading")


@contextmanager
def open_bench(
    args: argparse.Namespace, adapters: Sequence[Adapter], model: str = "model", **settings: Any
) -> Iterator[Bench]:
    """Create missing model and adapter files, and start an engine. `model` is the model's subfolder."""
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)6d ms  %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    print(f"{describe_device()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    shape = TINY if args.tiny else LLAMA_8B
    with scratch_folder() as scratch:
        folder = args.folder or scratch
        make_files(folder, shape, adapters, model)
        if not args.tiny:
            settings |= {"adapter_bytes": ADAPTER_BYTES, "adapter_host_bytes": ADAPTER_HOST_BYTES}
        start_time = time.monotonic()
        quantize = getattr(args, "quantize", None)  # only some scripts have this flag
        settings |= {"max_num_seqs": MAX_NUM_SEQS, "quantize": quantize}
        with LLM(folder / model, folder / "adapters", **settings) as llm:
            print(f"engine started in {time.monotonic() - start_time:.1f} s", flush=True)
            yield Bench(llm, StepClock(llm), shape, folder, quantize)


def make_files(folder: Path, shape: ModelShape, adapters: Sequence[Adapter], model: str = "model") -> None:
    """Write the model and the adapters that do not exist yet. The adapter name seeds its weights.

    `model` is the model's subfolder: "model", or `COUNTING_MODEL`.
    """
    if not (folder / model / "tokenizer_config.json").exists():  # the last file that is written
        make_model(folder / model, shape, is_counting=model == COUNTING_MODEL)
    missing = [one for one in adapters if not (folder / "adapters" / one.name / "adapter_config.json").exists()]
    (folder / "adapters").mkdir(exist_ok=True)
    if any(one.is_plain for one in missing):
        make_adapters(folder / "adapters", shape, sum(one.is_plain for one in adapters))

    def make(one: Adapter) -> None:
        seed = int.from_bytes(one.name.encode(), "little")
        make_adapter(folder / "adapters" / one.name, shape, seed, one.rank, one.modules, one.use_dora)

    with ThreadPoolExecutor() as threads:
        list(threads.map(make, [one for one in missing if not one.is_plain]))


def describe_device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
