"""Minutes of mixed load on a server with a GPU: no wrong answer, nothing that grows.

`lorax serve` runs a model with 8 layers of the width of Llama-3.1-8B (`--tiny`: a tiny one on a CPU), random, in
bfloat16. Its memory is full: of 24 adapters the device holds 8 and the host 16, and the cache holds less than half of
the tokens of the 96 requests that are under way. Requests are of all kinds: streams, whole answers, chats, several
answers at once, greedy and drawn by every rule, with and without log probabilities, some dropped by their clients, some
wrong. Meanwhile adapters are rewritten, loaded, pinned and unloaded.

After each round the server is left until it is quiet. Then every 50th answer is compared with the answer to the same
request alone, and memory, files and threads of each process are read, and the memory of the device.

Products may differ in their last bits between batches of different sizes (docs/kernels.md), so an answer alone may take
another way where two tokens are as good as equal. So this is what must hold: up to the first token that differs, both
give each token the same log probability, up to a tolerance. If one differs, the whole answer is given to the model as a
prompt, alone: each token must have the log probability that it had in company, and of greedy answers nearly the best.
(Not of answers drawn by further rules, whose log probabilities are those after the rules.) An adapter that has been
rewritten is another one (`x-adapter-hash`): such answers are not compared. A request whose adapter is rewritten between
its name and its weights is told to try again, and is asked again.
"""

import argparse
import asyncio
import json
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpu_model import ALL_MODULES, LLAMA_8B, TINY, ModelShape, make_adapter, make_adapters, make_model
from gpu_soak_load import BY_RULES, GREEDY, Answer, Asked, make_changes, make_request, send
from report import Record, report
from soak import BLOCKS, Server, Usage, judge_process, serving

MID = LLAMA_8B._replace(num_hidden_layers=8)
RANK, NUM_ADAPTERS, ON_DEVICE, ON_HOST = 16, 24, 8, 16
AT_ONCE, MAX_LENGTH = 96, 1024
TOKENS_IN_CACHE = 4096
A_ROUND, CHECKED = 1000, 50  # requests; one of so many is checked
# Of log probabilities: in bfloat16 8 spacings of scores between 4 and 8 (an H200 was up to 6 off; another adapter is 90
# off), and in float32 on a CPU.
TOLERANCE, TINY_TOLERANCE = 0.25, 1e-3
MOST_DEVICE_GROWTH = 0.01
ADMIN = "soak"
TRY_AGAIN = re.compile(r"changed (after it was chosen|while it was read); try again")
SAME, OTHER_WAY = "the same, token for token", "another way where tokens are as good as equal"
MIB = 2**20
COUNTED = {
    "preemptions": "lorax_preemptions_total",
    "adapters loaded": "lorax_adapters_loaded_total",
    "adapters evicted from the device": 'lorax_adapter_evictions_total{tier="device"}',
    "adapters evicted from the host": 'lorax_adapter_evictions_total{tier="host"}',
}


@dataclass
class Round:
    """A round, and the server after it."""

    requests: int
    seconds: float
    usage: dict[str, Usage]
    device_bytes: int
    free_blocks: float
    problems: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    checks: Counter[str] = field(default_factory=Counter)


def main() -> None:
    args = parse_args()
    end_at = time.monotonic() + args.minutes * 60
    shape = TINY if args.tiny else MID
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        make_model(folder / "model", shape)
        names = make_adapters(folder / "adapters", shape, NUM_ADAPTERS, RANK)
        spoil(folder / "adapters" / "broken", shape)
        with serving(folder / "log", make_flags(folder, shape, args.tiny)) as server:
            soak = Soak(server, folder, names, shape, TINY_TOLERANCE if args.tiny else TOLERANCE)
            try:
                asyncio.run(soak.run(end_at, args.a_round))
            finally:  # also if the server is gone: what was seen until then says why
                print("".join(find_complaints(folder / "log")), flush=True)
                if soak.rounds:
                    report(judge(soak), args.json)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records to this file")
    parser.add_argument("--minutes", type=float, default=10.0, metavar="M", help="in all, with the start")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--a-round", type=int, default=A_ROUND, metavar="N", help="requests between two looks")
    parser.add_argument("--folder", type=Path, metavar="PATH", help="for the files; /dev/shm is memory")
    return parser.parse_args()


