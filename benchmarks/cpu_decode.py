"""Measure decode with a small Llama on a CPU, with and without adapters. Compare with transformers, PEFT and llama.cpp.

The model is a Llama with 135M random parameters, with rank-16 adapters on all linear layers. Values are tokens per
second in greedy decode steps after 90-token prompts: the best of several rounds in which all systems alternate.
bfloat16 is measured if torch reports that the CPU has fast bfloat16, or with `--dtypes`.

`LLM` is the complete engine with scheduler, sampling and text. transformers uses its faster attention implementation;
PEFT receives each sequence's adapter name. `--llama-cpp FOLDER` is a checkout of llama.cpp with its converters and
`build/bin/llama-batched-bench`, which feeds random tokens instead of sampling (slightly less work). The released
program ignores `--lora`; a patched build that loads the adapter and prints "loaded lora" is also measured with the
adapter.

The last part measures the bundled model in `LLM`: the time between two tokens of a single request, and of one of six
concurrent requests with different adapters.
"""

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cpu_multi_lora import write_adapters
from harness.engine import FIRST_WORD, StepClock
from harness.files import write_tokenizer
from harness.models import SIZE_135M
from harness.report import Record, make_parser, report
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig
from transformers.utils import logging as transformers_logging

from lorax_server.cli.demo import DEMO_FOLDER as DEMO
from lorax_server.cli.demo import DEMO_SETTINGS
from lorax_server.llm import LLM
from lorax_server.types import StopParams

LLAMA_135M = LlamaConfig(**SIZE_135M, max_position_embeddings=2048, tie_word_embeddings=True)
PROMPT, TOKENS, LLAMA_CPP_TOKENS, RANK = 90, 16, 32, 16
CACHE_BYTES = 2**30
ATTENTIONS = ("sdpa", "eager")
# Printed by llama.cpp if it uses the adapter.
LORA_IS_LOADED = "loaded lora"
NO_VOCABULARY = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import convert_hf_to_gguf
from conversion.llama import LlamaModel
LlamaModel.set_vocab = LlamaModel._set_vocab_none
convert_hf_to_gguf.main()
"""
DEMO_PROMPT = "Klonny Bardwell of Spigford bought 12 pink kites on Tuesday for 45 coins. She was truly delighted."
DEMO_TOKENS = 64
DEMO_GOALS = {1: 2.0, 6: 4.0}


class Case(NamedTuple):
    """A batch of sequences with different adapters. If there are 0 adapters, all sequences use the base model."""

    batch: int
    adapters: int = 0

    def __str__(self) -> str:
        return f"{self.batch}" + {0: "", 1: ", one LoRA"}.get(self.adapters, f" over {self.adapters} LoRAs")

    @property
    def indices(self) -> list[int]:
        """The adapter index of each sequence, sorted in the same way as in the engine. Index 0 is the base model."""
        return sorted(i % self.adapters + 1 if self.adapters else 0 for i in range(self.batch))


BASE = (Case(1), Case(8), Case(32))
ADAPTED = (Case(1, 1), Case(8, 1), Case(8, 4))
CASES = BASE + ADAPTED
Speeds = dict[Case, float]  # tokens per second


class Run(NamedTuple):
    """The tokens of each sequence, and the total time of all steps except the first step, in seconds."""

    tokens: list[list[int]]
    seconds: float


Decode = Callable[[], Run]

# Goals, as ratios to peers.
OVER_LLAMA_CPP = {
    "float32": {Case(1): 33 / 32, Case(8): 135 / 129, Case(32): 240 / 228},
    "bfloat16": {Case(1): 58 / 58, Case(8): 200 / 147, Case(32): 450 / 205},
}
OVER_TRANSFORMERS = {"float32": {}, "bfloat16": {Case(8): 1.0}}
OF_OWN_BASE = {
    "float32": {Case(1, 1): 30 / 33, Case(8, 1): 125 / 135, Case(8, 4): 110 / 135},
    "bfloat16": {Case(1, 1): 52 / 58, Case(8, 1): 185 / 200, Case(8, 4): 165 / 200},
}


# --- Ours, transformers and PEFT --------------------------------------------------------------------------------------


class LoraxEngine:
    """The engine of lorax_server, used through `LLM`."""

    def __init__(self, folder: Path, dtype: str) -> None:
        max_batch = max(case.batch for case in CASES)
        self.llm = LLM(
            folder, folder / "adapters", device="cpu", dtype=dtype, max_num_seqs=max_batch, cache_bytes=CACHE_BYTES
        )
        self._clock = StepClock(self.llm)

    def decode(self, case: Case, names: Sequence[str], prompts: Sequence[list[int]]) -> Run:
        """Run one batch and time its steps, starting after the first step in which every sequence gets a token."""
        self._clock.marks.clear()
        stop = StopParams(max_new_tokens=1 + TOKENS + case.batch, ignore_eos=True)  # sequences start at different steps
        adapters = [names[index - 1] if index else None for index in case.indices]
        answers = self.llm.generate(prompts, stop=stop, adapter=adapters, progress=False)
        marks = self._clock.marks
        first = next(i for i, mark in enumerate(marks) if mark.num_tokens == case.batch)
        last = first + TOKENS
        assert all(mark.num_tokens == case.batch for mark in marks[first : last + 1])
        return Run([list(answer.token_ids[: 1 + TOKENS]) for answer in answers], marks[last].at - marks[first].at)


class PeerRun:
    """A transformers or PEFT run after a case's prefill."""

    def __init__(self, model: Any, names: Sequence[str], case: Case, prompts: Sequence[list[int]]) -> None:
        self._model, self._cache = model, DynamicCache(config=model.config)
        self._more = {"adapter_names": [names[index - 1] for index in case.indices]} if case.adapters else {}
        self._first = self._forward(torch.tensor(prompts))

    def decode(self) -> Run:
        chosen = [self._first]
        start = time.perf_counter()
        for _ in range(TOKENS):
            chosen.append(self._forward(chosen[-1][:, None]))
        seconds = time.perf_counter() - start
        self._cache.crop(-TOKENS)
        return Run(torch.stack(chosen, 1).tolist(), seconds)

    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self._model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1, **self._more).logits
        chosen: torch.Tensor = logits[:, -1].argmax(-1)
        return chosen


