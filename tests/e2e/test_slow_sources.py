"""Hanging and failing adapter sources affect only requests for their adapters."""

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from lorax_server.adapters.sources.local import LocalSource
from lorax_server.adapters.sources.source import AdapterFiles
from lorax_server.build import assemble_engine
from lorax_server.config import EngineConfig, ModelConfig
from lorax_server.distributed import FakeGroup
from lorax_server.errors import SourceError
from lorax_server.types import AdapterRef, Request, SamplingParams, StopParams
from lorax_server.worker.worker import build_paged_worker
from tests.parity.oracle import oracle_greedy
from tests.parity.test_engine import NEW_TOKENS, Models, Workload, make_models, make_prompts

THREAD_TIMEOUT_S = 60  # maximum wait for threads


class HangingSource(LocalSource):
    """A source that blocks until the gate is opened."""

    def __init__(self, root: Path) -> None:
        super().__init__([root])
        self.gate = threading.Event()

    def fetch(self, files: AdapterFiles, wanted: Sequence[str], token: str | None) -> Path:
        assert self.gate.wait(THREAD_TIMEOUT_S)
        return super().fetch(files, wanted, token)


class FailingSource(LocalSource):
    def find(self, name: str, token: str | None) -> AdapterFiles:
        raise SourceError(f"adapter {name!r}: nobody answers")


@pytest.fixture
def models(tmp_path: Path, device: torch.device) -> Models:
    return make_models("llama-gqa", tmp_path, device)


def test_engine_steps_while_sources_hang_or_fail(models: Models) -> None:
    root = models.folders[0].parent
    hanging, failing = HangingSource(root), FailingSource([root])
    config = EngineConfig(ModelConfig(Path("in-memory")), max_num_seqs=4, cache_bytes=2**20, adapter_bytes=2**20)
    engine = assemble_engine(
        config,
        build_paged_worker(models.ours, config, FakeGroup()),
        {"local": LocalSource([root]), "hanging": hanging, "failing": failing},
    )
    workload = Workload(engine, models.folders)
    prompts = make_prompts()
    # More requests than threads, to test the queue too.
    far = [engine.resolve([AdapterRef("hanging", f"rank-{(2, 5)[i % 2]}", token=str(i))]) for i in range(100)]
    lost = engine.resolve([AdapterRef("failing", "rank-2")])
    for i, prompt in enumerate(prompts):
        workload.add(i, prompt, adapter=i % 3)
    while engine.has_work:
        workload.step()
    for i, prompt in enumerate(prompts):
        expected = oracle_greedy(models.oracles[i % 3], prompt, NEW_TOKENS, models.tensors)
        assert workload.tokens(i)[: len(expected)] == expected
    assert not any(each.done() for each in far)
    while not lost.done():
        workload.step()
    with pytest.raises(SourceError, match="nobody answers"):
        lost.result()

    hanging.gate.set()
    while not all(each.done() for each in far):
        workload.step()
    stop = StopParams(max_new_tokens=NEW_TOKENS)
    for i, actual in enumerate(far[:2]):
        engine.add(Request(100 + i, prompts[1], SamplingParams(), stop, adapter_identity=actual.result().identity))
    workload.finish()
    for i in range(2):
        expected = oracle_greedy(models.oracles[1 + i], prompts[1], NEW_TOKENS, models.tensors)
        assert workload.tokens(100 + i)[: len(expected)] == expected
