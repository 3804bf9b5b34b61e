"""Measure GGUF models on a CPU, with and without adapters, and compare with llama.cpp and the same files.

The model is SmolLM2-135M-Instruct, requantized by `llama-quantize`, with random rank-16 adapters on all linear layers.
The script measures tokens per second in greedy decode steps and for a prompt of 1,536 tokens (the best of several
alternating rounds), the memory of `lorax serve` after startup, and the perplexity on the text of this repository's
documentation. As in `llama-perplexity`, only the second half of each 512-token chunk is scored.

`--llama-cpp FOLDER` is a checkout of llama.cpp with `llama-quantize`, `llama-batched-bench` and `llama-perplexity` in
`build/bin`. llama.cpp cannot batch different adapters, so cases with adapters are compared with the base model in this
engine.
"""

import json
import math
import re
import subprocess
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from cpu_decode import ADAPTED, BASE, CASES, PROMPT, RANK, TOKENS, Case, Speeds
from cpu_multi_lora import write_adapters
from harness.engine import FIRST_WORD, StepClock
from harness.report import Record, make_parser, report
from harness.server import serving
from transformers import AutoModelForCausalLM

from lorax_server.cli.packaged_models import find_local_model
from lorax_server.gguf.model_folder import list_models
from lorax_server.llm import LLM
from lorax_server.types import StopParams

DOCS = Path(__file__).parent.parent / "docs"
LONG_PROMPT, LONG_PROMPT_GOAL = 1536, 550.0
CHUNK, CHUNKS = 512, 16
GOALS: dict[str, tuple[float, ...]] = {"Q8_0": (150, 400, 450, 120, 340, 300), "Q4_0": (165, 400, 450, 130, 340, 300)}
PERPLEXITY = re.compile(r"Final estimate: PPL = ([0-9.]+)")


class Ours:
    """This project's engine, through `LLM`."""

    def __init__(self, model: Path, adapters: Path) -> None:
        self.llm = LLM(model, adapters, device="cpu", max_num_seqs=32, cache_bytes=2**28)
        self._names = sorted(folder.name for folder in adapters.iterdir() if folder.is_dir())
        self._clock = StepClock(self.llm)

    def decode(self, case: Case) -> float:
        """Return the tokens per second for one batch, after the first step in which every sequence gets a token."""
        self._clock.marks.clear()
        adapters = [self._names[index - 1] if index else None for index in case.indices]
        # Sequences can start at different steps.
        stop = StopParams(max_new_tokens=1 + TOKENS + case.batch, ignore_eos=True)
        self.llm.generate(_draw_prompts(case.batch, PROMPT), stop=stop, adapter=adapters, progress=False)
        marks = self._clock.marks
        first = next(i for i, mark in enumerate(marks) if mark.num_tokens == case.batch)
        assert all(mark.num_tokens == case.batch for mark in marks[first : first + TOKENS + 1])
        return case.batch * TOKENS / (marks[first + TOKENS].at - marks[first].at)

    def prefill(self, seed: int) -> float:
        """Return the tokens per second for one long prompt that is not in the prefix cache."""
        prompts = _draw_prompts(1, LONG_PROMPT, seed)
        start = time.perf_counter()
        self.llm.generate(prompts, stop=StopParams(max_new_tokens=1), progress=False)
        return LONG_PROMPT / (time.perf_counter() - start)


def _draw_prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1000 * seed + count)
    drawn: list[list[int]] = torch.randint(FIRST_WORD, 40_000, (count, length), generator=generator).tolist()
    return drawn


