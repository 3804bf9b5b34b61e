"""The environment check names the package, both versions and the repair command."""

from importlib.metadata import version

import pytest

from lorax_server.cli.command import main
from lorax_server.cli.environment import check_packages
from lorax_server.errors import ConfigError


def test_installed_packages_are_accepted() -> None:
    check_packages()


def test_wrong_version_is_reported_with_repair_command() -> None:
    found = version("huggingface_hub").replace(".", r"\.")
    with pytest.raises(ConfigError) as caught:
        check_packages(["huggingface_hub>=99,<100", "numpy"])
    text = str(caught.value)
    assert text.startswith(f"huggingface_hub {found} is installed, but lorax_server needs ".replace("\\", ""))
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
