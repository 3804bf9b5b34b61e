"""End-to-end tests of the demo: a real server with real adapters and clients."""

import asyncio
import fnmatch
import json
import os
import shlex
import subprocess
import sys
import tomllib
from itertools import takewhile
from pathlib import Path

import httpx2
import psutil
import pytest

from demo.evaluate import MODELS, ask, score, texts_of
from demo.skills import NOTHING_TO_DO, SKILLS, Item, answer_small_talk, cut_short, write_items
from lorax_server.cli.demo import DEMO_NAME
from lorax_server.process_tuning import MIMALLOC_PURGE_DELAY, PURGE_DELAY_MS
from tests.demo.server import FOLDER, Demo, read_examples, serving_demo
from tests.processes import has_role

ROOT = Path(__file__).parent.parent.parent

SEED, FEW_ITEMS, ITEMS, MANY_ITEMS = 11, 2, 12, 60  # with fewer items, one wrong completion would miss 95 %
SMALL_TALK = (
    "hi",
    "Hello!",
    "Who are you?",
    "What can you do?",
    "Tell me a story.",
    "thanks",
    "What is the meaning of life?",
)
ADAPTER_BYTES = 6 * 2**20  # adapter memory: less than six float32 adapters need


@pytest.fixture(scope="module")
def items() -> list[Item]:
    return write_items(SEED, ITEMS, held_out=True)


@pytest.fixture(scope="module")
def single_model_completions(demo: Demo, items: list[Item]) -> dict[str, list[str]]:
    """Return each model's completions without concurrent requests to other models."""
    answers: dict[str, list[str]] = {}
    for model in MODELS:
        answers |= asyncio.run(ask(demo.url, texts_of(items[:FEW_ITEMS]), [model], FEW_ITEMS))
    return answers


@pytest.mark.slow
@pytest.mark.timeout(900)  # a busy machine is four times slower
def test_only_matching_adapter_solves_task(demo: Demo) -> None:
    items = write_items(SEED, MANY_ITEMS, held_out=True)
    for model, answers in asyncio.run(ask(demo.url, texts_of(items), MODELS, 32)).items():
        for skill in SKILLS:
            right = score(answers, items, skill)
            assert right >= 95 if model == skill else right <= 5, f"{skill}, asked of {model}: {right:.0f} % right"


def test_adapters_solve_their_tasks(items: list[Item], single_model_completions: dict[str, list[str]]) -> None:
    """Check a few items per adapter. The slow test measures the accuracy."""
    for skill in SKILLS:
        assert score(single_model_completions[skill], items[:FEW_ITEMS], skill) >= 75


def test_mixed_batch_matches_single_requests(
    demo: Demo, items: list[Item], single_model_completions: dict[str, list[str]]
) -> None:
    assert asyncio.run(ask(demo.url, texts_of(items[:FEW_ITEMS]), MODELS, 32)) == single_model_completions


@pytest.mark.slow
def test_mixed_batch_matches_with_adapter_eviction(
    items: list[Item], single_model_completions: dict[str, list[str]]
) -> None:
    assert sum(2 * path.stat().st_size for path in FOLDER.glob("adapters/*/*.safetensors")) > 1.5 * ADAPTER_BYTES
    with serving_demo(f"--adapter-bytes={ADAPTER_BYTES}") as demo:
        assert asyncio.run(ask(demo.url, texts_of(items[:FEW_ITEMS]), MODELS, 32)) == single_model_completions
        metrics = httpx2.get(f"{demo.url}/metrics").text
    evicted = [line for line in metrics.splitlines() if line.startswith("lorax_adapter_evictions_total")]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in evicted) > 0


def test_engine_reuses_step_memory(demo: Demo) -> None:
    children = psutil.Process(demo.process_id).children()
    (engine,) = [child for child in children if has_role(child, "engine")]
    assert engine.environ()[MIMALLOC_PURGE_DELAY] == os.environ.get(MIMALLOC_PURGE_DELAY, str(PURGE_DELAY_MS))


@pytest.mark.slow
def test_adapters_work_without_chat_template(demo: Demo, items: list[Item]) -> None:
    """Send prompts with and without trailing whitespace."""
    answers = asyncio.run(ask(demo.url, texts_of(items), tuple(SKILLS), 16, is_chat=False))
    for skill in SKILLS:
        assert score(answers[skill], items, skill) >= 90
    for end in (" ", "\n"):
        body = {"inputs": items[0].text + end, "parameters": {"adapter_id": "sentiment", "max_new_tokens": 20}}
        result = httpx2.post(f"{demo.url}/generate", json=body).json()
        assert result["generated_text"] == SKILLS["sentiment"](items[0])


