"""Fixtures for all tests of sources."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def no_proxy() -> Iterator[None]:
    """Our servers are on this machine, whatever stands between it and the others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setenv("no_proxy", "127.0.0.1")
        yield
