import torch

from lorax_server.kernels import PagedBatch


def test_what_a_batch_derives_it_derives_once() -> None:
    nothing = torch.zeros(0, dtype=torch.long)
    batch = PagedBatch(nothing, nothing, nothing, nothing)
    calls: list[str] = []

    def make(value: str) -> str:
        calls.append(value)
        return value

    assert batch.cached("a", lambda: make("first")) == "first"
    assert batch.cached("a", lambda: make("second")) == "first"
    assert batch.cached(("a", None), lambda: make("third")) == "third"
    assert calls == ["first", "third"]


def test_batches_share_nothing() -> None:
    nothing = torch.zeros(0, dtype=torch.long)
    first, second = (PagedBatch(nothing, nothing, nothing, nothing) for _ in range(2))
    first.cached("a", lambda: 1)
    assert second.cached("a", lambda: 2) == 2
