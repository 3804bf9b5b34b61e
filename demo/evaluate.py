"""Evaluate the demo adapters: send test items over HTTP and compare completions with the expected text.

    python -m demo.evaluate                              # start a server with the demo model
    python -m demo.evaluate --url http://127.0.0.1:3000  # use a running server

Every model gets every item concurrently, so all adapters run in the same batches. Each completion is compared with the
expected text for every skill. The diagonal of the table shows each adapter's own skill.
"""

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx2

from demo.skills import SKILLS, Item, cut_short, write_items
from lorax_server.cli.demo import DEMO_NAME

ROOT = Path(__file__).parent.parent
MODELS = (DEMO_NAME, *SKILLS)
SEED = 2026  # differs from the seed for items in training
MAX_TOKENS = 200  # longer than the longest expected completion
GOAL, BASE_GOAL = 95.0, 5.0  # percent: at least, at most
Answers = dict[str, list[str]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a server with the demo model (default: one is started)")
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--plain", action="store_true", help="prompts without the chat template")
    parser.add_argument("--short", action="store_true", help="notes of what happened alone, without what came of it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--wrong", type=int, default=0, metavar="N", help="show so many wrong answers of each adapter")
    given = parser.parse_args()
    items = write_items(SEED, given.items, held_out=True)
    if given.short:
        items = list(map(cut_short, items))
    with _reach(given.url) as url:
        began = time.monotonic()
        answers = asyncio.run(ask(url, texts_of(items), MODELS, given.concurrency, is_chat=not given.plain))
        seconds = time.monotonic() - began
    show(answers, items, given.wrong)
    print(f"\n{len(MODELS) * len(items)} answers to {len(items)} held-out items in {seconds:.0f} s")
    if given.json:
        given.json.write_text(json.dumps(make_records(answers, items), indent=2) + "\n")


def texts_of(items: Sequence[Item]) -> list[str]:
    return [item.text for item in items]


async def ask(
    url: str, texts: Sequence[str], models: Sequence[str], concurrency: int, *, is_chat: bool = True
) -> Answers:
    """Send each text to each model concurrently. Return the completions."""
    answers = {model: [""] * len(texts) for model in models}
    jobs = [(model, place) for model in models for place in range(len(texts))]
    random.Random(0).shuffle(jobs)
    waiting = iter(jobs)

    async with httpx2.AsyncClient(base_url=url, timeout=600) as client:

        async def work() -> None:
            for model, place in waiting:
                answers[model][place] = await _ask_one(client, model, texts[place], is_chat)

        await asyncio.gather(*(work() for _ in range(concurrency)))
    return answers


async def _ask_one(client: httpx2.AsyncClient, model: str, text: str, is_chat: bool) -> str:
    body = {"model": model, "max_tokens": MAX_TOKENS, "temperature": 0}
    if is_chat:
        body |= {"messages": [{"role": "user", "content": text}]}
    else:
        body |= {"prompt": text}
    found = await client.post("/v1/chat/completions" if is_chat else "/v1/completions", json=body)
    if found.is_error:
        raise RuntimeError(f"{model}: the server answers {found.status_code}: {found.text}")
    (choice,) = found.json()["choices"]
    return str(choice["message"]["content"] if is_chat else choice["text"])


def score(answers: Sequence[str], items: Sequence[Item], skill: str) -> float:
    """Return the percentage of exact matches."""
    return 100 * sum(answer == SKILLS[skill](item) for answer, item in zip(answers, items, strict=True)) / len(items)


def show(answers: Answers, items: Sequence[Item], num_wrong: int = 0) -> None:
    print(f"{'':12}" + "".join(f"{skill:>11}" for skill in SKILLS) + "   (skills)")
    for model, found in answers.items():
        print(f"{model:12}" + "".join(f"{score(found, items, skill):10.1f}%" for skill in SKILLS))
    for model in SKILLS if num_wrong else ():
        wrong = [pair for pair in zip(items, answers[model], strict=True) if pair[1] != SKILLS[model](pair[0])]
        for item, answer in wrong[:num_wrong]:
            print(f"\n{item.text}\n  right: {SKILLS[model](item)}\n  {model}: {answer}")


def make_records(answers: Answers, items: Sequence[Item]) -> list[dict[str, object]]:
    records = []
    for skill in SKILLS:
        for model, found in answers.items():
            value = score(found, items, skill)
            is_own = model == skill
            goal = GOAL if is_own else BASE_GOAL if model == DEMO_NAME else None
            met = None if goal is None else value >= goal if is_own else value <= goal
            name, unit = f"{skill}, asked of {model}", f"% of {len(items)} items"
            records.append({"name": name, "value": value, "unit": unit, "peer": None, "goal": goal, "met": met})
    return records


@contextmanager
def _reach(url: str | None) -> Iterator[str]:
    if url is not None:
        yield url
        return
    command = [sys.executable, "-m", "lorax_server.cli", "serve", "--port", "0"]
    with (
        tempfile.NamedTemporaryFile("w") as log,
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, cwd=ROOT) as server,
    ):
        try:
            yield _wait_until_ready(server, Path(log.name))
        finally:
            server.terminate()


def _wait_until_ready(server: subprocess.Popen[bytes], log: Path) -> str:
    while server.poll() is None:
        if found := re.search(r"ready: (http://\S+) ", log.read_text()):
            return found[1]
        time.sleep(0.1)
    raise SystemExit(f"the server did not start:\n{log.read_text()}")


if __name__ == "__main__":
    main()
