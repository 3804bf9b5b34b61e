"""Checks at startup if the installed packages have the versions that lorax_server requires."""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires, version
from shlex import quote

from packaging.requirements import Requirement

from lorax_server.errors import ConfigError


def check_packages(requirements: Iterable[str] | None = None) -> None:
    """Raise `ConfigError` if another package has changed a dependency's version, as `lorax-client` does.

    The error names the package, both versions and the command that repairs the environment. By default, the
    requirements of lorax_server are checked.
    """
    mismatches = []
    for requirement in map(Requirement, _read_requirements() if requirements is None else requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            installed_version = version(requirement.name)
        except PackageNotFoundError:
            mismatches.append((requirement, "is not installed"))
            continue
        if not requirement.specifier.contains(installed_version, prereleases=True):
            mismatches.append((requirement, f"{installed_version} is installed"))
    if mismatches:
        problems = ", ".join(
            f"{needed.name} {installed_version}, but {_format_versions(needed)}"
            for needed, installed_version in mismatches
        )
        packages = " ".join(quote(f"{needed.name}{needed.specifier}") for needed, _ in mismatches)
        raise ConfigError(
            f"{problems}; another package may have changed this environment (lorax-client does, unless it is "
            f"installed with --no-deps); repair it with: pip install {packages}"
        )


def _read_requirements() -> list[str]:
    try:
        return requires("lorax_server") or []
    except PackageNotFoundError:  # run from a source tree that is not installed
        return []


def _format_versions(requirement: Requirement) -> str:
    return f"lorax_server needs {requirement.specifier}" if requirement.specifier else "lorax_server needs it"
