"""The engine on a GPU in a separate process, with default memory settings."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lorax_server.config import EngineConfig, ModelConfig, SourceConfig
from lorax_server.models.registry import build_model
from lorax_server.plan import StepPlan
from lorax_server.worker.runner import PagedRunner
from tests.e2e.test_engine_process import RANKS, check_concurrent_requests, make_config, write_models
from tests.parity.variants import VARIANTS, checkpoint, make_oracle, make_weights

pytestmark = pytest.mark.gpu


def test_copy_only_step_waits_for_adapter_copies() -> None:
    """The freed memory is reused by another adapter, which is copied on another CUDA stream."""
    tensors = checkpoint("llama-gqa", make_oracle("llama-gqa"))
    model = build_model(VARIANTS["llama-gqa"].config(), make_weights(tensors, torch.device("cuda")))
    runner = PagedRunner(model, num_blocks=4, block_size=4, max_num_seqs=1, max_length=16)
    none = np.zeros(0, dtype=np.int64)
    nobody = none.astype(bool)
    torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)
    runner.collect(runner.submit(StepPlan(1, none, none, none, nobody, nobody, none, (), none.reshape(0, 3))))
    assert torch.cuda.current_stream().query()


def on_gpu(config: EngineConfig) -> EngineConfig:
    return replace(config, model=replace(config.model, device="cuda", dtype="float32"))


def test_engine_uses_available_gpu_memory(tmp_path: Path) -> None:
    oracles = write_models("llama-gqa", tmp_path)
    sources = SourceConfig((tmp_path,))
    status = check_concurrent_requests(on_gpu(EngineConfig(ModelConfig(tmp_path / "model"), sources=sources)), oracles)
    assert status.num_blocks > 100
    assert status.adapters_on_device == len(RANKS)


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_too_little_gpu_memory_is_rejected(max_steps_in_flight: int, tmp_path: Path) -> None:
    oracles = write_models("llama-gqa", tmp_path)
    config = make_config(
        tmp_path, max_steps_in_flight=max_steps_in_flight, adapter_bytes=18_000, adapter_eviction_delay_s=0.0
    )  # for one at a time
    status = check_concurrent_requests(on_gpu(config), oracles)
    assert status.preemptions > 0
    assert status.chunks > 0
    assert status.prefix_tokens > 0
    assert status.adapters_evicted_from_device > 0
