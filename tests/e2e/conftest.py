from multiprocessing.context import ForkServerContext

import pytest


@pytest.fixture(scope="session", autouse=True)
def engines_are_forked(forks: ForkServerContext) -> None:
    """Fork all engines, including server engines, from a process with torch."""
