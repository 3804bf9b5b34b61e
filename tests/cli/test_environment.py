"""The environment check names the package, both versions and the repair command."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from lorax_server.cli.command import main
from lorax_server.cli.environment import check_packages
from lorax_server.errors import ConfigError


def test_installed_packages_are_accepted() -> None:
    check_packages()


def test_wrong_version_is_reported_with_repair_command() -> None:
    result = version("huggingface_hub")
    with pytest.raises(ConfigError) as caught:
        check_packages(["huggingface_hub>=99,<100", "numpy"])
    text = str(caught.value)
    assert text.startswith(f"huggingface_hub {result} is installed, but lorax_server needs ")
    assert "lorax-client" in text
    assert text.endswith("repair it with: pip install 'huggingface_hub<100,>=99'")


def test_missing_package_is_reported() -> None:
    with pytest.raises(ConfigError, match="no-such-package is not installed, but lorax_server needs it;"):
        check_packages(["no-such-package"])


def test_packages_for_extras_and_other_systems_are_ignored() -> None:
    check_packages(["no-such-package; extra == 'gpu'", "no-such-package; sys_platform == 'none'"])


def test_server_checks_packages_before_loading(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lorax_server.cli.environment.requires", lambda _: ["torch>=99"])
    assert main(["serve"]) == 2
    assert "but lorax_server needs >=99" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["serve"], ["download-weights", "owner/model"]])
def test_commands_exit_in_environment_with_old_hub_client(tmp_path: Path, command: list[str]) -> None:
    """Installing lorax-client with its dependencies leaves this package version behind."""
    package = tmp_path / "huggingface_hub-0.36.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: huggingface_hub\nVersion: 0.36.0\n")
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "lorax_server.cli", *command],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("lorax: huggingface_hub 0.36.0 is installed, but lorax_server needs ")
    assert line.endswith("pip install 'huggingface_hub<3,>=2.4'")