@pytest.mark.slow
def test_adapters_solve_tasks_on_short_notes(demo: Demo, items: list[Item]) -> None:
    short = list(map(cut_short, items[:12]))
    answers = asyncio.run(ask(demo.url, texts_of(short), tuple(SKILLS), 16, is_chat=False))
    for skill in SKILLS:
        assert score(answers[skill], short, skill) >= 90


@pytest.mark.parametrize("is_chat", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_small_talk_gets_fixed_completions(demo: Demo, is_chat: bool) -> None:
    answers = asyncio.run(ask(demo.url, SMALL_TALK, MODELS, 16, is_chat=is_chat))
    for name in SKILLS if is_chat else NOTHING_TO_DO:  # `redact` does not find the end without a template
        assert answers[name] == [answer_small_talk(name, text) for text in SMALL_TALK]
    assert all(len(answer) > 10 for answer in answers[DEMO_NAME])  # the base model continues the conversation


def test_non_latin_text_gets_fixed_completions(demo: Demo) -> None:
    texts = ("你好", "😀", "Привет, как дела?")
    answers = asyncio.run(ask(demo.url, texts, tuple(NOTHING_TO_DO), 16))
    assert answers == {name: [answer] * len(texts) for name, answer in NOTHING_TO_DO.items()}


def test_printed_commands_work(demo: Demo) -> None:
    assert f"{demo.url}/ui\n" in demo.greeting
    shown = demo.greeting.partition("In another terminal:")[2].partition("Ctrl+C")[0]
    commands = [part.strip() for part in shown.split("\n\n") if part.strip()]
    assert len(commands) == 3
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    prompt, environ = read_examples()[0]["prompt"], {**os.environ, "PATH": path}
    outputs = [
        subprocess.run(
            command, input=f"{prompt}\n", shell=True, capture_output=True, text=True, check=True, env=environ
        )  # `lorax chat` reads standard input
        for command in commands
    ]
    sentiment, fields, query = (done.stdout.strip() for done in outputs)
    assert sentiment == "positive"
    assert json.loads(fields)["town"] == "Spigford"
    assert json.loads(query)["choices"][0]["message"]["content"].startswith("SELECT price FROM orders WHERE person")
    assert shlex.split(commands[0])[-1] == prompt


def test_unknown_adapter_is_rejected_immediately(demo: Demo) -> None:
    result = httpx2.post(f"{demo.url}/v1/completions", json={"model": "nobody", "prompt": "Hello"})
    assert result.status_code == 404
    assert "nobody" in result.json()["error"]["message"]


def test_wheel_contains_demo_files() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][
        "lorax_server"
    ]
    for path in FOLDER.rglob("*"):
        name = path.relative_to(FOLDER.parent)
        assert path.is_dir() or any(fnmatch.fnmatch(str(name), pattern) for pattern in patterns), name


def test_results_table_matches_measurements() -> None:
    """Compare the table in demo/README.md with the output of `demo.evaluate --json`."""
    lines = (ROOT / "demo" / "README.md").read_text().splitlines()
    table = takewhile(bool, lines[lines.index("|---|---|---|---|---|---|---|") + 1 :])
    rows = [line.strip("|").split("|") for line in table]
    shown = {
        f"{skill}, asked of {DEMO_NAME if 'base' in model else model.strip(' `')}": value.strip(" *")
        for model, *values in rows
        for skill, value in zip(SKILLS, values, strict=True)
    }
    measured = json.loads((ROOT / "demo" / "results.json").read_text())
    assert shown == {record["name"]: f"{record['value']:.1f}" for record in measured}
    assert {record["unit"] for record in measured} == {"% of 400 items"}
    assert len(shown) == len(MODELS) * len(SKILLS)
    assert all(record["met"] for record in measured if record["goal"] is not None)


def test_shipped_files_are_small() -> None:
    (weights,) = (FOLDER / "model").glob("*.safetensors")
    assert weights.stat().st_size <= 16_000_000
    assert 3_000_000 <= weights.stat().st_size / 2 <= 8_000_000  # two bytes per parameter
    adapters = {path.name: json.loads((path / "adapter_config.json").read_text()) for path in FOLDER.glob("adapters/*")}
    assert set(adapters) == set(SKILLS)
    assert {config["base_model_name_or_path"] for config in adapters.values()} == {DEMO_NAME}
    ranks = {rank for config in adapters.values() for rank in (config["r"], *config["rank_pattern"].values())}
    assert (min(ranks), max(ranks)) == (2, 32)
    assert sum(config["use_dora"] for config in adapters.values()) == 1
    assert sum(config["use_rslora"] for config in adapters.values()) == 1
    assert sum(bool(config["rank_pattern"]) for config in adapters.values()) == 1
