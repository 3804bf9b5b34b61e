"""What the benchmarks share: a record's goal is judged by its value, and the JSON holds what it should."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
SCRIPTS = sorted(path for path in FOLDER.glob("*.py") if path.stem not in ("paged", "report"))


@pytest.fixture
def in_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.mark.usefixtures("in_benchmarks")
def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from report import Record, report

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


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_every_script_takes_json(script: Path) -> None:
    done = subprocess.run(
        [sys.executable, script, "--help"], cwd=FOLDER.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--json FILE" in done.stdout
