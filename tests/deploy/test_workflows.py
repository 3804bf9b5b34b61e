"""The workflows and forms in `.github/` are valid, and the commands that they run exist."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from lorax_server import __version__

ROOT = Path(__file__).parent.parent.parent
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")


def read_steps(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step for job in jobs for step in job.get("steps", ())]


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("github-workflows", WORKFLOWS),
        ("github-issue-forms", FORMS),
        ("github-issue-config", [GITHUB / "ISSUE_TEMPLATE/config.yml"]),
        ("dependabot", [GITHUB / "dependabot.yml"]),
    ],
)
def test_workflow_files_match_their_schema(schema: str, files: list[Path]) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_make_targets_exist(workflow: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for step in read_steps(workflow):
        program, *words = step.get("run", "").split("ARGS=")[0].split() or [""]
        if program == "make":
            assert {word for word in words if not word.startswith("-")} <= targets, step["run"]


def test_workflows_run_every_check() -> None:
    commands = " ".join(step.get("run", "") for step in read_steps(GITHUB / "workflows/ci.yml"))
    check = re.search(r"^check: (.*?) ##", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert check is not None
    assert set(check[1].split()) <= set(commands.split())


def test_workflows_test_all_supported_python_versions() -> None:
    matrix = yaml.safe_load((GITHUB / "workflows/ci.yml").read_text())["jobs"]["test"]["strategy"]["matrix"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    classifiers = [re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", each) for each in project["classifiers"]]
    assert matrix["python"] == [match[1] for match in classifiers if match]


def test_referenced_files_exist() -> None:
    for workflow in WORKFLOWS:
        jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
        for job in jobs:
            uses = job.get("uses", "")
            assert not uses.startswith("./") or (ROOT / uses).is_file(), uses
    for line in (GITHUB / "CODEOWNERS").read_text().splitlines():
        path = line.split()[0]
        assert path in ("#", "*") or (ROOT / path.strip("/")).exists(), path


def test_released_version_is_in_changelog() -> None:
    """The release workflow compares both with the tag."""
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f'__version__ = "{__version__}"\n' in (ROOT / "lorax_server/__init__.py").read_text()
