import torch

from lorax_server.adapters.target import AdapterTarget
from lorax_server.distributed import FakeGroup, Shard, shard_evenly, whole


def test_a_whole_target_keeps_both_factors_and_turns_b() -> None:
    lora_a, lora_b = torch.arange(24.0).view(3, 8), torch.arange(18.0).view(6, 3)
    a, b = AdapterTarget("x", whole(8), whole(6), slice(0, 6)).cut(lora_a, lora_b)
    assert torch.equal(a, lora_a)
    assert torch.equal(b, lora_b.t())


def test_a_row_target_cuts_a_and_a_column_target_cuts_b() -> None:
    lora_a, lora_b = torch.arange(24.0).view(3, 8), torch.arange(18.0).view(6, 3)
    group = FakeGroup(1, 2)
    a, b = AdapterTarget("row", shard_evenly(group, 8, "x"), whole(6), slice(0, 6)).cut(lora_a, lora_b)
    assert torch.equal(a, lora_a[:, 4:])
    assert torch.equal(b, lora_b.t())
    a, b = AdapterTarget("column", whole(8), shard_evenly(group, 6, "x"), slice(0, 3)).cut(lora_a, lora_b)
    assert torch.equal(a, lora_a)
    assert torch.equal(b, lora_b[3:].t())


def test_a_fused_target_takes_its_ranges_in_order() -> None:
    lora_b = torch.arange(18.0).view(6, 3)
    _, b = AdapterTarget("fused", whole(8), Shard(6, ((1, 2), (4, 6))), slice(0, 3)).cut(torch.zeros(3, 8), lora_b)
    assert torch.equal(b, lora_b[[1, 4, 5]].t())
