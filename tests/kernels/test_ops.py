import torch

from lorax_server.kernels import PagedBatch


def test_derived_value_is_computed_once() -> None:
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


def test_batches_have_separate_derived_values() -> None:
    nothing = torch.zeros(0, dtype=torch.long)
    first, second = (PagedBatch(nothing, nothing, nothing, nothing) for _ in range(2))
    first.cached("a", lambda: 1)
    assert second.cached("a", lambda: 2) == 2
