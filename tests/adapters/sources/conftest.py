"""Fixtures for all tests of sources."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def no_proxy() -> Iterator[None]:
    """Reach servers on this machine directly, whatever proxy the environment names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setenv("no_proxy", "127.0.0.1")
        yield
