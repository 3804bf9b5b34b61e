"""Fixtures for adapter source tests."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def no_proxy() -> Iterator[None]:
    """Connect to local servers directly, without proxies from the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setenv("no_proxy", "127.0.0.1")
        yield
