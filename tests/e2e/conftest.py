from multiprocessing.context import ForkServerContext

import pytest


@pytest.fixture(scope="session", autouse=True)
def engines_are_forked(forks: ForkServerContext) -> None:
    """Fork all engines, those of servers too: `serving` finds the process to fork from."""
