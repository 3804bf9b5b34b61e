import pytest
import torch

from lorax_server.adapters.weights import ModuleWeights
from lorax_server.distributed import FakeGroup
from lorax_server.errors import WeightsError
from lorax_server.layers.embedding import TensorParallelEmbedding
from lorax_server.layers.targets import collect_adapter_targets
from tests.builders import CPU, adapter_batch, memory_weights
from tests.lora import GivenAdapter, fill_arena


@pytest.mark.parametrize("vocab_size", [5, 8, 11])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_embedding_shards_sum_to_full_embedding(vocab_size: int, ranks: int) -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(vocab_size, 6, generator=generator)
    ids = torch.randint(vocab_size, (13,), generator=generator)
    ids[:2] = torch.tensor([0, vocab_size - 1])
    parts = []
    for rank in range(ranks):
        weights = memory_weights({"wte.weight": table}, rank=rank, ranks=ranks)
        parts.append(TensorParallelEmbedding(weights, "wte", vocab_size, 6)(ids))
    # Each token's row comes from exactly one rank, so the sum is exact.
    assert torch.equal(torch.stack(parts).sum(0), table[ids])


def test_rank_without_vocabulary_returns_zeros() -> None:
    weights = memory_weights({"wte.weight": torch.ones(5, 3)}, rank=3, ranks=4)
    out = TensorParallelEmbedding(weights, "wte", 5, 3)(torch.arange(5))
    assert torch.equal(out, torch.zeros(5, 3))


def test_embedding_size_mismatch_is_rejected() -> None:
    with pytest.raises(WeightsError, match=r"\(5, 3\), expected \(6, 3\)"):
        TensorParallelEmbedding(memory_weights({"wte.weight": torch.ones(5, 3)}), "wte", 6, 3)


def test_adapter_rows_replace_base_embedding_rows() -> None:
    embedding = TensorParallelEmbedding(memory_weights({"wte.weight": torch.arange(5.0).view(5, 1)}), "wte", 5, 1)
    rows = ModuleWeights(token_ids=(6, 3, 5), token_rows=torch.tensor([[60.0], [30.0], [50.0]]))
    low_rank = ModuleWeights(torch.arange(5.0).view(1, 5) * 100, torch.ones(1, 1), 2.0)
    adapters = [GivenAdapter({"wte": rows}, 7), GivenAdapter({"wte": low_rank}, 5)]
    arena = fill_arena(collect_adapter_targets(embedding), adapters, CPU, FakeGroup())
    ids = torch.tensor([3, 3, 3, 6, 5, 4, 4])
    out = embedding(ids, adapter_batch([0, 1, 2, 1, 1, 1, 2], arena))
    assert out.flatten().tolist() == [3, 30, 603, 60, 50, 4, 804]
    assert embedding(ids[:1], adapter_batch([0], arena)).tolist() == [[3]]
