"""The price of a float8 cache (`--quantize fp8-kv`) in accuracy: the bundled model and its adapters, end to end.

    python benchmarks/fp8_cache.py [--json FILE] [--device cuda] [--dtype bfloat16] [--items N]

Every adapter gets held-out items of its skill, once with each cache: in the model's own precision, as float8 with the
scale 1, which is what a checkpoint without scales gets, and as float8 with scales from the data, so that the largest
key and value of each layer become the largest float8. The loss, the mean negative log probability of a token, is that
of the right answers; of the base model, which has no skill, that of the prompts. An answer is the same as with the
cache in the model's own precision if all of its greedy tokens are.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from report import Record, report
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from lorax_server.cli.demo import FOLDER
from lorax_server.generation.generation import Completion
from lorax_server.llm import LLM
from lorax_server.types import StopParams

sys.path.append(str(Path(__file__).parent.parent))  # demo/ is part of the repository, not of the package
from demo.skills import SKILLS, write_items

SEED = 2027
MAX_TOKENS = 200  # the longest right answer has fewer
FLOAT8_MAX = torch.finfo(torch.float8_e4m3fn).max
WEIGHTS = "model.safetensors"
PLAIN, UNSCALED, SCALED = "model's precision", "float8, scale 1", "float8, scales from data"
Scales = list[tuple[float, float]]  # of keys and of values, by layer


class Question(NamedTuple):
    """A prompt for an adapter, None being the base model, and the right answer, if there is one."""

    adapter: str | None
    prompt: list[int]
    answer: list[int]


class Answered(NamedTuple):
    """The greedy tokens of each question, and the log probabilities of its right answer, or of its prompt."""

    tokens: list[list[int]]
    logprobs: list[list[float]]


def make_questions(count: int) -> list[Question]:
    tokenizer = Tokenizer.from_file(str(FOLDER / "model" / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    questions = []
    for item in write_items(SEED, count, held_out=True):
        prompt = encode(f"<|user|>{item.text.strip()}<|end|><|assistant|>")
        questions.append(Question(None, prompt, []))
        questions += [Question(name, prompt, encode(f"{skill(item)}<|end|>")) for name, skill in SKILLS.items()]
    return questions


def open_model(folder: Path, args: argparse.Namespace, quantize: str | None) -> LLM:
    return LLM(
        folder,
        FOLDER / "adapters",
        device=args.device,
        dtype=args.dtype,
        quantize=quantize,
        cache_bytes=2**28,
        adapter_bytes=2**26,
    )


def generate(
    llm: LLM, questions: Sequence[Question], prompts: list[list[int]], num_tokens: int, *, is_scored: bool
) -> list[Completion]:
    adapters = [question.adapter for question in questions]
    stop = StopParams(max_new_tokens=num_tokens)
    return llm.generate(prompts, stop=stop, adapter=adapters, prompt_logprobs=is_scored, progress=False)


def answer(llm: LLM, questions: Sequence[Question]) -> Answered:
    """Answer greedily, and score the right answers; for the base model, the prompts."""
    answered = generate(llm, questions, [each.prompt for each in questions], MAX_TOKENS, is_scored=False)
    scored = generate(llm, questions, [[*each.prompt, *each.answer] for each in questions], 1, is_scored=True)
    logprobs = [
        (completion.prompt_logprobs or [])[-len(question.answer) :]  # of the base model: all
        for question, completion in zip(questions, scored, strict=True)
    ]
    return Answered([completion.token_ids for completion in answered], logprobs)


def find_scales(llm: LLM) -> Scales:
    """Choose scales by the largest key and value of each layer that the cache holds."""
    cache = llm._engine._executor._runner._kv_cache  # type: ignore[attr-defined]  # of the one rank
    return [(float(keys.abs().max()) / FLOAT8_MAX, float(values.abs().max()) / FLOAT8_MAX) for keys, values in cache]


def write_model(folder: Path, scales: Scales) -> None:
    """Write the bundled model with scales, as checkpoints for float8 caches have them."""
    for file in (FOLDER / "model").iterdir():
        if file.name != WEIGHTS:
            (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(FOLDER / "model" / WEIGHTS)
    for layer, (k_scale, v_scale) in enumerate(scales):
        tensors[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor(k_scale)
        tensors[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor(v_scale)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def measure(args: argparse.Namespace, questions: Sequence[Question]) -> dict[str, Answered]:
    found = {}
    with open_model(FOLDER / "model", args, None) as llm:
        found[PLAIN] = answer(llm, questions)
        scales = find_scales(llm)
    print("scales of keys:  ", " ".join(f"{k:.4f}" for k, _ in scales))
    print("scales of values:", " ".join(f"{v:.4f}" for _, v in scales), flush=True)
    with open_model(FOLDER / "model", args, "fp8-kv") as llm:
        found[UNSCALED] = answer(llm, questions)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), scales)
        with open_model(Path(folder), args, "fp8-kv") as llm:
            found[SCALED] = answer(llm, questions)
    return found


def compare(found: dict[str, Answered], questions: Sequence[Question]) -> list[Record]:
    records = []
    plain = found[PLAIN]
    for model in (None, *SKILLS, "all"):
        places = [i for i, question in enumerate(questions) if model in (question.adapter, "all")]
        for cache, answered in found.items():
            name = f"{model or 'base model'}, {cache}"
            logprobs = [logprob for i in places for logprob in answered.logprobs[i]]
            loss = -1000 * statistics.mean(logprobs)
            records.append(Record(f"{name}: loss", loss, f"thousandths of a nat, {len(logprobs)} tokens", "", None))
            if cache != PLAIN:
                same = 100 * statistics.mean(answered.tokens[i] == plain.tokens[i] for i in places)
                unit = f"% of {len(places)}"
                records.append(Record(f"{name}: same answers", same, unit, f"cache in the {PLAIN}", None))
            right = [answered.tokens[i] == questions[i].answer for i in places if questions[i].answer]
            if right:
                share = 100 * statistics.mean(right)
                records.append(Record(f"{name}: right answers", share, f"% of {len(right)}", "", None))
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records to this file")
    parser.add_argument("--device", default="cpu", help="cpu (the default) or cuda")
    parser.add_argument("--dtype", help="of the model (default: float32 on a CPU, as stored, float16, on a GPU)")
    parser.add_argument("--items", type=int, default=25, help="of each adapter (default: 25)")
    args = parser.parse_args()
    questions = make_questions(args.items)
    report(compare(measure(args, questions), questions), args.json)


if __name__ == "__main__":
    main()