def make_flags(folder: Path, shape: ModelShape, is_tiny: bool) -> list[str]:
    """Return flags by which all memory is too small."""
    width = 4 if is_tiny else 2  # bytes of a number
    adapter = width * RANK * shape.num_hidden_layers * sum(sum(shape.linears[module]) for module in ALL_MODULES)
    token = width * 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim
    flags = {
        "--model-id": folder / "model",
        "--adapters-dir": folder / "adapters",
        "--huggingface-hub-cache": folder / "cache",
        "--device": "cpu" if is_tiny else "cuda",
        "--max-rows": AT_ONCE,
        "--max-total-tokens": MAX_LENGTH,
        "--cache-bytes": TOKENS_IN_CACHE * token,
        "--adapter-bytes": round((ON_DEVICE + 0.5) * adapter),
        "--adapter-host-bytes": round((ON_HOST + 0.5) * adapter),
        "--admin-key": ADMIN,
        "--max-best-of": 4,
    }
    return ["--no-hub", *[str(word) for pair in flags.items() for word in pair]]


def spoil(folder: Path, shape: ModelShape) -> None:
    """Write an adapter whose weights are cut off."""
    make_adapter(folder, shape, seed=-1, rank=RANK)
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:4096])


def find_complaints(log: Path) -> list[str]:
    lines = [line for line in log.read_text().splitlines(keepends=True) if re.search(r" ERROR |Traceback", line)]
    return lines[:10]


