"""The source distribution contains everything that a build needs, and its wheel works in an unrelated folder."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from lorax_server import __version__

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.slow  # builds the package
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def build(kind: str, source: Path, folder: Path) -> Path:
    """Build a distribution without compiling kernels, which takes minutes. tests/deploy/test_dockerfile.py does."""
    folder.mkdir()
    environ = {**os.environ, "CC": "false", "CXX": "false"}
    done = subprocess.run(
        [sys.executable, "-c", BUILD, kind, str(folder)],
        cwd=source,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in names:
        if (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "source" / name)
    return build("build_sdist", folder / "source", folder / "sdist")


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that is built from the source distribution."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return build("build_wheel", source, folder / "wheel")


def test_sdist_contains_every_file_of_the_package(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(["git", "ls-files", "lorax_server"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(tracked.stdout.splitlines()) <= names
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE"} <= names


def test_wheel_serves_all_python_versions(wheel: Path) -> None:
    assert wheel.name.startswith(f"lorax_server-{__version__}-py3-none-")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        text = archive.read(metadata).decode()
    assert f"Version: {__version__}" in text
    assert "License-Expression: Apache-2.0" in text


def test_wheel_without_native_kernels_has_platform_tag(sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    script = (source / "setup.py").read_text()
    assert 'sys.platform == "linux"' in script
    (source / "setup.py").write_text(script.replace('sys.platform == "linux"', "False"))
    wheel = build("build_wheel", source, tmp_path / "wheel")
    assert wheel.name.startswith(f"lorax_server-{__version__}-py3-none-")
    assert not wheel.name.endswith("-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]


def test_wheel_runs_in_unrelated_folder(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    (tmp_path / "work").mkdir()
    script = (
        "import lorax_server, lorax_server.cli as cli, lorax_server.cli.demo as demo, lorax_server.server.app\n"
        "assert lorax_server.__file__.startswith(%r), lorax_server.__file__\n"
        "assert (demo.DEMO_FOLDER / 'model' / 'config.json').is_file()\n"
        "cli.main(['--version'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script % str(tmp_path / "site")],
        cwd=tmp_path / "work",
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"lorax_server {__version__}\n"
