"""The routing balance of mixtures of experts."""

from contextlib import closing
from pathlib import Path

import pytest
import torch

from lorax_server.build import assemble_engine
from lorax_server.config import EngineConfig, ModelConfig
from lorax_server.distributed import FakeGroup
from lorax_server.kernels import Routing
from lorax_server.layers.moe import ExpertCounter
from lorax_server.models.custom_modeling.flash_llama_modeling import SparseMLP
from lorax_server.types import Request, SamplingParams, StopParams
from lorax_server.worker.expert_balance import MIN_TOKENS_PER_EXPERT, ExpertBalance
from lorax_server.worker.worker import build_paged_worker
from tests.paged import PagedDriver
from tests.parity.adapters.served import make_model
from tests.parity.variants import make_oracle

CPU = torch.device("cpu")


def add(counter: ExpertCounter, counts: list[int]) -> None:
    experts = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))[:, None]
    counter.add(Routing(experts, torch.ones(len(experts), 1)))


def test_imbalance_is_averaged_over_layers_and_covers_new_tokens_only() -> None:
    first, second = ExpertCounter(2, CPU), ExpertCounter(2, CPU)
    many = MIN_TOKENS_PER_EXPERT
    add(first, [1000 * many, 0])  # before the first window
    add(second, [1000 * many, 0])
    balance = ExpertBalance([first, second])
    assert balance.measure() is None
    add(first, [many, many])
    add(second, [2 * many, 0])
    assert balance.measure() == pytest.approx(1.5)
    assert balance.measure() is None
    add(first, [many // 2, 3 * many // 2 - 1])
    add(second, [many, many - 1])
    assert balance.measure() is None, "one token is missing"
    add(first, [0, 1])
    add(second, [0, 1])
    assert balance.measure() == pytest.approx((1.5 + 1) / 2)


def test_counters_match_routers_of_transformers() -> None:
    name = "qwen3moe"
    model, oracle = make_model(name, CPU), make_oracle(name)
    ids = list(range(3, 90))
    driver = PagedDriver(model)
    driver.forward([(driver.add(), ids)])
    with torch.no_grad():
        logits = oracle(torch.tensor([ids]), output_router_logits=True).router_logits
    counters = [module.counter for module in model.modules() if isinstance(module, SparseMLP)]
    assert len(counters) == len(logits)
    for counter, scores in zip(counters, logits, strict=True):
        chosen = scores.topk(oracle.config.num_experts_per_tok, dim=-1).indices
        assert counter.counts.tolist() == chosen.flatten().bincount(minlength=len(counter.counts)).tolist()


def test_engine_status_contains_the_imbalance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorax_server.worker.expert_balance.MIN_TOKENS_PER_EXPERT", 4)
    model = make_model("qwen3moe", CPU)
    config = EngineConfig(ModelConfig(Path("in-memory")), max_num_seqs=2, max_length=48, cache_bytes=2**20)
    with closing(assemble_engine(config, build_paged_worker(model, config, FakeGroup()))) as engine:
        assert engine.status().expert_imbalance == 0
        engine.add(Request(1, tuple(range(3, 23)), SamplingParams(), StopParams(max_new_tokens=1)))
        while engine.is_busy:
            engine.step()
        counts = torch.stack([module.counter.counts for module in model.modules() if isinstance(module, SparseMLP)])
        expected = (counts.amax(1) / counts.double().mean(1)).mean()
        assert engine.status().expert_imbalance == pytest.approx(float(expected))
        assert expected > 1