class LlamaCpp:
    """The programs of a built checkout of llama.cpp."""

    def __init__(self, checkout: Path) -> None:
        self._programs = checkout / "build/bin"

    def quantize(self, source: Path, target: Path, kind: str) -> None:
        self._run("llama-quantize", "--allow-requantize", source, target, kind)

    def decode(self, model: Path) -> Speeds:
        batches = ",".join(str(case.batch) for case in BASE)
        # All sequences share one prompt, because only decode steps are measured.
        sizes = f"-pps -npp {PROMPT} -ntg 32 -npl {batches} -c {32 * (PROMPT + 32)}"
        return {Case(row["pl"]): row["speed_tg"] for row in self._bench(model, sizes)}

    def prefill(self, model: Path) -> float:
        rows = self._bench(model, f"-npp {LONG_PROMPT} -ntg 1 -npl 1 -c {2 * LONG_PROMPT}")
        speed: float = rows[0]["speed_pp"]
        return speed

    def perplexity(self, model: Path, text: Path) -> float:
        flags = f"-c {CHUNK} -b {CHUNK} --chunks {CHUNKS} -t {torch.get_num_threads()}".split()
        found = PERPLEXITY.search(self._run("llama-perplexity", "-m", model, "-f", text, *flags))
        assert found is not None, "llama-perplexity printed no result"
        return float(found[1])

    def _bench(self, model: Path, sizes: str) -> list[dict[str, Any]]:
        threads = torch.get_num_threads()
        flags = f"{sizes} -b 2048 -ub 512 -t {threads} -tb {threads} --output-format jsonl".split()
        lines = self._run("llama-batched-bench", "-m", model, *flags).splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def _run(self, program: str, *arguments: object) -> str:
        command = [str(part) for part in (self._programs / program, *arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{program} failed:\n{(done.stdout + done.stderr)[-2000:]}")
        return done.stdout + done.stderr


def measure_speed(kind: str, model: Path, adapters: Path, peer: LlamaCpp, rounds: int) -> list[Record]:
    ours, theirs = dict.fromkeys(CASES, 0.0), dict.fromkeys(BASE, 0.0)
    prefill = {"ours": 0.0, "llama.cpp": 0.0}
    engine = Ours(model, adapters)
    for case in CASES:
        engine.decode(case)  # load adapters
    for number in range(rounds):
        for case in CASES:
            ours[case] = max(ours[case], engine.decode(case))
        for case, speed in peer.decode(model).items():
            theirs[case] = max(theirs[case], speed)
        prefill["ours"] = max(prefill["ours"], engine.prefill(seed=number))
        prefill["llama.cpp"] = max(prefill["llama.cpp"], peer.prefill(model))
    engine.llm.close()
    records = []
    for case, goal in zip(CASES, GOALS[kind], strict=True):
        records.append(Record(f"{kind} {case}", ours[case], "tokens/s", goal=goal))
        if case in theirs:
            records.append(Record(f"{kind} {case}, relative", ours[case] / theirs[case], "x", "llama.cpp", 1.0))
    for case in ADAPTED:
        part = ours[case] / ours[Case(case.batch)]
        records.append(Record(f"{kind} {case}, relative", part, "x", "our base model"))
    records.append(Record(f"{kind} prefill", prefill["ours"], "tokens/s", goal=LONG_PROMPT_GOAL))
    part = prefill["ours"] / prefill["llama.cpp"]
    records.append(Record(f"{kind} prefill, relative", part, "x", "llama.cpp", 1.0))
    return records


def measure_memory(kind: str, model: Path) -> Record:
    """Measure the memory of all server processes after startup."""
    with serving(model.with_suffix(".log"), {"model-id": model}) as server:
        used = sum(usage.rss for usage in server.usage().values())
    limit = 1.5 * model.stat().st_size + 250e6
    return Record(f"{kind} memory after start", used / 1e6, "MB", goal=limit / 1e6, at_most=True)


def measure_perplexity(kind: str, model: Path, peer: LlamaCpp, text: Path) -> list[Record]:
    with LLM(model, device="cpu", max_num_seqs=4, cache_bytes=2**28) as llm:
        ids = llm._tokenizer.encode(text.read_text())[: CHUNK * CHUNKS]
        chunks = [ids[start : start + CHUNK] for start in range(0, len(ids), CHUNK)]
        stop = StopParams(max_new_tokens=1)
        completions = llm.generate(chunks, stop=stop, prompt_logprobs=True, progress=False)
    scored = [value for each in completions for value in _second_half(each.prompt_logprobs or ())]
    ours, theirs = math.exp(-sum(scored) / len(scored)), peer.perplexity(model, text)
    records = [Record(f"{kind} perplexity", ours, ""), Record(f"{kind} perplexity of llama.cpp", theirs, "")]
    change = abs(ours / theirs - 1) * 100
    return [*records, Record(f"{kind} perplexity, difference", change, "%", "llama.cpp", 0.5, at_most=True)]


def _second_half(logprobs: Sequence[float | None]) -> list[float]:
    return [value for value in logprobs[-(CHUNK // 2 - 1) :] if value is not None]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--llama-cpp", type=Path, metavar="FOLDER", required=True, help="a built checkout of llama.cpp")
    parser.add_argument("--kinds", nargs="+", choices=list(GOALS), default=list(GOALS), help="GGUF types")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds (%(default)s)")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    found = find_local_model("smollm2")
    assert found is not None
    (source,) = list_models(found)
    peer, records = LlamaCpp(options.llama_cpp), []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        text = folder / "text"
        text.write_text("\n\n".join(page.read_text() for page in sorted(DOCS.glob("*.md"))))
        base = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        write_adapters(base, folder / "adapters", RANK, max(case.adapters for case in CASES))
        del base
        for kind in options.kinds:
            model = folder / f"{kind}.gguf"
            peer.quantize(source, model, kind)
            records += measure_speed(kind, model, folder / "adapters", peer, options.rounds)
            records.append(measure_memory(kind, model))
            records += measure_perplexity(kind, model, peer, text)
    report(records, options.json)


if __name__ == "__main__":
    main()