def copy_with_attention(model: Any, attention: str) -> Any:
    """Return a copy of a model that shares its tensors and uses another attention implementation."""
    shared = deepcopy(model, {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())})
    shared.set_attn_implementation(attention)
    return shared


class CaseRuns(NamedTuple):
    """Functions that run a case with `LLM` and with the faster peer, and the peer's name."""

    run_ours: Decode
    run_peer: Decode
    peer: str


def warm_up(case: Case, decode_ours: Decode, decode_peers: dict[str, Decode]) -> CaseRuns:
    """Run the case with `LLM` and all peers once, compare tokens, and choose the fastest peer."""
    runs = {attention: decode() for attention, decode in decode_peers.items()}
    fastest = min(runs, key=lambda attention: runs[attention].seconds)
    pairs = list(zip(chain(*decode_ours().tokens), chain(*runs[fastest].tokens), strict=True))
    same = sum(one == two for one, two in pairs) / len(pairs)
    peer = f"transformers{' + PEFT' if case.adapters else ''} ({fastest})"
    print(f"{case}: {same:.1%} of the tokens match {peer}", flush=True)
    return CaseRuns(decode_ours, decode_peers[fastest], peer)


def prepare(base: Any, engine: LoraxEngine, adapted: Any, names: Sequence[str]) -> dict[Case, CaseRuns]:
    """Prepare `LLM` and the peers for all cases. `adapted` is the model with PEFT layers."""
    rng, case_runs = random.Random(0), {}
    copies = {
        attention: (copy_with_attention(base, attention), copy_with_attention(adapted, attention))
        for attention in ATTENTIONS
    }
    for case in CASES:
        last = LLAMA_135M.vocab_size * 7 // 8
        prompts = [[rng.randint(FIRST_WORD, last) for _ in range(PROMPT)] for _ in range(case.batch)]
        decode_peers = {
            attention: PeerRun(models[case.adapters > 0], names, case, prompts).decode
            for attention, models in copies.items()
        }
        case_runs[case] = warm_up(case, partial(engine.decode, case, names, prompts), decode_peers)
    return case_runs


