"""Fixtures for GGUF tests."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty disk cache, so that no files of earlier tests are found."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("LORAX_CACHE", str(folder))
    return folder
