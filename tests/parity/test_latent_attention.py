"""Multi-head latent attention: the cache, and adapters on the projection from latents."""

import pytest
import torch

from lorax_server.distributed import FakeGroup
from lorax_server.kernels.select import ReferenceAttentionOps
from lorax_server.layers.targets import collect_adapter_targets
from lorax_server.worker.memory import block_bytes
from lorax_server.worker.worker import uses_cpu_graphs
from tests.lora import make_arena, random_factors
from tests.paged import PagedDriver
from tests.parity.adapters.served import make_model
from tests.parity.oracle import oracle_logits
from tests.parity.variants import VARIANTS, checkpoint, make_oracle

CPU = torch.device("cpu")
IDS = [5, 9, 33, 60, 7, 7, 81, 12, 3, 44, 90, 96]


def test_cache_stores_one_vector_per_token() -> None:
    model = make_model("deepseek2", CPU)
    cache = model.allocate_kv_cache(2, 4)
    assert all(keys is values and keys.shape == (2, 1, 4, 16 + 8) for keys, values in cache)
    assert block_bytes(model, 4) == 3 * 4 * 24 * 4  # layers, tokens, elements, bytes


def test_each_rank_stores_whole_latents() -> None:
    assert make_model("deepseek3", CPU, FakeGroup(1, 4)).kv_shape == (1, 24)


@pytest.mark.parametrize("name", ["deepseek2", "deepseek3-interleave"])
def test_adapters_after_kv_do_not_change_the_cache(name: str) -> None:
    """KV blocks are shared between adapters that `find_targets_after_kv` declares to have no effect on them."""
    model = make_model(name, CPU)
    targets = collect_adapter_targets(model)
    after = model.find_targets_after_kv()
    attention = {target.rpartition(".")[2] for target in after if ".2.self_attn." in target}
    assert {"kv_b_proj", "o_proj", "q_b_proj" if VARIANTS[name].settings["q_lora_rank"] else "q_proj"} <= attention
    factors = random_factors(targets, 3, 0)
    chosen = [{n: f for n, f in factors.items() if n in after}, {n: f for n, f in factors.items() if n not in after}]
    arena = make_arena(targets, [(each, 0.5) for each in chosen], CPU)
    caches, logits = [], []
    for adapter in (0, 1, 2):
        driver = PagedDriver(model)
        logits.append(driver.forward([(driver.add(adapter, len(IDS)), IDS)], arena)[0])
        caches.append(torch.stack([keys for keys, _ in driver.kv_cache]))
    assert not torch.equal(logits[0], logits[1])
    assert torch.equal(caches[0], caches[1])
    assert not torch.equal(caches[0], caches[2])


def test_model_runs_with_reference_attention() -> None:
    """GPUs have no kernels for this attention, so they use the reference ops without graphs."""
    oracle = make_oracle("deepseek3")
    tensors = checkpoint("deepseek3", oracle)
    model = make_model("deepseek3", CPU)
    assert uses_cpu_graphs(model, FakeGroup())
    model.ops = ReferenceAttentionOps(model.ops)
    assert not uses_cpu_graphs(model, FakeGroup())
    driver = PagedDriver(model)
    seq = driver.add()
    logits = torch.cat([driver.forward([(seq, ids)])[0] for ids in (IDS[:7], IDS[7:11], IDS[11:])])
    assert (logits - oracle_logits(oracle, IDS, len(IDS), tensors)).abs().max() < 5e-5