# --- llama.cpp --------------------------------------------------------------------------------------------------------


class LlamaCpp:
    """A built checkout of llama.cpp, with the model and an adapter in GGUF format."""

    def __init__(self, checkout: Path, folder: Path, kind: str) -> None:
        """Convert the model and an adapter. `folder` contains the model and `adapters/`; `kind` is the storage type."""
        self._program = checkout / "build/bin/llama-batched-bench"
        if not self._program.is_file():
            raise SystemExit(f"{self._program} is missing: build it")
        self._model, self._adapter = folder / f"{kind}.gguf", folder / "adapter.gguf"
        out = ["--outtype", kind, "--outfile", self._model]
        run([sys.executable, "-c", NO_VOCABULARY, checkout, *out, folder])
        adapter = next(path for path in sorted((folder / "adapters").iterdir()) if path.is_dir())
        lora = [checkout / "convert_lora_to_gguf.py", "--base", folder, "--outtype", "f32", "--outfile", self._adapter]
        run([sys.executable, *lora, adapter])

    def measure(self) -> Speeds:
        """Run all cases that llama.cpp can batch."""
        speeds = {Case(batch): speed for batch, speed in self._run(BASE).items()}
        adapted = self._run([case for case in ADAPTED if case.adapters == 1], "--lora", self._adapter)
        return speeds | {Case(batch, 1): speed for batch, speed in adapted.items()}

    def _run(self, cases: Sequence[Case], *more: str | Path) -> dict[int, float]:
        """Return tokens per second, keyed by batch size, or an empty result if the adapter was not loaded."""
        max_batch = max(case.batch for case in cases)
        threads, batches = torch.get_num_threads(), ",".join(str(case.batch) for case in cases)
        # All sequences share one prompt, because only decode steps are measured.
        sizes = (
            f"-pps -npp {PROMPT} -ntg {LLAMA_CPP_TOKENS} -npl {batches} -c {max_batch * (PROMPT + LLAMA_CPP_TOKENS)}"
        )
        flags = f"{sizes} -b 2048 -ub 512 -t {threads} -tb {threads} --output-format jsonl".split()
        printed = run([self._program, "-m", self._model, *flags, *more])
        if more and LORA_IS_LOADED not in printed:
            print("llama.cpp with an adapter is skipped: llama-batched-bench did not load it")
            return {}
        found = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
        return {row["pl"]: row["speed_tg"] for row in found}


def run(command: Sequence[object]) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command[0]} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout + done.stderr


# --- Comparison -------------------------------------------------------------------------------------------------------


