"""Benchmark harness and scripts."""

import importlib
import json
import runpy
import sys
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from lorax_server.engine import engine
from lorax_server.llm import LLM
from lorax_server.types import SamplingParams, StopParams
from tests.forks import run_in_process

FOLDER = Path(__file__).parent.parent / "benchmarks"
SCRIPTS = sorted(FOLDER.glob("*.py"))


@pytest.fixture
def in_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.mark.usefixtures("in_benchmarks")
def test_report_shows_which_goals_are_met(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from harness.report import Record, report

    records = [
        Record("fast", 1.5, "x", "peer", 1.3),
        Record("slow", 1.1, "x", "peer", 1.3),
        Record("known", 2.0, "ms", "", None),
        Record("short", 1.0, "ms", "", 2.0, at_most=True),
        Record("long", 3.0, "ms", "", 2.0, at_most=True),
    ]
    report(records, tmp_path / "out.json")
    written = json.loads((tmp_path / "out.json").read_text())
    assert [record["met"] for record in written] == [True, False, None, True, False]
    assert set(written[0]) == {"name", "value", "unit", "peer", "goal", "met"}
    assert "NO" in capsys.readouterr().out


@pytest.mark.usefixtures("in_benchmarks")
def test_random_models_and_adapters_can_be_served(tmp_path: Path) -> None:
    made = importlib.import_module("harness.files")
    made.make_model(tmp_path / "model", made.TINY)
    names = made.make_adapters(tmp_path / "adapters", made.TINY, 2)
    made.make_adapter(tmp_path / "adapters/partial", made.TINY, 2, rank=64, modules=("q_proj", "down_proj"))
    made.make_adapter(tmp_path / "adapters/dora", made.TINY, 3, use_dora=True)
    adapters = [None, *names, "partial", "dora"]
    stop = StopParams(max_new_tokens=40, ignore_eos=True)
    with LLM(tmp_path / "model", tmp_path / "adapters", device="cpu", max_length=64, cache_bytes=2**22) as llm:
        answers = llm.generate(["Hello"] * len(adapters), stop=stop, adapter=adapters)
    assert names == ["adapter-000", "adapter-001"]
    assert len({tuple(answer.token_ids) for answer in answers}) == len(adapters)
    assert all(answer.text for answer in answers)


@pytest.mark.usefixtures("in_benchmarks")
def test_structured_output_is_measured_with_tiny_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("MASK_WAIT_S", "BLOCKED_MASK_WAIT_S"):
        monkeypatch.setattr(engine, name, 60.0)  # on a busy machine, no step would have all masks
    made, bench, structured = map(importlib.import_module, ("harness.files", "harness.engine", "gpu_structured"))
    made.make_model(tmp_path / "model", made.TINY)
    with LLM(tmp_path / "model", device="cpu", max_length=256, cache_bytes=2**22) as llm:
        opened = bench.Bench(llm, bench.StepClock(llm), made.TINY, tmp_path)
        speeds = structured.measure_all(opened, SamplingParams(), rows=3, steps=6, rounds=1)
    records = structured.describe("3 rows", speeds, is_tiny=False)
    assert [record.goal for record in records] == [None, 1.05, 1.05, 1.05, 1.05, None, None]
    assert all(record.value > 0 for record in records)
    assert "3 schemas" in capsys.readouterr().out


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_every_script_prints_help(script: Path, forks: ForkServerContext, tmp_path: Path) -> None:
    exit_code, printed = run_in_process(forks, tmp_path, print_help, script)
    assert exit_code == 0, printed
    assert "--json FILE" in printed


def test_readme_lists_every_script() -> None:
    readme = (FOLDER / "README.md").read_text()
    assert [script.name for script in SCRIPTS if f"`{script.name}" not in readme] == []


def print_help(script: Path) -> None:
    """Run `python benchmarks/SCRIPT --help` in a forked process that has imported torch."""
    sys.argv, sys.path[0] = [str(script), "--help"], str(FOLDER)
    runpy.run_path(str(script), run_name="__main__")
