import pytest
import torch

from lorax_server.adapters.target import AdapterTarget, TargetKind
from lorax_server.distributed import FakeGroup, Shard, make_full_shard, shard_evenly, shard_vocab

LORA_A, LORA_B = torch.arange(24.0).view(3, 8), torch.arange(18.0).view(6, 3)
SECOND = FakeGroup(1, 2)


def shard_factors(kind: TargetKind, inputs: Shard, outputs: Shard) -> tuple[torch.Tensor, torch.Tensor]:
    target = AdapterTarget("x", kind, inputs, outputs, slice(0, outputs.size), None, None)
    return target.shard_factors(LORA_A, LORA_B)


@pytest.mark.parametrize("kind", [TargetKind.LINEAR, TargetKind.HEAD])
def test_unsharded_target_keeps_factors(kind: TargetKind) -> None:
    a, b = shard_factors(kind, make_full_shard(8), make_full_shard(6))
    assert torch.equal(a, LORA_A)
    assert torch.equal(b, LORA_B.t())


def test_row_parallel_target_shards_a() -> None:
    a, b = shard_factors(TargetKind.LINEAR, shard_evenly(SECOND, 8, "x"), make_full_shard(6))
    assert torch.equal(a, LORA_A[:, 4:])
    assert torch.equal(b, LORA_B.t())


@pytest.mark.parametrize("kind", [TargetKind.LINEAR, TargetKind.HEAD])
def test_column_parallel_target_shards_b(kind: TargetKind) -> None:
    a, b = shard_factors(kind, make_full_shard(8), shard_evenly(SECOND, 6, "x"))
    assert torch.equal(a, LORA_A)
    assert torch.equal(b, LORA_B[3:].t())


def test_fused_target_concatenates_ranges() -> None:
    _, b = shard_factors(TargetKind.LINEAR, make_full_shard(8), Shard(6, ((4, 6), (1, 2))))
    assert torch.equal(b, LORA_B[[4, 5, 1]].t())


@pytest.mark.parametrize(("group", "tokens"), [(FakeGroup(), slice(0, 8)), (SECOND, slice(4, 8))])
def test_embedding_target_shards_a_by_token(group: FakeGroup, tokens: slice) -> None:
    a, b = shard_factors(TargetKind.EMBEDDING, shard_vocab(group, 8), make_full_shard(6))
    assert torch.equal(a, LORA_A.t()[tokens])
    assert torch.equal(b, LORA_B.t())
