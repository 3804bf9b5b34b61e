import pytest
import torch

from lorax_server.adapters.target import AdapterTarget, Kind
from lorax_server.distributed import FakeGroup, Shard, shard_evenly, shard_vocab, whole

LORA_A, LORA_B = torch.arange(24.0).view(3, 8), torch.arange(18.0).view(6, 3)
SECOND = FakeGroup(1, 2)


def cut(kind: Kind, inputs: Shard, outputs: Shard) -> tuple[torch.Tensor, torch.Tensor]:
    target = AdapterTarget("x", kind, inputs, outputs, slice(0, outputs.size), None, None)
    return target.cut(LORA_A, LORA_B)


@pytest.mark.parametrize("kind", [Kind.LINEAR, Kind.HEAD])
def test_a_whole_target_keeps_both_factors_and_turns_b(kind: Kind) -> None:
    a, b = cut(kind, whole(8), whole(6))
    assert torch.equal(a, LORA_A)
    assert torch.equal(b, LORA_B.t())


def test_a_row_target_cuts_a() -> None:
    a, b = cut(Kind.LINEAR, shard_evenly(SECOND, 8, "x"), whole(6))
    assert torch.equal(a, LORA_A[:, 4:])
    assert torch.equal(b, LORA_B.t())


@pytest.mark.parametrize("kind", [Kind.LINEAR, Kind.HEAD])
def test_a_column_target_cuts_b(kind: Kind) -> None:
    a, b = cut(kind, whole(8), shard_evenly(SECOND, 6, "x"))
    assert torch.equal(a, LORA_A)
    assert torch.equal(b, LORA_B[3:].t())


def test_a_fused_target_takes_its_ranges_in_order() -> None:
    _, b = cut(Kind.LINEAR, whole(8), Shard(6, ((4, 6), (1, 2))))
    assert torch.equal(b, LORA_B[[4, 5, 1]].t())


@pytest.mark.parametrize(("group", "tokens"), [(FakeGroup(), slice(0, 8)), (SECOND, slice(4, 8))])
def test_an_embedding_has_a_row_of_a_for_each_token_it_holds(group: FakeGroup, tokens: slice) -> None:
    a, b = cut(Kind.EMBEDDING, shard_vocab(group, 8), whole(6))
    assert torch.equal(a, LORA_A.t()[tokens])
    assert torch.equal(b, LORA_B.t())