class Soak:
    """The load on one server, round by round."""

    def __init__(self, server: Server, folder: Path, names: Sequence[str], shape: ModelShape, near: float) -> None:
        self._server = server
        self._adapters = folder / "adapters"
        self._names = names
        self._shape = shape
        self._near = near
        self._choice = random.Random(0)
        self._num_sent = 0
        self._to_check: list[tuple[Asked, Answer]] = []
        self.rounds: list[Round] = []
        self.counted: dict[str, float] = {}  # the server's metrics after the last round
        self.largest = 0.0  # difference of log probabilities in company and alone

    async def run(self, end_at: float, a_round: int) -> None:
        """Run rounds as long as a further one would end in time; two at least."""
        while len(self.rounds) < 2 or time.monotonic() + max(seen.seconds for seen in self.rounds) < end_at:
            began = time.monotonic()
            problems, kinds = await self._load(a_round)
            free_blocks = await self._server.be_quiet()
            checks: Counter[str] = Counter()
            for asked, answer in self._to_check:
                result = await self._check(asked, answer)
                is_wrong = "wrong: " in result
                checks["wrong" if is_wrong else result] += 1
                problems += [result] if is_wrong else []
            self._to_check = []
            free_blocks = await self._server.be_quiet()
            usage, device_bytes = self._server.usage(), device_memory()
            seen = Round(self._num_sent, time.monotonic() - began, usage, device_bytes, free_blocks)
            seen.problems, seen.kinds, seen.checks = problems, kinds, checks
            self.rounds.append(seen)
            self.counted = self._server.metrics()
            print_round(seen)

    async def _load(self, count: int) -> tuple[list[str], Counter[str]]:
        """Send so many requests, while adapters change."""
        problems, kinds = list[str](), Counter[str]()
        left = iter(range(count))
        changing = asyncio.create_task(make_changes(self._server, self._adapters, self._names, self._shape, ADMIN))

        async def work() -> None:
            for _ in left:
                self._num_sent += 1
                is_checked = self._num_sent % CHECKED == 0
                asked = make_request(self._choice, self._names, is_checked)
                kinds[asked.kind] += 1
                answer = await send(self._server, asked)
                while TRY_AGAIN.search(answer.problem):
                    kinds["asked again: the adapter was rewritten after it was found"] += 1
                    answer = await send(self._server, asked)
                if answer.problem:
                    problems.append(f"{asked.kind} {json.dumps(asked.body)[:200]}: {answer.problem}")
                elif is_checked:
                    self._to_check.append((asked, answer))

        await asyncio.gather(*[work() for _ in range(AT_ONCE)])
        changing.cancel()
        problems += [each for each in await asyncio.gather(changing, return_exceptions=True) if isinstance(each, str)]
        failed = changing.exception() if not changing.cancelled() else None
        return problems + ([f"a change failed: {failed!r}"] if failed else []), kinds

    # --- Answers alone ------------------------------------------------------------------------------------------------

    async def _check(self, asked: Asked, answer: Answer) -> str:
        """Compare an answer with the one that is given alone. What is wrong begins with that word."""
        alone = await send(self._server, asked)
        if alone.problem:
            return f"wrong: alone, {asked.body} fails: {alone.problem}"
        if alone.adapter_hash != answer.adapter_hash:
            return "another version of the adapter"
        differs = self._compare(asked, answer.tokens, alone.tokens)
        if differs == OTHER_WAY and asked.kind != BY_RULES:
            differs = await self._force(asked, answer) or differs
        return f"{asked.kind}: {differs or SAME}"

    def _compare(self, asked: Asked, tokens: list[dict[str, Any]], alone: list[dict[str, Any]]) -> str:
        """Compare up to the first token that differs; return the difference, if there is one."""
        for place, (token, other) in enumerate(zip(tokens, alone, strict=False)):
            if token["id"] != other["id"]:
                same = [each for each in other["alternative_tokens"] if each["id"] == token["id"]]
                if asked.kind == GREEDY and not (same and self._is_near(same[0]["logprob"], other["logprob"])):
                    return f"wrong: token {place} of {asked.body}: {token} in company, {other} alone"
                return OTHER_WAY
            if not self._is_near(token["logprob"], other["logprob"]):
                return f"wrong: token {place} of {asked.body}: {token} in company, {other} alone"
        return "" if len(tokens) == len(alone) else f"wrong: {len(tokens)} and {len(alone)} tokens of {asked.body}"

    async def _force(self, asked: Asked, answer: Answer) -> str:
        """Give the model the whole answer as a prompt: its tokens must be as likely as they were in company."""
        prompt = [each["id"] for each in answer.prompt]
        ids = prompt + [token["id"] for token in answer.tokens]
        model = asked.body["parameters"].get("adapter_id", "")
        body = {"model": model, "prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}
        forced = await send(self._server, Asked("scored", "/v1/completions", body))
        if forced.problem:
            return f"wrong: {body} fails: {forced.problem}"
        if forced.adapter_hash != answer.adapter_hash:
            return "another version of the adapter"
        found = forced.content["choices"][0]["logprobs"]
        pairs = list(zip(found["token_logprobs"], found["top_logprobs"], strict=True))[len(prompt) :]
        for place, (token, (logprob, top)) in enumerate(zip(answer.tokens, pairs, strict=True)):
            best = max(top.values())
            if not self._is_near(token["logprob"], logprob):
                return f"wrong: token {place} of {asked.body}: {token} in company, {logprob} alone"
            if asked.kind == GREEDY and not self._is_near(logprob, best):
                return f"wrong: token {place} of {asked.body}: {token} has {logprob}, the best {best}"
        return ""

    def _is_near(self, logprob: float | None, other: float | None) -> bool:
        """Compare log probabilities; None is that of a token that cannot be."""
        if logprob is None or other is None:
            return logprob is other
        self.largest = max(self.largest, abs(logprob - other))
        return abs(logprob - other) <= self._near


def device_memory() -> int:
    """Return the memory of the device that is in use, by all processes."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


# --- Figures ----------------------------------------------------------------------------------------------------------


def print_round(seen: Round) -> None:
    usage = ", ".join(
        f"{name} {each.rss / MIB:.0f} MiB {each.files} files {each.threads} threads"
        for name, each in sorted(seen.usage.items())
    )
    wrong = f", {len(seen.problems)} wrong ({seen.problems[0][:300]})" if seen.problems else ""
    device = f", device {seen.device_bytes / MIB:.0f} MiB" if seen.device_bytes else ""
    print(f"{seen.requests:6} requests, {seen.seconds:5.1f} s{wrong}: {usage}{device}", flush=True)


def judge(soak: Soak) -> list[Record]:
    """Judge growth from the end of the first third on: until then adapters and shapes come for the first time."""
    rounds, counted = soak.rounds, soak.counted
    warm = rounds[len(rounds) // 3 :]
    problems = [problem for seen in rounds for problem in seen.problems]
    for problem in problems[:5]:
        print(problem[:1000])
    kinds, checks = Counter[str](), Counter[str]()
    for seen in rounds:
        kinds += seen.kinds
        checks += seen.checks
    records = [
        Record("requests", rounds[-1].requests, "", "", None),
        Record("problems", len(problems), "", "", 0, at_most=True),
        *[Record(f"requests: {kind}", count, "", "", None) for kind, count in sorted(kinds.items())],
        *[Record(f"checked: {result}", count, "", "", None) for result, count in sorted(checks.items())],
        *[Record(name, counted[metric], "", "", 1) for name, metric in COUNTED.items()],
        Record("blocks that are not free", counted[BLOCKS] - rounds[-1].free_blocks, "", "", 0, at_most=True),
        Record("restarts of the engine", counted["lorax_engine_restarts_total"], "", "", 0, at_most=True),
        Record("largest difference of a log probability", soak.largest, "", "an answer alone", None),
    ]
    if rounds[-1].device_bytes:
        growth = max(seen.device_bytes for seen in warm) / warm[0].device_bytes - 1
        records.append(Record("device memory", warm[-1].device_bytes / MIB, "MiB", "", None))
        records.append(Record("device memory: growth", growth, "of 1", "", MOST_DEVICE_GROWTH, at_most=True))
    for name in sorted(warm[0].usage.keys() & warm[-1].usage.keys()):
        records += judge_process(name, [seen.usage[name] for seen in warm if name in seen.usage])
    return records


if __name__ == "__main__":
    main()