def measure(dtype: str, rounds: int, checkout: Path | None) -> list[Record]:
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(LLAMA_135M, dtype=getattr(torch, dtype)).eval()
    llama_cpp: Speeds = {}
    our_speeds, peer_speeds = dict.fromkeys(CASES, 0.0), dict.fromkeys(CASES, 0.0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base.save_pretrained(folder)
        write_tokenizer(folder, LLAMA_135M.vocab_size)
        plain = deepcopy(base)  # PEFT changes `base`
        adapted, folders = write_adapters(base, folder / "adapters", RANK, max(case.adapters for case in CASES))
        engine = LoraxEngine(folder, dtype)
        names = [adapter.name for adapter in folders]
        case_runs = prepare(plain, engine, adapted.to(getattr(torch, dtype)), names)  # PEFT creates float32 adapters
        peer = LlamaCpp(checkout, folder, {"float32": "f32", "bfloat16": "bf16"}[dtype]) if checkout else None
        for _ in range(rounds):
            for case, case_run in case_runs.items():
                speeds = [case.batch * TOKENS / decode().seconds for decode in (case_run.run_ours, case_run.run_peer)]
                our_speeds[case], peer_speeds[case] = (
                    max(our_speeds[case], speeds[0]),
                    max(peer_speeds[case], speeds[1]),
                )
            for case, speed in peer.measure().items() if peer else ():
                llama_cpp[case] = max(speed, llama_cpp.get(case, 0.0))
        engine.llm.close()
    return compare(
        dtype, our_speeds, peer_speeds, llama_cpp, {case: case_run.peer for case, case_run in case_runs.items()}
    )


def compare(
    dtype: str, our_speeds: Speeds, peer_speeds: Speeds, llama_cpp: Speeds, peers: dict[Case, str]
) -> list[Record]:
    records = []
    for case in CASES:
        name, speed = f"{dtype} {case}", our_speeds[case]
        records.append(Record(name, speed, "tokens/s"))
        goal = OVER_TRANSFORMERS[dtype].get(case)
        records.append(Record(f"{name}, over transformers", speed / peer_speeds[case], "x", peers[case], goal))
        if case in llama_cpp:
            goal = OVER_LLAMA_CPP[dtype].get(case)
            records.append(Record(f"{name}, over llama.cpp", speed / llama_cpp[case], "x", "llama.cpp", goal))
        if case.adapters:
            part, goal = speed / our_speeds[Case(case.batch)], OF_OWN_BASE[dtype][case]
            records.append(Record(f"{name}, of own base", part, "of tokens/s", "our base model", goal))
    return records


# --- Bundled model ----------------------------------------------------------------------------------------------------


def measure_demo(rounds: int) -> list[Record]:
    names = sorted(path.name for path in (DEMO / "adapters").iterdir())
    settings = {name: DEMO_SETTINGS[name] for name in ("cache_bytes", "adapter_bytes", "adapter_host_bytes")}
    batches: dict[str, list[str | None]] = {
        "alone": [None],
        "alone, with an adapter": names[:1],
        f"a batch of {len(names)} adapters": [*names],
    }
    best = dict.fromkeys(batches, float("inf"))
    with LLM(DEMO / "model", DEMO / "adapters", device="cpu", **settings) as llm:
        for name in names:
            llm.load_adapter(name)
        for _ in range(rounds):
            for title, adapters in batches.items():
                best[title] = min(best[title], time_step(llm, adapters))
    goals = {"alone": DEMO_GOALS[1], f"a batch of {len(names)} adapters": DEMO_GOALS[len(names)]}
    return [
        Record(f"demo, {title}", seconds * 1e3, "ms a step", "", goals.get(title), at_most=True)
        for title, seconds in best.items()
    ]


def time_step(llm: LLM, adapters: Sequence[str | None]) -> float:
    """Return the median time between two tokens of the last stream while all streams decode."""
    stop = StopParams(max_new_tokens=DEMO_TOKENS + 4 * len(adapters), ignore_eos=True)
    streams = [llm.stream(DEMO_PROMPT, stop=stop, adapter=adapter) for adapter in adapters]
    for stream in streams:
        next(stream)  # start the stream
    times = []
    for _ in range(DEMO_TOKENS):
        start = time.perf_counter()
        next(streams[-1])
        times.append(time.perf_counter() - start)
    assert llm.status.running == len(streams)
    for stream in streams:
        stream.close()
    return statistics.median(times)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--dtypes", nargs="+", choices=list(OF_OWN_BASE), help="see above")
    parser.add_argument("--llama-cpp", type=Path, metavar="FOLDER", help="a built checkout of llama.cpp")
    parser.add_argument("--only", choices=["model", "demo"], help="measure one part")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds (%(default)s)")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers_logging.disable_progress_bar()
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    dtypes = args.dtypes or ["float32"]
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        dtypes = args.dtypes or ["float32", "bfloat16"]
    elif "bfloat16" not in dtypes:
        print("bfloat16 is skipped: according to torch, this CPU has no fast bfloat16")
    records = []
    if args.only != "demo":
        with torch.inference_mode():
            records += [record for dtype in dtypes for record in measure(dtype, args.rounds, args.llama_cpp)]
    if args.only != "model":
        records += measure_demo(args.rounds)
    report(records, args.json)


if __name__ == "__main__":
    main()
