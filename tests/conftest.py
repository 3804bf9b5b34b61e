"""Options and fixtures for all tests."""

import gc
import logging
import os
from collections.abc import Generator, Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm

from lorax_server.engine.speculation.drafter import SpeculativeDrafter
from tests.demo.server import Demo, serving_demo
from tests.forks import forking, forking_engines
from tests.ranks import RankPool

pytest_plugins = ["tests.leaks"]
collect_ignore = ["clients"]  # they use a separate environment: make test-clients
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: run kernels in its interpreter
# No test uses torch.compile, but bitsandbytes imports the compiler, which takes two seconds per process.
os.environ["TORCHDYNAMO_DISABLE"] = "1"
# Disk cache of the engines: not in the user's home.
os.environ.setdefault("LORAX_CACHE", str(Path(__file__).parent.parent / ".cache/lorax"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where models run: cpu (the default) or cuda")
    tqdm.monitor_interval = 0  # otherwise the first progress bar starts a monitor thread


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Disable garbage collection during imports, which create a million objects and hardly any garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    let_torch_propagate()
    gc.collect()
    gc.freeze()  # otherwise each collection scans a million objects of imported modules


def let_torch_propagate() -> None:
    """Let torch's loggers propagate. Otherwise pytest adds its handlers to 80 loggers, six times per test."""
    for name, logger in logging.getLogger().manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True


# The slowest files run first, so that no process is left with them at the end. The slowest are Ray clusters
# and the Dockerfile environment.
LONG = (
    "tests/scale/",
    "tests/deploy/",
    "tests/demo/",
    "tests/browser/",
    "tests/e2e/",
    "tests/parity/",
    "tests/models/",
    "tests/engine/",
    "tests/worker/",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: [not item.nodeid.startswith(folder) for folder in LONG])
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


# Files that share slow fixtures, such as the browser or the demo, run in one process. So do files with a
# Ray cluster, since two cores are not enough for two clusters.
TOGETHER = {
    "tests/browser/": "browser",
    "tests/demo/": "demo",
    "tests/test_readme.py": "demo",
    "tests/scale/test_ray": "ray",
    "tests/scale/test_command.py": "ray",
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByWhatIsShared(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            shared = (name for start, name in TOGETHER.items() if nodeid.startswith(start))
            return next(shared, super()._split_scope(nodeid))

    return ByWhatIsShared(config, log)


AGREEMENT = pytest.StashKey[dict[str, tuple[float, float]]]()


@pytest.fixture(scope="session")
def agreement(request: pytest.FixtureRequest) -> dict[str, tuple[float, float]]:
    """Collect the largest differences to transformers by variant, for prefill and decode. Printed at the end."""
    return request.config.stash.setdefault(AGREEMENT, {})


ADAPTER_SCORES = pytest.StashKey[dict[str, tuple[str, float]]]()


@pytest.fixture(scope="session")
def adapter_scores(request: pytest.FixtureRequest) -> dict[str, tuple[str, float]]:
    """Collect the largest logit differences to PEFT by adapter. Printed at the end."""
    return request.config.stash.setdefault(ADAPTER_SCORES, {})


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send this process's tables to the process that prints them, if tests run in parallel."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        keys: list[pytest.StashKey[Any]] = [AGREEMENT, ADAPTER_SCORES]
        output["tables"] = [session.config.stash.get(key, {}) for key in keys]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    agreement, scores = getattr(node, "workeroutput", {}).get("tables", ({}, {}))
    node.config.stash.setdefault(AGREEMENT, {}).update(agreement)
    node.config.stash.setdefault(ADAPTER_SCORES, {}).update(scores)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    scores = config.stash.get(ADAPTER_SCORES, {})
    if scores:
        terminalreporter.section("largest difference of logits to PEFT, float32")
        for name, (kind, difference) in scores.items():
            terminalreporter.write_line(f"{name:30} {difference:.1e}   {kind}")
    result = config.stash.get(AGREEMENT, {})
    if not result:
        return
    terminalreporter.section("largest difference of logits to transformers, float32")
    for name, (prefill, decode) in sorted(result.items()):
        terminalreporter.write_line(f"{name:30} prefill {prefill:.1e}   decode {decode:.1e}")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.config.getoption("--device"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    seed()


def seed() -> None:
    """Seed torch as `torch.manual_seed` does, but skip missing devices, which takes milliseconds."""
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> None:
    """Seed before each shared fixture, so that its values do not depend on the first test that uses it."""
    if fixturedef.scope != "function":
        seed()


@pytest.fixture
def equal_step_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report the same time for every step to the real drafter, because step times vary on a busy machine."""
    record = SpeculativeDrafter.record_step

    def record_equally(drafter: SpeculativeDrafter, num_sequences: int, num_drafted: int, seconds: float) -> None:
        record(drafter, num_sequences, num_drafted, 1.0)

    monkeypatch.setattr(SpeculativeDrafter, "record_step", record_equally)


@pytest.fixture(scope="session")
def demo() -> Iterator[Demo]:
    """Run the server that `make serve` starts."""
    with serving_demo() as demo:
        yield demo


@pytest.fixture(scope="session")
def forks() -> Iterator[ForkServerContext]:
    with forking() as context:
        yield context


@pytest.fixture
def forked_engines(forks: ForkServerContext) -> Iterator[None]:
    """Fork the test's engines, because importing torch takes longer than the test."""
    with forking_engines(forks):
        yield


@pytest.fixture(scope="session")
def ranks(forks: ForkServerContext) -> Iterator[RankPool]:
    pool = RankPool(forks)
    yield pool
    pool.close()
